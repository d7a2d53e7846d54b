// y = x Wᵀ + b for some rows of x: each weight is read once, and a row's bits do not depend on
// how many other rows there are.
//
// Layout of the weights: lines of 16 outputs, which are one or two vectors; in a line the inputs
// run slowest, and a lane holds one float32, a pair of bfloat16, four int8 or eight int4. This is
// also the layout of AMX tiles. Integers have a scale for each group of inputs, see coded.h, and
// bfloat16 may be squeezed to 12 bits, see squeezed.h.
#pragma once
#include <algorithm>
#include <vector>

#include "coded.h"
#include "squeezed.h"

namespace aquiline {

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

struct Matrix {
  const char* weight;
  const float* bias;       // one value a lane, or null
  const uint16_t* scales;  // of integers, float16: [vector][group][scale, with int4 also minimum]
  int32_t vectors;         // of outputs
  int32_t inputs;          // a multiple of INPUT_PAD
  int32_t kind;
  int32_t group;      // inputs of a scale: 32, or a multiple of 64 up to MOST_GROUP
  Squeezed squeezed;  // of BFLOAT16

  bool takes_halves() const { return kind == BFLOAT16 && (HAS_PAIR_DOTS || HAS_TILES); }
  bool takes_codes() const { return kind >= INT8; }
  int steps() const {  // lines
    return squeezed.tables ? inputs / UNIT_INPUTS * UNIT_LINES : inputs >> kind;
  }
  size_t vector_bytes() const { return (size_t)steps() * LANES * 4; }
  const char* at(int v) const { return weight + vector_offset(v, vector_bytes()); }
  size_t scale_stride() const {
    return (size_t)((inputs + group - 1) / group) * LANES * (kind == INT4 ? 2 : 1);
  }
};

// What a pass over a block fetches: from `next` on, or AHEAD of what it reads where that is null.
struct Ahead {
  const char* next;
  int lines, bytes;
};

// One step of a register tile, in slices: a word holds one slice of float32 or of bfloat16 pairs,
// or two where pairs are widened. A slice of the weights meets the same slice of every row.
struct PairDots {
  static constexpr int SLICES = 1;
  template <int>
  static INLINE Ints weight(Ints words) {
    return words;
  }
  template <int>
  static INLINE Ints input(const char* x, int k) {
    int32_t pair;
    memcpy(&pair, x + (size_t)k * 4, 4);
    return broadcast_word(pair);
  }
  static INLINE Floats add(Floats acc, Ints w, Ints x) { return pair_dot(acc, w, x); }
};
struct WidenedDots {  // bfloat16 weights, float32 rows
  static constexpr int SLICES = 2;
  template <int S>
  static INLINE Floats weight(Ints words) {
    return S ? high_half(words) : low_half(words);
  }
  template <int S>
  static INLINE Floats input(const char* x, int k) {
    return broadcast(((const float*)x)[2 * k + S]);
  }
  static INLINE Floats add(Floats acc, Floats w, Floats x) { return fma(w, x, acc); }
};
struct FloatDots {
  static constexpr int SLICES = 1;
  template <int>
  static INLINE Floats weight(Ints words) {
    return (Floats)words;
  }
  template <int>
  static INLINE Floats input(const char* x, int k) {
    return broadcast(((const float*)x)[k]);
  }
  static INLINE Floats add(Floats acc, Floats w, Floats x) { return fma(w, x, acc); }
};

// Adds slice S of word k; words(v) are vector v's. Whichever side has fewer vectors stays in
// registers, so that 3 × 4 and 6 × 2 sums fit into the 16 registers of AVX2.
template <class Dots, int S, int N, int V, class Words>
INLINE void add_slice(Floats (&acc)[N][V], const Rows& x, Words&& words, int k) {
  using Vector = decltype(Dots::template weight<S>(Ints{}));
  Vector kept[N < V ? N : V];
  if constexpr (N < V) {
#pragma GCC unroll 4
    for (int t = 0; t < N; t++) kept[t] = Dots::template input<S>(x.row(t), k);
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      const Vector w = Dots::template weight<S>(words(v));
#pragma GCC unroll 4
      for (int t = 0; t < N; t++) acc[t][v] = Dots::add(acc[t][v], w, kept[t]);
    }
  } else {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) kept[v] = Dots::template weight<S>(words(v));
#pragma GCC unroll 12
    for (int t = 0; t < N; t++) {
      const Vector input = Dots::template input<S>(x.row(t), k);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[t][v] = Dots::add(acc[t][v], kept[v], input);
    }
  }
}

