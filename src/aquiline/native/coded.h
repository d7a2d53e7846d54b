// Products of rows of codes with int8 or int4 weights that have a scale for each group of inputs.
//
// A group's sum is an exact integer; groups are added in float32, in order. All ways to compute a
// product therefore give the same bits, and the fastest for a number of rows may be taken.
#pragma once
#include <algorithm>

#include "codes.h"
#include "counts.h"
#include "tiles.h"

namespace aquiline {

constexpr int MOST_GROUP = 256;  // inputs: 256 · 127 · CODE_LIMIT is still an int32

// What a product of some rows with some vectors of weights reads and writes.
struct CodedProduct {
  const char* x;  // rows of codes
  size_t stride;
  const char* weights;
  size_t vector_bytes;     // between vectors of weights
  const uint16_t* scales;  // float16: a vector for each group, with int4 one more for its minimum
  size_t scale_stride;     // between vectors of weights, in values
  int inputs, group;
  float* out;
  size_t out_stride;  // in values

  const char* row(int t) const { return x + t * stride; }
  float* sums(int t, int v) const { return out + t * out_stride + v * LANES; }
  CodedProduct from(int t, int v) const {
    CodedProduct p = *this;
    p.x += t * stride;
    p.weights += vector_offset(v, vector_bytes);
    p.scales += v * scale_stride;
    p.out += t * out_stride + v * LANES;
    return p;
  }
};

INLINE Floats load_float16(const uint16_t* p) {
#if WIDE_VECTORS
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__) && defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  // The exponent moves to float32's bias by a product, which also normalises small values.
  Words bits;
  for (int i = 0; i < LANES; i++) bits[i] = p[i];
  const Floats magnitude = (Floats)((bits & 0x7fffu) << 13) * broadcast(0x1p112f);
  return (Floats)((Words)magnitude | ((bits & 0x8000u) << 16));
#endif
}

// acc + the two products of each lane's pairs of 16-bit integers.
INLINE Ints word_dot(Ints acc, Ints a, Ints b) {
#if WIDE_VECTORS && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif WIDE_VECTORS
  return acc + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return acc + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// How a lane's word of weights is taken apart into pairs that fit a row's words.
typedef int16_t WordPairs __attribute__((vector_size(LANES * 4)));

struct EightBits {
  static constexpr int INPUTS = 4;  // in a word
  static constexpr bool MINIMA = false;
  template <int J>
  static INLINE Ints pair(Ints w) {
    return J == 0 ? (Ints)((WordPairs)((WordPairs)w << 8) >> 8) : (Ints)((WordPairs)w >> 8);
  }
};
struct FourBits {
  static constexpr int INPUTS = 8;
  static constexpr bool MINIMA = true;
  template <int J>
  static INLINE Ints pair(Ints w) {
    const Ints kept = broadcast_word(0x000f000f);
    return (w >> (4 * J)) & kept;
  }
};

// A group's scales and minima of V vectors, and how its sums join those of a row.
template <class Bits, int V>
struct Group {
  Floats scale[V], minimum[V];

  INLINE Group(const uint16_t* scales, size_t stride) {
    for (int v = 0; v < V; v++) {
      scale[v] = load_float16(scales + v * stride);
      if constexpr (Bits::MINIMA) minimum[v] = load_float16(scales + v * stride + LANES);
    }
  }
  INLINE void add(float* out, int v, Ints sum, float codes) const {
    Floats y = load(out);
    if constexpr (Bits::MINIMA) y = fma(broadcast(codes), minimum[v], y);
    store(out, fma(__builtin_convertvector(sum, Floats), scale[v], y));
    (void)codes;
  }
};

template <int V>
INLINE void clear(const CodedProduct& p, int n) {
  for (int t = 0; t < n; t++)
    for (int v = 0; v < V; v++) store(p.sums(t, v), Floats{});
}

// The sum of the codes of the inputs [begin, end).
inline float sum_of(const char* row, int inputs, int begin, int end) {
  int32_t total = 0;
  for (int i = begin / SUM_INPUTS; i < end / SUM_INPUTS; i++) total += code_sums(row, inputs)[i];
  return (float)total;
}

template <class Bits, int N, int V>
__attribute__((noinline)) void coded_registers(const CodedProduct& p, const char* next, int lines,
                                               int bytes) {
  const char* here = p.weights;
  const uint16_t* scales = p.scales;
  clear<V>(p, N);
  for (int begin = 0; begin < p.inputs; begin += p.group) {
    const int end = std::min(begin + p.group, p.inputs);
    Ints acc[N][V] = {};
    for (int i = begin; i < end; i += Bits::INPUTS, here += LINE) {
      const size_t later = beyond<V>(here - p.weights, p.vector_bytes);
      Ints words[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const char* place = here + vector_offset(v, p.vector_bytes);
        words[v] = load_words(place);
        if (!next && v % LINE_VECTORS == 0) __builtin_prefetch(place + later);
      }
      const auto dots = [&]<int J>() {
        Ints pairs[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) pairs[v] = Bits::template pair<J>(words[v]);
#pragma GCC unroll 12
        for (int t = 0; t < N; t++) {
          int32_t x;
          memcpy(&x, p.row(t) + (size_t)i * 2 + J * 4, 4);
          const Ints input = broadcast_word(x);
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) acc[t][v] = word_dot(acc[t][v], pairs[v], input);
        }
      };
      dots.template operator()<0>();
      dots.template operator()<1>();
      if constexpr (Bits::INPUTS == 8) {
        dots.template operator()<2>();
        dots.template operator()<3>();
      }
      for (int j = 0; j < lines; j++) __builtin_prefetch(next + j * LINE, 0, 2);
      next += bytes;
    }
    const Group<Bits, V> group(scales, p.scale_stride);
#pragma GCC unroll 12
    for (int t = 0; t < N; t++) {
      const float codes = Bits::MINIMA ? sum_of(p.row(t), p.inputs, begin, end) : 0.f;
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) group.add(p.sums(t, v), v, acc[t][v], codes);
    }
    scales += (Bits::MINIMA ? 2 : 1) * LANES;
  }
}

