// Attention over the cache. A node's bits depend on its own path alone: each score is one sum over
// the head's channels, and the sums over keys run over the committed slots and then the path, in
// order.
#pragma once
#include <algorithm>
#include <type_traits>

#include "counts.h"
#include "rows.h"

namespace aquiline {

// What one node sees: slots [first, common), then `path`, ascending slots at or after `common`.
// Its place in this sequence is a key's index (`first` counts as index `first`), for all nodes and
// whatever the slots: so sums that go by index have the same order in a tree and in a chain.
struct Seen {
  int first, common, depth;
  const int32_t* path;

  int end() const { return depth ? path[depth - 1] + 1 : common; }
};

constexpr int SCORE_SLOTS = 2 * LANES;  // slots whose scores are computed at once
constexpr int QUERY_TILE = 6;           // queries that share what is loaded
constexpr int MOST_QUERIES = 24;        // queries that share the transposed keys

// One key head of one row of the cache.
struct Head {
  const void *keys, *values;
  int dim, slots;  // slots that exist
  float scale;
};

struct Query {
  const char* q;  // float32, or bfloat16 where PAIRS
  Seen seen;
  char* out;
};

struct AttentionScratch {
  Ints* keys;     // SCORE_SLOTS transposed keys
  float* scores;  // MOST_QUERIES × width
  float* mixed;   // QUERY_TILE × padded dim
  size_t width;
};

template <class T>
constexpr bool PAIRS = std::is_same_v<T, Half> && HAS_PAIR_DOTS;

// Words that a key has in the transposed block: channels, or pairs of bfloat16.
template <class T>
inline int key_words(int dim) {
  return std::is_same_v<T, Half> ? dim / 2 : dim;
}

// Keys of SCORE_SLOTS slots with the channels slowest: [word][2 vectors of slots].
template <class T>
void transpose_keys(const Head& head, int slot, Ints* block) {
  const int words = key_words<T>(head.dim);
  for (int half = 0; half < 2; half++)
    for (int w = 0; w < words; w += LANES) {
      Ints r[LANES];
      const int count = lanes_at(w, words);
      for (int i = 0; i < LANES; i++) {
        // Slots beyond the last one are read as the last one; nobody uses their scores.
        const int s = std::min(slot + half * LANES + i, head.slots - 1);
        const T* key = (const T*)head.keys + (size_t)s * head.dim;
        r[i] = load_words_part(key + w * (sizeof(Ints) / LANES / sizeof(T)), count);
      }
      transpose(r);
      for (int i = 0; i < count; i++) block[(w + i) * 2 + half] = r[i];
    }
}

template <class T, int R>
void score_tile(const Query* queries, const Ints* block, int words, float scale, float* scores,
                size_t width) {
  Floats acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = Floats{};
  for (int w = 0; w < words; w++) {
    const Ints a = block[2 * w], b = block[2 * w + 1];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      if constexpr (PAIRS<T>) {
        const Ints x = broadcast_word(((const int32_t*)queries[r].q)[w]);
        acc[r][0] = pair_dot(acc[r][0], a, x);
        acc[r][1] = pair_dot(acc[r][1], b, x);
      } else if constexpr (std::is_same_v<T, Half>) {
        const float* q = (const float*)queries[r].q + 2 * w;
        acc[r][0] = fma(low_half(a), broadcast(q[0]), acc[r][0]);
        acc[r][1] = fma(low_half(b), broadcast(q[0]), acc[r][1]);
        acc[r][0] = fma(high_half(a), broadcast(q[1]), acc[r][0]);
        acc[r][1] = fma(high_half(b), broadcast(q[1]), acc[r][1]);
      } else {
        const Floats x = broadcast(((const float*)queries[r].q)[w]);
        acc[r][0] = fma((Floats)a, x, acc[r][0]);
        acc[r][1] = fma((Floats)b, x, acc[r][1]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) store(scores + r * width + i * LANES, acc[r][i] * broadcast(scale));
}

// mixed[r] += Σ weights[r · width + s] · values[s] over slots [begin, end), channels of V vectors;
// the last vector has `count` channels.
template <class T, int R, int V>
void mix_tile(const float* weights, size_t width, const T* values, int dim, int begin, int end,
              int count, float* mixed, size_t mixed_stride) {
  Floats acc[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) acc[r][v] = load(mixed + r * mixed_stride + v * LANES);
  for (int s = begin; s < end; s++) {
    Floats x[V];
    const T* value = values + (size_t)s * dim;
    for (int v = 0; v < V; v++) x[v] = V == 1 ? load_part(value, count) : load(value + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Floats w = broadcast(weights[r * width + s]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) acc[r][v] = fma(w, x[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(mixed + r * mixed_stride + v * LANES, acc[r][v]);
}

// Calls run(first, count) for `total` queries in tiles of nearly equal size.
template <class F>
INLINE void in_tiles(int total, F&& run) {
  const int tiles = (total + QUERY_TILE - 1) / QUERY_TILE;
  for (int i = 0, first = 0; i < tiles; i++) {
    const int count = total / tiles + (i < total % tiles);
    run(first, count);
    first += count;
  }
}

template <class T, int R>
void mix_rows(const float* weights, size_t width, const T* values, int dim, int begin, int end,
              float* mixed, size_t mixed_stride) {
  constexpr int V = WIDE_VECTORS ? 4 : R <= 3 ? 2 : 1;
  int c = 0;
  if constexpr (V > 1)
    for (; c + V * LANES <= dim; c += V * LANES)
      mix_tile<T, R, V>(weights, width, values + c, dim, begin, end, LANES, mixed + c,
                        mixed_stride);
  for (; c < dim; c += LANES)
    mix_tile<T, R, 1>(weights, width, values + c, dim, begin, end, lanes_at(c, dim), mixed + c,
                      mixed_stride);
}

// Scores by index → weights that sum to the returned total; zero before `first`.
inline float soften(const Seen& seen, float* scores) {
  const int length = seen.common + seen.depth;
  // Ascending slots: a score is never overwritten before it is read.
  for (int i = 0; i < seen.depth; i++) scores[seen.common + i] = scores[seen.path[i]];
  // Whole blocks, so that those of attend_tiles.h find zeros where there is nothing.
  const int begin = seen.first / SCORE_SLOTS * SCORE_SLOTS, end = padded(length, SCORE_SLOTS);
  for (int i = begin; i < seen.first; i++) scores[i] = -INFINITY;
  for (int i = length; i < end; i++) scores[i] = -INFINITY;
  Floats most = load(scores + begin);
  for (int i = begin + LANES; i < end; i += LANES) most = max(most, load(scores + i));
  const Floats top = broadcast(largest(most));
  Floats total{};
  for (int i = begin; i < end; i += LANES) {
    const Floats e = exponential(load(scores + i) - top);
    store(scores + i, e);
    total += e;
  }
  return sum(total);
}

// Up to QUERY_TILE queries: their weights (by index) times the values, in order.
template <class T>
void mix(const Head& head, const Query* queries, int count, const float* weights, size_t width,
         float* mixed) {
  const T* values = (const T*)head.values;
  const size_t stride = padded(head.dim, LANES);
  memset(mixed, 0, count * stride * sizeof(float));
  int begin = 0, end = INT32_MAX;  // slots that all of them see
  for (int r = 0; r < count; r++) {
    begin = std::max(begin, queries[r].seen.first);
    end = std::min(end, queries[r].seen.common);
  }
  end = std::max(begin, end);
  const auto alone = [&](int r, int from, int to) {
    if (from < to)
      mix_rows<T, 1>(weights + r * width, width, values, head.dim, from, to, mixed + r * stride,
                     stride);
  };
  for (int r = 0; r < count; r++)
    alone(r, queries[r].seen.first, std::min(begin, queries[r].seen.common));
  if (begin < end)
    by_count<QUERY_TILE>(count, [&]<int R>() {
      mix_rows<T, R>(weights, width, values, head.dim, begin, end, mixed, stride);
    });
  for (int r = 0; r < count; r++) {
    const Seen& seen = queries[r].seen;
    alone(r, end, seen.common);
    for (int i = 0; i < seen.depth; i++)
      mix_rows<T, 1>(weights + r * width + seen.common + i, width,
                     values + (size_t)seen.path[i] * head.dim, head.dim, 0, 1, mixed + r * stride,
                     stride);
  }
}

// At most MOST_QUERIES queries of one key head.
template <class T>
void attend_few(const Head& head, const Query* queries, int count, const AttentionScratch& scratch,
                bool halves) {
  int first = INT32_MAX, end = 0;
  for (int r = 0; r < count; r++) {
    first = std::min(first, queries[r].seen.first);
    end = std::max(end, queries[r].seen.end());
  }
  const int words = key_words<T>(head.dim);
  for (int s = first / SCORE_SLOTS * SCORE_SLOTS; s < end; s += SCORE_SLOTS) {
    transpose_keys<T>(head, s, scratch.keys);
    in_tiles(count, [&](int r, int tile) {
      float* scores = scratch.scores + r * scratch.width + s;
      by_count<QUERY_TILE>(tile, [&]<int R>() {
        score_tile<T, R>(queries + r, scratch.keys, words, head.scale, scores, scratch.width);
      });
    });
  }
  float totals[MOST_QUERIES];
  for (int r = 0; r < count; r++)
    totals[r] = soften(queries[r].seen, scratch.scores + r * scratch.width);
  const size_t stride = padded(head.dim, LANES);
  in_tiles(count, [&](int r, int tile) {
    const float* weights = scratch.scores + r * scratch.width;
    mix<T>(head, queries + r, tile, weights, scratch.width, scratch.mixed);
    for (int i = 0; i < tile; i++) {
      const Floats scale = broadcast(1.f / totals[r + i]);
      const Rows out{queries[r + i].out, 0, halves};
      for (int c = 0; c < head.dim; c += LANES)
        out.put(0, c, load(scratch.mixed + i * stride + c) * scale);
    }
  });
}

// Queries of one key head; their results in the form that `halves` names.
template <class T>
void attend(const Head& head, const Query* queries, int total, const AttentionScratch& scratch,
            bool halves) {
  const int pieces = (total + MOST_QUERIES - 1) / MOST_QUERIES;
  for (int i = 0, r = 0; i < pieces; i++) {
    const int count = total / pieces + (i < total % pieces);
    attend_few<T>(head, queries + r, count, scratch, halves);
    r += count;
  }
}

}  // namespace aquiline
