// y = x Wᵀ + b for some rows of x: each weight is read once, and a row's bits do not depend on
// how many other rows there are.
//
// Layout of the weights: vectors of LANES outputs; in a vector the inputs run slowest, and a lane
// holds one float32, a pair of bfloat16, four int8 or eight int4. This is also the layout of AMX
// tiles. Integers have a scale for each group of inputs, see coded.h.
#pragma once
#include <algorithm>

#include "coded.h"

namespace aquiline {

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

struct Matrix {
  const char* weight;
  const float* bias;       // one value a lane, or null
  const uint16_t* scales;  // of integers, float16: [vector][group][scale, with int4 also minimum]
  int32_t vectors;         // of outputs
  int32_t inputs;          // a multiple of INPUT_PAD
  int32_t kind;
  int32_t group;  // inputs of a scale: 32, or a multiple of 64 up to MOST_GROUP

  bool takes_halves() const { return kind == BFLOAT16 && (HAS_PAIR_DOTS || HAS_TILES); }
  bool takes_codes() const { return kind >= INT8; }
  int steps() const { return kind == FLOAT32 ? inputs : inputs >> kind; }
  size_t vector_bytes() const { return (size_t)steps() * LANES * 4; }
  size_t scale_stride() const {
    return (size_t)((inputs + group - 1) / group) * LANES * (kind == INT4 ? 2 : 1);
  }
};

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
    by_count<TILE_TOKENS>(rows, [&]<int N>() {
      register_tile<Dots, N, V>(x.from(t), weights, m.vector_bytes(), m.steps(), ahead,
                                out + t * out_stride, out_stride);
    });
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

inline void multiply_codes(const Matrix& m, const Rows& x, int n, int v, int count, float* out,
                           size_t out_stride, Tiles& tiles) {
  const CodedProduct p{x.data,         x.stride,
                       m.weight,       m.vector_bytes(),
                       m.scales,       m.scale_stride(),
                       m.inputs,       m.group,
                       out - v * LANES, out_stride};
  if (m.kind == INT8)
    coded_products<EightBits>(p.from(0, v), n, count, x.split, tiles);
  else
    coded_products<FourBits>(p.from(0, v), n, count, x.split, tiles);
  for (int t = 0; t < n; t++) {
    const Floats scale = broadcast(code_scale(x.row(t), m.inputs));
    for (int i = 0; i < count; i++) {
      float* y = out + t * out_stride + i * LANES;
      store(y, load(y) * scale);
    }
  }
}

// Outputs [v, v + count) · LANES of n rows into out[t · out_stride …]; count ≤ BLOCK.
inline void multiply(const Matrix& m, const Rows& x, int n, int v, int count, float* out,
                     size_t out_stride, Tiles& tiles) {
  if (m.takes_codes()) {
    multiply_codes(m, x, n, v, count, out, out_stride, tiles);
  } else if (m.kind == FLOAT32) {
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

// Whether rows of codes are split for AMX. Fewer rows are faster on vectors; the bits are the same.
constexpr int FEW_ROWS = 4;
inline bool splits(int n) { return tiles_allowed() && n > FEW_ROWS; }

}  // namespace aquiline
