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

// The tile registers of one thread: 0 … 3 sums, 4 rows, 5 … 7 weights.
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

  void configure(int rows) {
#if HAS_TILES
    if (rows == rows_) return;
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
      config.rows[i] = (uint8_t)(i < 5 ? rows : TILE_ROWS);
    }
    _tile_loadconfig(&config);
    rows_ = rows;
#else
    (void)rows;
#endif
  }

 private:
  int rows_ = 0;
};

#if HAS_TILES
// Sums of COUNT vectors of outputs for the configured rows. `ahead` is fetched meanwhile, `lines`
// cache lines a step.
template <int COUNT>
inline void tile_product(const char* x, size_t stride, const char* weights, size_t vector_bytes,
                         int steps, const char* ahead, int lines, float* out, size_t out_stride) {
  _tile_zero(0);
  if constexpr (COUNT > 1) _tile_zero(1);
  if constexpr (COUNT > 2) _tile_zero(2);
  if constexpr (COUNT > 3) _tile_zero(3);
  for (int k = 0; k < steps; k++) {
    const char* w = weights + k * TILE_BYTES;
    _tile_loadd(4, x + k * (TILE_INPUTS * 2), stride);
    for (int i = 0; i < lines; i++) _mm_prefetch(ahead + ((size_t)k * lines + i) * 64, _MM_HINT_T1);
    _tile_loadd(5, w, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (COUNT > 1) {
      _tile_loadd(6, w + vector_bytes, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (COUNT > 2) {
      _tile_loadd(7, w + 2 * vector_bytes, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (COUNT > 3) {
      _tile_loadd(5, w + 3 * vector_bytes, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  const size_t bytes = out_stride * sizeof(float);
  _tile_stored(0, out, bytes);
  if constexpr (COUNT > 1) _tile_stored(1, out + 16, bytes);
  if constexpr (COUNT > 2) _tile_stored(2, out + 32, bytes);
  if constexpr (COUNT > 3) _tile_stored(3, out + 48, bytes);
}
#endif

}  // namespace aquiline
