// Vectors of LANES float32 or int32. The only file that knows instruction sets, with tiles.h.
//
// Sums of products are written with `fma` and nothing else: the build forbids the compiler to
// contract a * b + c, so that a formula gives the same bits wherever it is inlined.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace aquiline {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define WIDE_VECTORS 1
constexpr int LANES = 16;
#else
#define WIDE_VECTORS 0
constexpr int LANES = 8;
#endif

// Products of bfloat16 pairs with float32 sums.
#if WIDE_VECTORS && defined(__AVX512BF16__)
constexpr bool HAS_PAIR_DOTS = true;
#else
constexpr bool HAS_PAIR_DOTS = false;
#endif

using Half = uint16_t;  // the bits of a bfloat16

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

INLINE Floats load(const float* p) {
  Floats v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE Ints load_words(const void* p) {
  Ints v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float* p, Floats v) { memcpy(p, &v, sizeof v); }
INLINE Floats broadcast(float x) { return x - Floats{}; }
INLINE Ints broadcast_word(int32_t x) { return x - Ints{}; }

#if WIDE_VECTORS
INLINE Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
INLINE Floats max(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Floats min(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE Floats nearest(Floats a) { return (Floats)_mm512_roundscale_ps((__m512)a, 8); }
INLINE Ints to_int(Floats a) { return (Ints)_mm512_cvtps_epi32((__m512)a); }
#elif defined(__AVX2__) && defined(__FMA__)
INLINE Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
INLINE Floats max(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Floats min(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE Floats nearest(Floats a) { return (Floats)_mm256_round_ps((__m256)a, 8); }
INLINE Ints to_int(Floats a) { return (Ints)_mm256_cvtps_epi32((__m256)a); }
#else  // plain C++, for other processors
INLINE Floats fma(Floats a, Floats b, Floats c) {
  for (int i = 0; i < LANES; i++) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
}
INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }
INLINE Floats nearest(Floats a) {
  const Floats magic = broadcast(12582912.f);  // 1.5 · 2²³: no fraction is left beside it
  return (a + magic) - magic;
}
INLINE Ints to_int(Floats a) { return __builtin_convertvector(nearest(a), Ints); }
#endif

// The first `count` lanes; the others are zero, and their memory is not touched.
INLINE Floats load_part(const float* p, int count) {
#if WIDE_VECTORS
  return (Floats)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
#else
  if (count >= LANES) return load(p);
  Floats v{};
  memcpy(&v, p, count * sizeof(float));
  return v;
#endif
}
INLINE void store_part(float* p, Floats v, int count) {
#if WIDE_VECTORS
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), (__m512)v);
#else
  memcpy(p, &v, count * sizeof(float));
#endif
}
INLINE Ints load_words_part(const void* p, int count) {
#if WIDE_VECTORS
  return (Ints)_mm512_maskz_loadu_epi32((__mmask16)((1u << count) - 1), p);
#else
  if (count >= LANES) return load_words(p);
  Ints v{};
  memcpy(&v, p, count * sizeof(int32_t));
  return v;
#endif
}

// bfloat16: rounded to nearest even; NaN stays NaN.
INLINE Words half_bits(Floats v) {
  const Words u = (Words)v;
  const Words rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const Words nan = (u >> 16) | 0x40u;
  const Words is_nan = (Words)(v != v);
  return (rounded & ~is_nan) | (nan & is_nan);
}
INLINE void store(Half* p, Floats v) {
#if WIDE_VECTORS
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)half_bits(v)));
#else
  const Words b = half_bits(v);
  for (int i = 0; i < LANES; i++) p[i] = (Half)b[i];
#endif
}
INLINE void store_part(Half* p, Floats v, int count) {
#if WIDE_VECTORS
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << count) - 1),
                           _mm512_cvtepi32_epi16((__m512i)half_bits(v)));