template <class Dots, int N, int V>
__attribute__((noinline)) void register_tile(const Rows& x, const char* weights,
                                             size_t vector_bytes, int steps, const Ahead& ahead,
                                             float* out, size_t out_stride) {
  Floats acc[N][V];
  for (int t = 0; t < N; t++)
    for (int v = 0; v < V; v++) acc[t][v] = Floats{};
  for (int k = 0; k < steps; k++) {
    const char* here = weights + (size_t)k * LINE;
    if (!ahead.next) {
      const char* later = here + beyond<V>((size_t)k * LINE, vector_bytes);
      for (int v = 0; v < V; v += LINE_VECTORS)
        __builtin_prefetch(later + vector_offset(v, vector_bytes));
    } else {
      const char* next = ahead.next + (size_t)k * ahead.bytes;
      for (int i = 0; i < ahead.lines; i++) __builtin_prefetch(next + i * LINE, 0, 2);
    }
    const auto words = [&](int v) { return load_words(here + vector_offset(v, vector_bytes)); };
    add_slice<Dots, 0>(acc, x, words, k);
    if constexpr (Dots::SLICES > 1) add_slice<Dots, 1>(acc, x, words, k);
  }
  for (int t = 0; t < N; t++)
    for (int v = 0; v < V; v++) store(out + t * out_stride + v * LANES, acc[t][v]);
}

// `after`: what the passes fetch, the next block.
template <class Dots, int V>
void register_rows(const Matrix& m, const Rows& x, int n, int v, const char* after, float* out,
                   size_t out_stride) {
  const int passes = (n + tile_rows(V) - 1) / tile_rows(V);
  const Share share(V, passes);
  for (int i = 0, t = 0; i < passes; i++) {
    const int rows = n / passes + (i < n % passes);
    const char* next = after + (size_t)i * m.steps() * share.bytes;
    const Ahead ahead{share.lines ? next : nullptr, share.has(V, i) ? share.lines : 0, share.bytes};
    by_count<tile_rows(V)>(rows, [&]<int N>() {
      register_tile<Dots, N, V>(x.from(t), m.at(v), m.vector_bytes(), m.steps(), ahead,
                                out + t * out_stride, out_stride);
    });
    t += rows;
  }
}

// Calls run<V>(v, out) for the tiles of `count` vectors from v on.
template <class Run>
INLINE void by_tiles(int v, int count, bool four, float* out, Run&& run) {
  while (count > 0) {
    const int taken = tile_vectors(v, count, four);
    if (taken == 4)
      run.template operator()<4>(v, out);
    else if (taken == 2)
      run.template operator()<2>(v, out);
    else
      run.template operator()<1>(v, out);
    v += taken;
    count -= taken;
    out += taken * LANES;
  }
}

template <class Dots>
void register_block(const Matrix& m, const Rows& x, int n, int v, int count, float* out,
                    size_t out_stride) {
  by_tiles(v, count, n <= tile_rows(4), out, [&]<int V>(int at, float* to) {
    register_rows<Dots, V>(m, x, n, at, m.at(at + V), to, out_stride);
  });
}

