// Sizes of the tiles of registers, and the choice among the instances of a kernel by rows.
#pragma once
#include "tiles.h"
#include "vec.h"

namespace aquiline {

constexpr int BLOCK = 4;  // vectors that callers ask for at once

// Rows of a register tile of V vectors: their sums fill most of the 32 or 16 registers.
constexpr int tile_rows(int V) { return (WIDE_VECTORS ? 2 : 1) * (V == 4 ? 3 : 6); }

// Sixteen lanes of weights share a cache line: one vector of AVX-512, a pair of AVX2. Vectors of a
// line lie side by side, so that a product reads one stream and not two.
constexpr int LINE = 64;  // bytes
constexpr int LINE_VECTORS = LINE / (LANES * 4);

// Bytes from the weights of a vector that begins a line to those of the i-th vector after it.
constexpr size_t vector_offset(int i, size_t vector_bytes) {
  return i / LINE_VECTORS * LINE_VECTORS * vector_bytes + i % LINE_VECTORS * LANES * 4;
}

// Vectors that the next tile takes of `count` from vector v on: `four` where one pass over them
// does for all rows, since they hide more of the memory's latency than two.
constexpr int tile_vectors(int v, int count, bool four) {
  if (v % LINE_VECTORS) return 1;
  return count >= 4 && four ? 4 : count >= 2 ? 2 : 1;
}

// Bytes from place `at` of a tile's V vectors to what is fetched there: the same vectors further
// on, or towards their end the first lines of the next V.
template <int V>
INLINE size_t beyond(size_t at, size_t vector_bytes) {
  constexpr int skipped = V > LINE_VECTORS ? V - LINE_VECTORS : 0;
  return AHEAD + (at + AHEAD < LINE_VECTORS * vector_bytes ? 0 : skipped * vector_bytes);
}

// What the passes over a block of V vectors fetch of the next block into the second-level cache.
struct Share {
  int lines;  // that a step fetches; 0 with one pass, which fetches what it reads itself
  int bytes;  // from one step's lines to the next's

  Share(int V, int passes)
      : lines(passes == 1                       ? 0
              : LINE_VECTORS == 1 && passes < V ? 2
                                                : 1),
        bytes(LINE_VECTORS == 1 ? lines * LINE : LINE / passes) {}
  // Whether pass i has something to fetch.
  bool has(int V, int i) const { return LINE_VECTORS > 1 || i * lines < V; }
};

// Calls run<N> for `count` = N ≤ MOST.
template <int MOST, class Run>
INLINE void by_count(int count, Run&& run) {
  if constexpr (MOST > 1) {
    if (count < MOST) return by_count<MOST - 1>(count, run);
  }
  run.template operator()<MOST>();
}

}  // namespace aquiline
