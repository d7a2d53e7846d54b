// Rows of activations, and what happens to them between the products.
#pragma once
#include <cstddef>

#include "vec.h"

namespace aquiline {

constexpr int INPUT_PAD = 64;  // inputs of a product are padded with zeros to a multiple of this

inline int padded(int size, int to) { return (size + to - 1) / to * to; }

// Rows of bfloat16 or float32, whichever the product that reads them wants; or of codes.
struct Rows {
  char* data = nullptr;
  size_t stride = 0;  // bytes
  bool half = false;
  bool split = false;  // codes as all upper bytes, then all lower ones: for AMX

  char* row(int t) const { return data + t * stride; }
  Rows from(int t) const { return {row(t), stride, half, split}; }
  void put(int t, int i, Floats v) const {
    if (half)
      store((Half*)row(t) + i, v);
    else
      store((float*)row(t) + i, v);
  }
  void zero(int t, int begin, int end) const {
    const size_t size = half ? sizeof(Half) : sizeof(float);
    if (begin < end) memset(row(t) + begin * size, 0, (end - begin) * size);
  }
};

// Bytes from one row to the next: not a power of two, so that rows do not share their cache sets.
inline size_t row_stride(int inputs, bool half) {
  return (size_t)inputs * (half ? sizeof(Half) : sizeof(float)) + 64;
}

inline int lanes_at(int i, int size) { return size - i < LANES ? size - i : LANES; }

// Values of a tensor, bfloat16 where `half`, from index `at` on.
inline void read_values(const void* from, bool half, size_t at, int size, float* to) {
  for (int i = 0; i < size; i += LANES) {
    const int count = lanes_at(i, size);
    store_part(to + i,
               half ? load_part((const Half*)from + at + i, count)
                    : load_part((const float*)from + at + i, count),
               count);
  }
}
inline void write_values(const float* from, int size, void* to, bool half, size_t at) {
  for (int i = 0; i < size; i += LANES) {
    const int count = lanes_at(i, size);
    const Floats v = load_part(from + i, count);
    if (half)
      store_part((Half*)to + at + i, v, count);
    else
      store_part((float*)to + at + i, v, count);
  }
}

// 1 / the root of the mean square of x[0 … size).
inline float inverse_rms(const float* x, int size, float eps) {
  Floats squares{};
  for (int i = 0; i < size; i += LANES) {
    const Floats v = load_part(x + i, lanes_at(i, size));
    squares = fma(v, v, squares);
  }
  return 1.f / std::sqrt(sum(squares) / (float)size + eps);
}

// x · weight / rms(x) of `size` values.
inline void normalise(const float* x, const float* weight, int size, float eps, float* out) {
  const Floats scale = broadcast(inverse_rms(x, size, eps));
  for (int i = 0; i < size; i += LANES) {
    const int count = lanes_at(i, size);
    store_part(out + i, load_part(x + i, count) * scale * load_part(weight + i, count), count);
  }
}

// The same into a row, from `at` on; whole vectors, zeros beyond `size`.
inline void normalise(const float* x, const float* weight, int size, float eps, const Rows& out,
                      int t, int at = 0) {
  const Floats scale = broadcast(inverse_rms(x, size, eps));
  for (int i = 0; i < size; i += LANES) {
    const int count = lanes_at(i, size);
    out.put(t, at + i, load_part(x + i, count) * scale * load_part(weight + i, count));
  }
}

inline void copy_row(const float* x, int size, const Rows& out, int t, int at = 0) {
  for (int i = 0; i < size; i += LANES) out.put(t, at + i, load_part(x + i, lanes_at(i, size)));
}

// x / (1 + e^-x), or GELU in its tanh form, which is x / (1 + e^-2u) with u = √(2/π)(x + 0.044715
// x³).
INLINE Floats activate(Floats x, bool gelu) {
  Floats power = -x;
  if (gelu) {
    const Floats inner = fma(x * x, x * broadcast(0.044715f), x);
    power = inner * broadcast(-1.5957691216f);
  }
  return x / (broadcast(1.f) + exponential(min(power, broadcast(80.f))));
}

// Turns the pairs (i, i + half) of one head by the angles of its position.
inline void rotate(float* x, const float* cosines, const float* sines, int half) {
  for (int i = 0; i < half; i += LANES) {
    const int count = lanes_at(i, half);
    const Floats a = load_part(x + i, count), b = load_part(x + half + i, count);
    const Floats c = load_part(cosines + i, count), s = load_part(sines + i, count);
    store_part(x + i, fma(a, c, -(b * s)), count);
    store_part(x + half + i, fma(b, c, a * s), count);
  }
}

}  // namespace aquiline
