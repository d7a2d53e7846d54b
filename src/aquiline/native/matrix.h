// y = x Wᵀ + b for some rows of x: each weight is read once, and a row's bits do not depend on
// how many other rows there are.
//
// Layout of the weights: vectors of LANES outputs; in a vector the inputs run slowest, and a lane
// holds one float32 or a pair of bfloat16. This is also the layout of AMX tiles.
#pragma once
#include <algorithm>

#include "rows.h"
#include "tiles.h"

namespace aquiline {

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

struct Matrix {
  const char* weight;
  const float* bias;  // one value a lane, or null
  int32_t vectors;    // of outputs
  int32_t inputs;     // a multiple of INPUT_PAD
  int32_t kind;
  int32_t reserved;

  bool takes_halves() const { return kind == BFLOAT16 && (HAS_PAIR_DOTS || HAS_TILES); }
  int steps() const { return kind == BFLOAT16 ? inputs / 2 : inputs; }
  size_t vector_bytes() const { return (size_t)steps() * LANES * 4; }
  size_t stride() const { return row_stride(inputs, takes_halves()); }
};

constexpr int BLOCK = 4;                            // vectors that callers ask for at once
constexpr int TILE_VECTORS = WIDE_VECTORS ? 4 : 2;  // vectors of a register tile
constexpr int TILE_TOKENS = WIDE_VECTORS ? 6 : 4;   // rows of a register tile

// What a pass over a block fetches for later. With one pass, lines AHEAD of the present ones; with
// more, each fetches its share of the next block into the second-level cache.
struct Ahead {
  const char* next;
  int lines;  // a step; 0 with one pass
};

struct PairDots {
  static INLINE Floats step(Floats acc, Ints w, const char* x, int k) {
    int32_t pair;
    memcpy(&pair, x + (size_t)k * 4, 4);
    return pair_dot(acc, w, broadcast_word(pair));
  }
};
struct WidenedDots {  // bfloat16 weights, float32 rows
  static INLINE Floats step(Floats acc, Ints w, const char* x, int k) {
    const float* row = (const float*)x;
    acc = fma(low_half(w), broadcast(row[2 * k]), acc);
    return fma(high_half(w), broadcast(row[2 * k + 1]), acc);
  }
};
struct FloatDots {
  static INLINE Floats step(Floats acc, Ints w, const char* x, int k) {
    return fma((Floats)w, broadcast(((const float*)x)[k]), acc);
  }
};

template <class Dots, int N, int V>
__attribute__((noinline)) void register_tile(const Rows& x, const char* weights,
                                             size_t vector_bytes, int steps, const Ahead& ahead,
                                             float* out, size_t out_stride) {
  Floats acc[N][V];
  for (int t = 0; t < N; t++)
    for (int v = 0; v < V; v++) acc[t][v] = Floats{};
  for (int k = 0; k < steps; k++) {
    Ints w[V];
    const char* here = weights + (size_t)k * LANES * 4;
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) w[v] = load_words(here + v * vector_bytes);
    if (ahead.lines == 0) {
      for (int v = 0; v < V; v++) __builtin_prefetch(here + v * vector_bytes + AHEAD);
    } else {
      const char* next = ahead.next + (size_t)k * ahead.lines * 64;
      for (int i = 0; i < ahead.lines; i++) __builtin_prefetch(next + i * 64, 0, 2);
    }
#pragma GCC unroll 8
    for (int t = 0; t < N; t++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[t][v] = Dots::step(acc[t][v], w[v], x.row(t), k);
  }
  for (int t = 0; t < N; t++)
    for (int v = 0; v < V; v++) store(out + t * out_stride + v * LANES, acc[t][v]);
}

template <class Dots, int V>
void register_rows(const Matrix& m, const Rows& x, int n, const char* weights, const char* next,
                   float* out, size_t out_stride) {
  const int passes = (n + TILE_TOKENS - 1) / TILE_TOKENS;
  const int lines = passes == 1 ? 0 : passes < BLOCK ? 2 : 1;
  for (int i = 0, t = 0; i < passes; i++) {
    const int rows = n / passes + (i < n % passes);
    const Ahead ahead{next + (size_t)i * m.steps() * lines * 64, i * lines < V ? lines : 0};
    const auto run = [&]<int N>() {
      register_tile<Dots, N, V>(x.from(t), weights, m.vector_bytes(), m.steps(), ahead,
                                out + t * out_stride, out_stride);
    };
    switch (rows) {
      case 1:
        run.template operator()<1>();
        break;
      case 2:
        run.template operator()<2>();
        break;
      case 3:
        run.template operator()<3>();
        break;
      case 4:
        run.template operator()<4>();
        break;
      case 5:
        run.template operator() < TILE_TOKENS<5 ? 4 : 5>();
        break;
      default:
        run.template operator()<TILE_TOKENS>();
        break;
    }
    t += rows;
  }
}

template <class Dots>
void register_block(const Matrix& m, const Rows& x, int n, int v, int count, float* out,
                    size_t out_stride) {
  while (count > 0) {
    const char* weights = m.weight + v * m.vector_bytes();
    int taken = 1;
    if (TILE_VECTORS >= 4 && count >= 4) {
      taken = 4;
      register_rows<Dots, TILE_VECTORS>(m, x, n, weights, weights + 4 * m.vector_bytes(), out,
                                        out_stride);
    } else if (count >= 2) {
      taken = 2;
      register_rows<Dots, 2>(m, x, n, weights, weights + 2 * m.vector_bytes(), out, out_stride);
    } else {
      register_rows<Dots, 1>(m, x, n, weights, weights + m.vector_bytes(), out, out_stride);
    }
    v += taken;
    count -= taken;
    out += taken * LANES;
  }
}

// Outputs [v, v + count) · LANES of n rows into out[t · out_stride …]; count ≤ BLOCK.
inline void multiply(const Matrix& m, const Rows& x, int n, int v, int count, float* out,
                     size_t out_stride, Tiles& tiles) {
  if (m.kind == FLOAT32) {
    register_block<FloatDots>(m, x, n, v, count, out, out_stride);
  } else {
#if HAS_TILES
    if (tiles_allowed())
      tile_products({x.data, x.stride, m.weight + v * m.vector_bytes(), m.vector_bytes(),
                     m.inputs / TILE_INPUTS, out, out_stride},
                    n, count, tiles);
    else
      register_block<PairDots>(m, x, n, v, count, out, out_stride);
#else
    using Dots = std::conditional_t<HAS_PAIR_DOTS, PairDots, WidenedDots>;
    register_block<Dots>(m, x, n, v, count, out, out_stride);
#endif
  }
  (void)tiles;
  if (!m.bias) return;
  for (int t = 0; t < n; t++)
    for (int i = 0; i < count; i++) {
      float* y = out + t * out_stride + i * LANES;
      store(y, load(y) + load(m.bias + (v + i) * LANES));
    }
}

}  // namespace aquiline