#if HAS_TILES
// The group's weights of one vector as bytes: int8 lie so already.
template <class Bits>
INLINE const char* group_bytes(const char* here, int size, char* room) {
  if (Bits::INPUTS == 4) return here;
  const __m512i kept = _mm512_set1_epi8(0x0f);
  for (int i = 0; i < size; i += 8, here += 64, room += 128) {
    const __m512i w = _mm512_loadu_si512(here), u = _mm512_srli_epi16(w, 8);
    // A word holds nibbles 0 1 4 5 of its inputs: the lower byte becomes two bytes, then the upper.
    const auto spread = [&](__m512i x) {
      const __m512i low = _mm512_and_si512(x, _mm512_set1_epi16(0x00ff));
      return _mm512_and_si512(_mm512_or_si512(low, _mm512_slli_epi16(low, 4)), kept);
    };
    _mm512_store_si512(room, spread(w));
    _mm512_store_si512(room + 64, spread(u));
  }
  return room - (size_t)size * 16;
}

// Up to 16 rows with one or two vectors. Registers: sums of the upper and lower bytes for each
// vector (0 to 3), the rows' upper and lower bytes (4, 5), weights (6, 7).
template <class Bits, int V>
__attribute__((noinline)) void coded_tiles(const CodedProduct& p, int n, const char* next,
                                           int lines) {
  alignas(64) int32_t upper[V][TILE_ROWS * LANES], lower[V][TILE_ROWS * LANES];
  alignas(64) char room[V][MOST_GROUP * LANES];
  const char* here = p.weights;
  const uint16_t* scales = p.scales;
  const int step = std::min(p.group, 64), step_bytes = step * LANES;
  clear<V>(p, n);
  for (int begin = 0; begin < p.inputs; begin += p.group) {
    const int end = std::min(begin + p.group, p.inputs), size = end - begin;
    const int group_size = size * LANES * 4 / Bits::INPUTS;
    const char* weights[V];
    for (int v = 0; v < V; v++) {
      const char* w = here + v * p.vector_bytes;
      for (int i = 0; !lines && i < group_size; i += 64) _mm_prefetch(w + AHEAD + i, _MM_HINT_T0);
      weights[v] = group_bytes<Bits>(w, size, room[v]);
    }
    for (int i = 0; i < lines * size / 32; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (V > 1) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int i = 0; i < size; i += step) {
      const size_t at = (size_t)(i / step) * step_bytes;
      _tile_loadd(4, p.x + begin + i, p.stride);
      _tile_loadd(5, p.x + p.inputs + begin + i, p.stride);
      _tile_loadd(6, weights[0] + at, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 5, 6);
      if constexpr (V > 1) {
        _tile_loadd(7, weights[1] + at, 64);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
      }
    }
    _tile_stored(0, upper[0], 64);
    _tile_stored(1, lower[0], 64);
    if constexpr (V > 1) {
      _tile_stored(2, upper[1], 64);
      _tile_stored(3, lower[1], 64);
    }
    const Group<Bits, V> group(scales, p.scale_stride);
    for (int t = 0; t < n; t++) {
      const float codes = Bits::MINIMA ? sum_of(p.row(t), p.inputs, begin, end) : 0.f;
#pragma GCC unroll 2
      for (int v = 0; v < V; v++) {
        const Ints sum = (load_words(upper[v] + t * LANES) << 8) + load_words(lower[v] + t * LANES);
        group.add(p.sums(t, v), v, sum, codes);
      }
    }
    here += group_size;
    scales += (Bits::MINIMA ? 2 : 1) * LANES;
  }
}

