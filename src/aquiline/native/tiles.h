// AMX: products of 16 rows with 16 outputs over 32 bfloat16 inputs in one instruction.
//
// A row's result does not depend on the other rows of its tile, and few rows cost no more than
// reading the weights: where a machine has AMX, every bfloat16 product uses it, for one row too.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512F__) && defined(__linux__)
#define HAS_TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_TILES 0
#endif

namespace aquiline {

constexpr int TILE_ROWS = 16, TILE_INPUTS = 32;
constexpr size_t TILE_BYTES = 1024;
constexpr size_t AHEAD = 2048;  // bytes between what a product reads and what it fetches

// Asks the kernel for the tile registers, once per process.
inline bool tiles_allowed() {
#if HAS_TILES
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return allowed;
#else
  return false;
#endif
}

// The tile registers of one thread.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
#if HAS_TILES
    if (rows_) _tile_release();
#endif
  }

  // Gives the first `left` registers, which hold sums and the left sides of products, `rows` rows.
  void configure(int rows, int left = 5) {
#if HAS_TILES
    load(rows, left, 64);
#else
    (void)rows, (void)left;
#endif
  }

  // For products of bytes: sums in 0 to 3, `rows` rows of `inputs` bytes in 4 and 5, weights after.
  void configure_bytes(int rows, int inputs) {
#if HAS_TILES
    load(rows, 6, inputs);
#else
    (void)rows, (void)inputs;
#endif
  }

 private:
#if HAS_TILES
  // `bytes` of inputs in a product: the width of registers 4 and up, but not of the weights.
  void load(int rows, int left, int bytes) {
    if (rows == rows_ && left == left_ && bytes == bytes_) return;
    struct alignas(64) {
      uint8_t palette, start, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config;
    static_assert(sizeof config == 64);
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
      config.row_bytes[i] = 64;
      config.rows[i] = (uint8_t)(i < left ? rows : TILE_ROWS);
    }
    if (bytes < 64) {
      config.row_bytes[4] = config.row_bytes[5] = (uint16_t)bytes;
      config.rows[6] = config.rows[7] = (uint8_t)(bytes / 4);
    }
    // GCC takes the intrinsic to read 8 bytes only, and would drop stores of the others.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    rows_ = rows, left_ = left, bytes_ = bytes;
  }
#endif

  int rows_ = 0, left_ = 0, bytes_ = 0;
};

#if HAS_TILES
// What a tile product reads and writes: rows from x, vectors of weights, sums into out.
struct TileProduct {
  const char* x;
  size_t stride;  // bytes between rows
  const char* weights;
  size_t vector_bytes;  // between vectors of weights
  int steps;            // of TILE_INPUTS inputs
  float* out;
  size_t out_stride;  // floats between rows

  const char* row(int t) const { return x + t * stride; }
  float* sums(int t, int v) const { return out + t * out_stride + v * TILE_ROWS; }
};

// One tile of rows, up to four vectors. (The intrinsics want literal register numbers.)
template <int COUNT>
inline void tile_row(const TileProduct& p, int t) {
  _tile_zero(0);
  if constexpr (COUNT > 1) _tile_zero(1);
  if constexpr (COUNT > 2) _tile_zero(2);
  if constexpr (COUNT > 3) _tile_zero(3);
  const char *w = p.weights, *x = p.row(t);
  for (int k = 0; k < p.steps; k++, w += TILE_BYTES, x += TILE_INPUTS * 2) {
    for (int v = 0; v < COUNT; v++)
      for (int line = 0; line < 16; line++)
        _mm_prefetch(w + v * p.vector_bytes + AHEAD + line * 64, _MM_HINT_T0);
    _tile_loadd(4, x, p.stride);
    _tile_loadd(5, w, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (COUNT > 1) {
      _tile_loadd(6, w + p.vector_bytes, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (COUNT > 2) {
      _tile_loadd(7, w + 2 * p.vector_bytes, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (COUNT > 3) {
      _tile_loadd(5, w + 3 * p.vector_bytes, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  const size_t bytes = p.out_stride * sizeof(float);
  _tile_stored(0, p.sums(t, 0), bytes);
  if constexpr (COUNT > 1) _tile_stored(1, p.sums(t, 1), bytes);
  if constexpr (COUNT > 2) _tile_stored(2, p.sums(t, 2), bytes);
  if constexpr (COUNT > 3) _tile_stored(3, p.sums(t, 3), bytes);
}

// Two tiles of rows, one or two vectors. `lines` cache lines a step are fetched from `next` on.
template <int COUNT>
inline void tile_square(const TileProduct& p, int t, int u, const char* next, int lines) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const char *w = p.weights, *x = p.row(t), *y = p.row(u);
  for (int k = 0; k < p.steps; k++, w += TILE_BYTES, x += TILE_INPUTS * 2, y += TILE_INPUTS * 2) {
    for (int i = 0; i < lines; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    _tile_loadd(6, w, 64);
    _tile_loadd(4, x, p.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, y, p.stride);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (COUNT > 1) {
      _tile_loadd(7, w + p.vector_bytes, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  const size_t bytes = p.out_stride * sizeof(float);
  _tile_stored(0, p.sums(t, 0), bytes);
  _tile_stored(1, p.sums(u, 0), bytes);
  if constexpr (COUNT > 1) _tile_stored(2, p.sums(t, 1), bytes);
  if constexpr (COUNT > 1) _tile_stored(3, p.sums(u, 1), bytes);
}

// `count` ≤ 4 vectors for n rows.
inline void tile_products(TileProduct p, int n, int count, Tiles& tiles) {
  const int passes = (n + TILE_ROWS - 1) / TILE_ROWS, rows = (n + passes - 1) / passes;
  // The last tile overlaps the one before rather than reading beyond the last row.
  const auto start = [&](int i) { return i * rows < n - rows ? i * rows : n - rows; };
  if (passes == 1) {
    tiles.configure(rows, 5);
    switch (count) {
      case 1:
        tile_row<1>(p, 0);
        break;
      case 2:
        tile_row<2>(p, 0);
        break;
      case 3:
        tile_row<3>(p, 0);
        break;
      default:
        tile_row<4>(p, 0);
        break;
    }
    return;
  }
  tiles.configure(rows, 6);
  for (; count > 0; count -= 2, p.weights += 2 * p.vector_bytes, p.out += 2 * TILE_ROWS) {
    for (int i = 0; i < passes; i += 2) {
      // The first pass waits for memory; the next ones fetch what comes after these two vectors.
      const int lines = i == 0 || i > 4 ? 0 : 16;
      const char* next =
          p.weights + 2 * p.vector_bytes + (i / 2 - 1) * lines * 64 * (size_t)p.steps;
      if (count > 1)
        tile_square<2>(p, start(i), start(i + 1), next, lines);
      else
        tile_square<1>(p, start(i), start(i + 1), next, lines);
    }
  }
}
#endif

}  // namespace aquiline