#else
  const Words b = half_bits(v);
  for (int i = 0; i < count; i++) p[i] = (Half)b[i];
#endif
}
INLINE Floats load(const Half* p) {
#if WIDE_VECTORS
  const __m256i b = _mm256_loadu_si256((const __m256i*)p);
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  Words b;
  for (int i = 0; i < LANES; i++) b[i] = (uint32_t)p[i] << 16;
  return (Floats)b;
#endif
}
INLINE Floats load_part(const Half* p, int count) {
#if WIDE_VECTORS
  const __m256i b = _mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), p);
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
#else
  if (count >= LANES) return load(p);
  Words b{};
  for (int i = 0; i < count; i++) b[i] = (uint32_t)p[i] << 16;
  return (Floats)b;
#endif
}

// The two bfloat16 of each word, as float32.
INLINE Floats low_half(Ints v) { return (Floats)(v << 16); }
INLINE Floats high_half(Ints v) { return (Floats)(v & (int32_t)0xffff0000); }

// acc + the two products of each lane's bfloat16 pairs.
INLINE Floats pair_dot(Floats acc, Ints a, Ints b) {
#if WIDE_VECTORS && defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  acc = fma(low_half(a), low_half(b), acc);
  return fma(high_half(a), high_half(b), acc);
#endif
}

INLINE float sum(Floats v) {
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}
INLINE float largest(Floats v) {
  float most = v[0];
  for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
  return most;
}

// A bit for each lane whose sign is set.
INLINE uint32_t lanes_set(Ints v) {
#if WIDE_VECTORS
  return _mm512_movepi32_mask((__m512i)v);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps((__m256)v);
#else
  uint32_t set = 0;
  for (int i = 0; i < LANES; i++) set |= (uint32_t)(v[i] < 0) << i;
  return set;
#endif
}

// 0, 1, 2, …
INLINE Ints lane_numbers() {
  Ints v;
  for (int i = 0; i < LANES; i++) v[i] = i;
  return v;
}

// e^x for x ≤ 88 within 2 ulp; 0 below -87; NaN stays NaN.
INLINE Floats exponential(Floats x) {
  const Floats low = broadcast(-87.f);
  const Ints kept = ~(x <= low);
  x = (Floats)((Ints)x & kept);
  const Floats n = nearest(x * broadcast(1.44269504f));
  Floats r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + broadcast(1.f));
  const Floats power = (Floats)((to_int(n) + 127) << 23);
  return (Floats)((Ints)(p * power) & kept);
}

// LANES × LANES words.
INLINE void transpose(Ints* r) {
#if WIDE_VECTORS
  __m512i a[16], b[16];
  for (int i = 0; i < 8; i++) {
    a[2 * i] = _mm512_unpacklo_epi32((__m512i)r[2 * i], (__m512i)r[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)r[2 * i], (__m512i)r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int j = 0; j < 4; j++) {
    const __m512i even_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88);
    const __m512i even_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd);
    const __m512i odd_high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    r[j] = (Ints)_mm512_shuffle_i32x4(even_low, even_high, 0x88);
    r[8 + j] = (Ints)_mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    r[4 + j] = (Ints)_mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    r[12 + j] = (Ints)_mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
#elif defined(__AVX2__)
  __m256i a[8], b[8];
  for (int i = 0; i < 4; i++) {
    a[2 * i] = _mm256_unpacklo_epi32((__m256i)r[2 * i], (__m256i)r[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_epi32((__m256i)r[2 * i], (__m256i)r[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    b[4 * i] = _mm256_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  for (int j = 0; j < 4; j++) {
    r[j] = (Ints)_mm256_permute2x128_si256(b[j], b[4 + j], 0x20);
    r[4 + j] = (Ints)_mm256_permute2x128_si256(b[j], b[4 + j], 0x31);
  }
#else
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < i; j++) {
      const int32_t kept = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = kept;
    }
#endif
}

}  // namespace aquiline
