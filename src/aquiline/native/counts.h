// Sizes of the tiles of registers, and the choice among the instances of a kernel by rows.
#pragma once
#include "vec.h"

namespace aquiline {

constexpr int BLOCK = 4;        // vectors that callers ask for at once
constexpr int TILE_TOKENS = 6;  // rows of a register tile
constexpr int FEW_TOKENS = 3;   // rows whose sums fit beside four vectors into 16 registers

// Sixteen lanes of weights share a cache line: one vector of AVX-512, a pair of AVX2. Vectors of a
// line lie side by side, so that a product reads one stream and not two.
constexpr int LINE = 64;  // bytes
constexpr int LINE_VECTORS = LINE / (LANES * 4);

// Bytes from the weights of a vector that begins a line to those of the i-th vector after it.
constexpr size_t vector_offset(int i, size_t vector_bytes) {
  return i / LINE_VECTORS * LINE_VECTORS * vector_bytes + i % LINE_VECTORS * LANES * 4;
}

// Vectors that the next tile takes of `count` from vector v on; 16 registers hold four with `few` rows.
constexpr int tile_vectors(int v, int count, bool few) {
  if (v % LINE_VECTORS) return 1;
  return count >= 4 && (WIDE_VECTORS || few) ? 4 : count >= 2 ? 2 : 1;
}

// What the passes over a block of V vectors fetch of the next block into the second-level cache.
struct Share {
  int lines;  // that a step fetches; 0 with one pass, which fetches what it reads itself
  int bytes;  // from one step's lines to the next's

  Share(int V, int passes)
      : lines(passes == 1 ? 0 : LINE_VECTORS == 1 && passes < V ? 2 : 1),
        bytes(LINE_VECTORS == 1 ? lines * LINE : LINE / passes) {}
  // Whether pass i has something to fetch.
  bool has(int V, int i) const { return LINE_VECTORS > 1 || i * lines < V; }
};

// Calls run<N> for `count` = N ≤ MOST, which is 4 or 6.
template <int MOST, class Run>
INLINE void by_count(int count, Run&& run) {
  switch (count) {
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
      run.template operator()<(MOST < 5 ? MOST : 5)>();
      break;
    default:
      run.template operator()<MOST>();
      break;
  }
}

}  // namespace aquiline
