// Sizes of the tiles of registers, and the choice among the instances of a kernel by rows.
#pragma once
#include "vec.h"

namespace aquiline {

constexpr int BLOCK = 4;                            // vectors that callers ask for at once
constexpr int TILE_VECTORS = WIDE_VECTORS ? 4 : 2;  // vectors of a register tile
constexpr int TILE_TOKENS = WIDE_VECTORS ? 6 : 4;   // rows of a register tile

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