template <class Bits>
void coded_tile_block(const CodedProduct& p, int n, int count, Tiles& tiles) {
  const int passes = (n + TILE_ROWS - 1) / TILE_ROWS, rows = (n + passes - 1) / passes;
  tiles.configure_bytes(rows, std::min(p.group, 64));
  for (int v = 0; v < count; v += 2)
    for (int i = 0; i < passes; i++) {
      // The last pass overlaps the one before. The first waits for memory, the second fetches what
      // comes after these vectors, and the others need nothing.
      const CodedProduct part = p.from(std::min(i * rows, n - rows), v);
      const int lines = i == 0 ? 0 : i == 1 ? 64 / Bits::INPUTS : -1;
      const char* next = p.weights + (v + 2) * p.vector_bytes;
      if (v + 1 < count)
        coded_tiles<Bits, 2>(part, rows, next, lines);
      else
        coded_tiles<Bits, 1>(part, rows, next, lines);
    }
}
#endif

template <class Bits, int V>
void coded_register_rows(const CodedProduct& p, int n) {
  const int passes = (n + tile_rows(V) - 1) / tile_rows(V);
  const Share share(V, passes);
  const size_t steps = p.vector_bytes / (LANES * 4);
  for (int i = 0, t = 0; i < passes; i++) {
    const int rows = n / passes + (i < n % passes);
    const char* next = p.weights + vector_offset(V, p.vector_bytes) + i * steps * share.bytes;
    by_count<tile_rows(V)>(rows, [&]<int N>() {
      coded_registers<Bits, N, V>(p.from(t, 0), share.lines ? next : nullptr,
                                  share.has(V, i) ? share.lines : 0, share.bytes);
    });
    t += rows;
  }
}

// Vectors [begin, begin + count), count ≤ BLOCK, for n rows.
template <class Bits>
void coded_products(const CodedProduct& p, int n, int begin, int count, bool split, Tiles& tiles) {
#if HAS_TILES
  if (split) {
    coded_tile_block<Bits>(p.from(0, begin), n, count, tiles);
    count = 0;
  }
#endif
  // Sixteen registers do not hold three rows' sums beside the pairs of four vectors.
  const bool four = WIDE_VECTORS && n <= tile_rows(4);
  for (int v = begin, taken; v < begin + count; v += taken) {
    taken = tile_vectors(v, begin + count - v, four);
    if (taken == 4)
      coded_register_rows<Bits, BLOCK>(p.from(0, v), n);
    else if (taken == 2)
      coded_register_rows<Bits, 2>(p.from(0, v), n);
    else
      coded_register_rows<Bits, 1>(p.from(0, v), n);
  }
  (void)split, (void)tiles;
}

}  // namespace aquiline
