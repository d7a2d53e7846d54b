// Rows of activations as 16-bit integers, one scale a row: what products with integer weights read.
//
// Sixteen bits and not eight: a row's largest values are tens of times its typical ones, and eight
// bits leave those three. The products below are exact in integers, so that the two ways in which a
// row is stored, for AMX and for vectors, give the same bits.
#pragma once
#include "rows.h"

namespace aquiline {

constexpr int CODE_LIMIT = 127 * 256;  // so that the upper byte, rounded, fits
constexpr int SUM_INPUTS = 32;         // inputs of a sum

typedef int16_t Shorts __attribute__((vector_size(LANES * 2)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

// A row of codes, its scale, and the sums of the codes of each SUM_INPUTS inputs.
inline size_t code_stride(int inputs) {
  return (size_t)inputs * 2 + 64 + padded(inputs / SUM_INPUTS * (int)sizeof(int32_t), 64);
}
inline const float& code_scale(const char* row, int inputs) {
  return *(const float*)(row + (size_t)inputs * 2);
}
inline const int32_t* code_sums(const char* row, int inputs) {
  return (const int32_t*)(row + (size_t)inputs * 2 + 64);
}

// Four inputs 0 1 2 3 as 0 2 1 3: the order in which words of weights are taken apart.
INLINE Shorts interleaved(Shorts x) {
#if WIDE_VECTORS
  return __builtin_shuffle(x, Shorts{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15});
#else
  return __builtin_shuffle(x, Shorts{0, 2, 1, 3, 4, 6, 5, 7});
#endif
}

INLINE int32_t sum(Ints v) {
  int32_t total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
}

// x[0 … inputs) into row t; `inputs` is a multiple of INPUT_PAD.
inline void quantise(const float* x, int inputs, const Rows& to, int t) {
  Floats most{}, zeros{};
  for (int i = 0; i < inputs; i += LANES) {
    const Floats v = load(x + i);
    most = max(most, max(v, -v));
    zeros = fma(v, Floats{}, zeros);  // NaN if any value is not finite
  }
  constexpr float SMALLEST = 1e-30f;  // its reciprocal is finite
  const float limit = largest(most);
  char* row = to.row(t);
  *(float*)(row + (size_t)inputs * 2) = limit / (float)CODE_LIMIT + sum(zeros);
  const Floats inverse = broadcast(limit > SMALLEST ? (float)CODE_LIMIT / limit : 0.f);
  int32_t* sums = (int32_t*)code_sums(row, inputs);
  for (int i = 0; i < inputs; i += SUM_INPUTS) {
    Ints total{};
    for (int j = i; j < i + SUM_INPUTS; j += LANES) {
      const Floats scaled = load(x + j) * inverse;
      const Ints q =
          to_int((Floats)((Ints)scaled & (Ints)(scaled == scaled)));  // NaN: the scale has it
      total += q;
      if (to.split) {
        const Ints upper = (q + 128) >> 8;
        const Bytes high = __builtin_convertvector(upper, Bytes);
        const Bytes low = __builtin_convertvector(q - (upper << 8), Bytes);
        memcpy(row + j, &high, sizeof high);
        memcpy(row + inputs + j, &low, sizeof low);
      } else {
        const Shorts words = interleaved(__builtin_convertvector(q, Shorts));
        memcpy(row + (size_t)j * 2, &words, sizeof words);
      }
    }
    sums[i / SUM_INPUTS] = sum(total);
  }
}

}  // namespace aquiline
