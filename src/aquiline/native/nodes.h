// Where the nodes of a forward go in the cache, and what they see.
#pragma once
#include <cstdio>
#include <vector>

#include "abi.h"
#include "attend.h"

namespace aquiline {

struct Node {
  int row, slot, position;
  int committed;
  int path_begin, depth;  // in Nodes::paths, slots at or after `committed`
};

struct Nodes {
  std::vector<Node> nodes;
  std::vector<int32_t> paths;
  std::vector<int32_t> positions;  // of the nodes in `paths`
  int span = 0;                    // slots in use

  // What a node sees in a layer with this window (0: everything).
  Seen seen(int i, int window) const {
    const Node& node = nodes[i];
    const int32_t* path = paths.data() + node.path_begin;
    int first = 0, common = node.committed, depth = node.depth;
    if (window && node.position - window + 1 > 0) first = node.position - window + 1;
    if (!depth) return {std::min(first, common), common, 0, path};  // causal: slots are positions
    if (window) {
      const int32_t* at = positions.data() + node.path_begin;
      int skipped = 0;
      while (skipped < depth && node.position - at[skipped] >= window) skipped++;
      path += skipped;
      depth -= skipped;
      if (skipped) first = common = common + skipped;
    }
    first = std::min(first, common);
    // A path that begins where the common part ends extends it, with the same indices.
    for (; depth && path[0] == common; path++, depth--) common++;
    return {first, common, depth, path};
  }
};

inline bool fail(Call& call, const char* what, long long value, long long limit) {
  snprintf(call.message, sizeof call.message, "%s %lld; allowed: 0 to %lld", what, value,
           limit - 1);
  return false;
}

// Reads and checks what a call says about its nodes.
inline bool read_nodes(const Stack& stack, Call& call, Nodes& result) {
  const int batch = call.batch, width = call.width, tail = call.offset + width;
  result.nodes.resize((size_t)batch * width);
  result.paths.clear();
  result.positions.clear();
  result.span = 0;
  for (int b = 0; b < batch; b++) {
    const int64_t row = call.rows[b], committed = call.committed[b];
    if (row < 0 || row >= call.cache_rows) return fail(call, "cache row", row, call.cache_rows);
    if (committed < 0 || committed + tail > call.capacity)
      return fail(call, "slot", committed + tail - 1, call.capacity);
    result.span = std::max(result.span, (int)committed + tail);
    for (int t = 0; t < width; t++) {
      const size_t i = (size_t)b * width + t;
      const int64_t position = call.positions[i];
      if (position < 0 || position >= call.angles)
        return fail(call, "position", position, call.angles);
      if (stack.entry == TOKENS && (call.tokens[i] < 0 || call.tokens[i] >= stack.vocab))
        return fail(call, "token", call.tokens[i], stack.vocab);
      Node& node = result.nodes[i];
      node = {(int)row,       (int)committed + call.offset + t, (int)position,
              (int)committed, (int)result.paths.size(),         0};
      if (!call.ancestors) {
        node.committed = node.slot + 1;
        continue;
      }
      const uint8_t* sees = call.ancestors + i * tail;
      for (int j = 0; j < tail; j++)
        if (sees[j]) {
          result.paths.push_back((int)committed + j);
          // Only without an offset are the positions of all slots known; windows need them.
          const bool known = call.offset == 0;
          result.positions.push_back(known ? (int)call.positions[(size_t)b * width + j] : 0);
        }
      node.depth = (int)result.paths.size() - node.path_begin;
    }
  }
  if (call.logits_at)
    for (int64_t i = 0; i < (int64_t)batch * call.asked; i++)
      if (call.logits_at[i] < 0 || call.logits_at[i] >= width)
        return fail(call, "logits position", call.logits_at[i], width);
  return true;
}

}  // namespace aquiline