#if CAN_SQUEEZE
// The tile of squeezed weights, whose words are put together in registers.
template <class Dots, int N, int V>
__attribute__((noinline)) void squeezed_tile(const Matrix& m, const Rows& x, int v, float* out,
                                             size_t out_stride) {
  Floats acc[N][V] = {};
  Unsqueezed from[V];
  for (int i = 0; i < V; i++) from[i] = {m.squeezed, m.at(v + i), v + i};
  for (int k = 0; k < m.inputs / 2; k += UNIT_INPUTS / 2) {
    const size_t later =
        beyond<V>((size_t)k / (UNIT_INPUTS / 2) * UNIT_LINES * LINE, m.vector_bytes());
    for (Unsqueezed& f : from) f.fetch(later);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      __m512i lower[V], upper[V];
#pragma GCC unroll 4
      for (int i = 0; i < V; i++) {
        lower[i] = from[i].lower(half);
        upper[i] = from[i].upper(half);
      }
      for (int word = 0; word < 2; word++) {
        const auto words = [&](int i) {
          return (Ints)(word ? _mm512_unpackhi_epi8(lower[i], upper[i])
                             : _mm512_unpacklo_epi8(lower[i], upper[i]));
        };
        add_slice<Dots, 0>(acc, x, words, k + 2 * half + word);
        if constexpr (Dots::SLICES > 1) add_slice<Dots, 1>(acc, x, words, k + 2 * half + word);
      }
    }
    for (Unsqueezed& f : from) f.next();
  }
  for (int t = 0; t < N; t++)
    for (int i = 0; i < V; i++) store(out + t * out_stride + i * LANES, acc[t][i]);
}

// Rows up to which a tile of squeezed weights has registers; more read words that were written once
// for all passes.
constexpr int squeezed_tile_rows(int V) { return V == 4 ? 4 : 12; }

template <class Dots, int V>
void squeezed_rows(const Matrix& m, const Rows& x, int n, int v, float* out, size_t out_stride) {
  constexpr int MOST = squeezed_tile_rows(V);
  if (n <= MOST)
    return by_count<MOST>(n, [&]<int N>() { squeezed_tile<Dots, N, V>(m, x, v, out, out_stride); });
  struct alignas(LINE) Line {
    char bytes[LINE];
  };
  static thread_local std::vector<Line> room;
  Matrix whole = m;
  whole.squeezed = {};
  room.resize((size_t)V * whole.steps());
  char* words = room[0].bytes;
  for (int i = 0; i < V; i++)
    unsqueeze({m.squeezed, m.at(v + i), v + i}, m.inputs, words + i * whole.vector_bytes());
  whole.weight = words - v * whole.vector_bytes();
  register_rows<Dots, V>(whole, x, n, v, m.at(v + V), out, out_stride);
}

template <class Dots>
void squeezed_block(const Matrix& m, const Rows& x, int n, int v, int count, float* out,
                    size_t out_stride) {
  by_tiles(v, count, n <= squeezed_tile_rows(4), out,
           [&]<int V>(int at, float* to) { squeezed_rows<Dots, V>(m, x, n, at, to, out_stride); });
}
#endif

inline void multiply_codes(const Matrix& m, const Rows& x, int n, int v, int count, float* out,
                           size_t out_stride, Tiles& tiles) {
  const CodedProduct p{x.data,           x.stride, m.weight, m.vector_bytes(), m.scales,
                       m.scale_stride(), m.inputs, m.group,  out - v * LANES,  out_stride};
  if (m.kind == INT8)
    coded_products<EightBits>(p, n, v, count, x.split, tiles);
  else
    coded_products<FourBits>(p, n, v, count, x.split, tiles);
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
      tile_products(
          {x.data, x.stride, m.at(v), m.vector_bytes(), m.inputs / TILE_INPUTS, out, out_stride}, n,
          count, tiles);
    else
      register_block<PairDots>(m, x, n, v, count, out, out_stride);
#else
    using Dots = std::conditional_t<HAS_PAIR_DOTS, PairDots, WidenedDots>;
#if CAN_SQUEEZE
    if (m.squeezed.tables)
      squeezed_block<Dots>(m, x, n, v, count, out, out_stride);
    else
#endif
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
