// Attention on AMX, for bfloat16 caches and head dimensions that are multiples of TILE_INPUTS.
//
// The order of sums is that of attend.h, in blocks: scores are sums over channels, and results are
// sums over blocks of BLOCK_SLOTS indices, each a fixed sequence of tile products. A node's index
// is its place on its path, so that committed slots are shared by all queries, and the rest of a
// path is gathered into blocks of its own. Weights enter as two bfloat16, which keeps 16 bits of
// them.
#pragma once
#include "attend.h"
#include "tiles.h"

namespace aquiline {

constexpr int BLOCK_SLOTS = 32;   // inputs of a tile product
constexpr int SCORE_BLOCK = 64;   // slots whose scores are computed at once
constexpr int TILE_LANES = 16;    // outputs of a tile product
constexpr int TILE_QUERIES = 16;  // rows of a tile

struct TileScratch {
  char* values;    // packed blocks of values: [block][dim / 16] tiles
  char* gathered;  // one block of a path
  char* weights;   // [block][high, low] tiles
  char* queries;   // [dim / 32] tiles
  char* edge;      // SCORE_BLOCK keys where the cache ends
  float* scores;   // TILE_QUERIES × width
  float* raw;      // SCORE_BLOCK × TILE_QUERIES
  float* mixed;    // 2 · TILE_QUERIES × dim
  size_t width;
};

inline bool attends_with_tiles(int dim, bool half) {
  return half && dim % TILE_INPUTS == 0 && HAS_PAIR_DOTS && tiles_allowed();
}

#if HAS_TILES && defined(__AVX512BF16__)

// Pairs of slots interleaved, as the right side of a product: `value_of(i)` points to the values of
// the block's index i, or is null where there are none.
template <class F>
INLINE void pack_block(int dim, F&& value_of, char* tiles) {
  alignas(64) static const uint16_t order[2][32] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
  for (int pair = 0; pair < BLOCK_SLOTS / 2; pair++) {
    const Half *a = value_of(2 * pair), *b = value_of(2 * pair + 1);
    char* to = tiles + pair * 64;
    for (int c = 0; c < dim; c += 2 * TILE_LANES, to += 2 * TILE_BYTES) {
      const __m512i x = a ? _mm512_loadu_si512(a + c) : _mm512_setzero_si512();
      const __m512i y = b ? _mm512_loadu_si512(b + c) : _mm512_setzero_si512();
      _mm512_store_si512(to, _mm512_permutex2var_epi16(x, low, y));
      _mm512_store_si512(to + TILE_BYTES, _mm512_permutex2var_epi16(x, high, y));
    }
  }
}

// BLOCK_SLOTS weights as a sum of two bfloat16.
INLINE void split_weights(const float* weights, char* high, char* low) {
  const __m512 a = (__m512)load(weights), b = (__m512)load(weights + LANES);
  const __m512i top = (__m512i)_mm512_cvtne2ps_pbh(b, a);
  const __m512 rest_a = _mm512_sub_ps(a, (__m512)load((const Half*)&top));
  const __m512 rest_b = _mm512_sub_ps(b, (__m512)load((const Half*)&top + LANES));
  _mm512_store_si512(high, top);
  _mm512_store_si512(low, (__m512i)_mm512_cvtne2ps_pbh(rest_b, rest_a));
}

// Scores of up to TILE_QUERIES queries against slots [begin, end).
inline void score_with_tiles(const Head& head, const Query* queries, int count, int begin, int end,
                             const TileScratch& s, Tiles& tiles) {
  const int chunks = head.dim / TILE_INPUTS;
  for (int c = 0; c < chunks; c++) {  // queries as the right side: channels slowest
    Ints r[LANES];
    for (int i = 0; i < TILE_QUERIES; i++)
      r[i] = i < count ? load_words((const int32_t*)queries[i].q + c * LANES) : Ints{};
    transpose(r);
    memcpy(s.queries + c * TILE_BYTES, r, TILE_BYTES);
  }
  tiles.configure(TILE_ROWS);
  const size_t key_bytes = head.dim * sizeof(Half);
  for (int slot = begin; slot < end; slot += SCORE_BLOCK) {
    const char* keys = (const char*)head.keys + slot * key_bytes;
    if (slot + SCORE_BLOCK > head.slots) {
      memset(s.edge, 0, SCORE_BLOCK * key_bytes);
      memcpy(s.edge, keys, (head.slots - slot) * key_bytes);
      keys = s.edge;
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int c = 0; c < chunks; c++) {
      const char* k = keys + c * 64;
      _tile_loadd(5, s.queries + c * TILE_BYTES, 64);
      _tile_loadd(4, k, key_bytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(4, k + 16 * key_bytes, key_bytes);
      _tile_dpbf16ps(1, 4, 5);
      _tile_loadd(4, k + 32 * key_bytes, key_bytes);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(4, k + 48 * key_bytes, key_bytes);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, s.raw, 64);
    _tile_stored(1, s.raw + 16 * TILE_QUERIES, 64);
    _tile_stored(2, s.raw + 32 * TILE_QUERIES, 64);
    _tile_stored(3, s.raw + 48 * TILE_QUERIES, 64);
    const Floats scale = broadcast(head.scale);
    for (int part = 0; part < SCORE_BLOCK; part += LANES) {
      Ints r[LANES];
      for (int i = 0; i < LANES; i++) r[i] = load_words(s.raw + (part + i) * TILE_QUERIES);
      transpose(r);
      for (int i = 0; i < count; i++)
        store(s.scores + i * s.width + slot + part, (Floats)r[i] * scale);
    }
  }
}

// mixed += weights · values over consecutive blocks, TILES · 16 channels.
template <int TILES>
INLINE void mix_blocks(const char* weights, const char* values, size_t value_bytes, int blocks,
                       float* mixed, size_t stride) {
  _tile_loadd(0, mixed, stride);
  if constexpr (TILES > 1) _tile_loadd(1, mixed + 16, stride);
  if constexpr (TILES > 2) _tile_loadd(2, mixed + 32, stride);
  if constexpr (TILES > 3) _tile_loadd(3, mixed + 48, stride);
  for (int b = 0; b < blocks; b++, weights += 2 * TILE_BYTES, values += value_bytes) {
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, weights + TILE_BYTES, 64);
    _tile_loadd(6, values, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(0, 5, 6);
    if constexpr (TILES > 1) {
      _tile_loadd(7, values + TILE_BYTES, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(1, 5, 7);
    }
    if constexpr (TILES > 2) {
      _tile_loadd(6, values + 2 * TILE_BYTES, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (TILES > 3) {
      _tile_loadd(7, values + 3 * TILE_BYTES, 64);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, mixed, stride);
  if constexpr (TILES > 1) _tile_stored(1, mixed + 16, stride);
  if constexpr (TILES > 2) _tile_stored(2, mixed + 32, stride);
  if constexpr (TILES > 3) _tile_stored(3, mixed + 48, stride);
}

inline void mix_channels(int dim, const char* weights, const char* values, int blocks,
                         float* mixed) {
  const size_t stride = dim * sizeof(float), value_bytes = dim / TILE_LANES * TILE_BYTES;
  int c = 0;
  for (; c + 64 <= dim; c += 64)
    mix_blocks<4>(weights, values + c / 16 * TILE_BYTES, value_bytes, blocks, mixed + c, stride);
  if (c < dim)
    mix_blocks<2>(weights, values + c / 16 * TILE_BYTES, value_bytes, blocks, mixed + c, stride);
}

// One past the last index of a query whose values all its neighbours can share.
inline int shared_end(const Seen& seen) {
  return seen.depth ? seen.common / BLOCK_SLOTS * BLOCK_SLOTS : padded(seen.common, BLOCK_SLOTS);
}

// The blocks of a path that follow the shared ones, for the queries [r, r + same) of one node.
inline void mix_path(const Head& head, const Seen& seen, int r, int same, const TileScratch& s) {
  const int length = seen.common + seen.depth;
  for (int at = shared_end(seen); at < length; at += BLOCK_SLOTS) {
    pack_block(
        head.dim,
        [&](int i) -> const Half* {
          const int index = at + i;
          if (index < seen.first || index >= length) return nullptr;
          const int slot = index < seen.common ? index : seen.path[index - seen.common];
          return (const Half*)head.values + (size_t)slot * head.dim;
        },
        s.gathered);
    memset(s.weights, 0, 2 * TILE_BYTES);  // other rows of the tile stay as they are
    for (int i = 0; i < same; i++)
      split_weights(s.scores + (r + i) * s.width + at, s.weights + i * 64,
                    s.weights + TILE_BYTES + i * 64);
    mix_channels(head.dim, s.weights, s.gathered, 1, s.mixed + (size_t)r * head.dim);
  }
}

// Up to TILE_QUERIES queries; `values` are packed from index `begin`.
inline void attend_tile(const Head& head, const Query* queries, int count, int begin,
                        const TileScratch& s, Tiles& tiles, bool halves) {
  int first = INT32_MAX, end = 0, shared = 0;
  for (int r = 0; r < count; r++) {
    first = std::min(first, queries[r].seen.first);
    end = std::max(end, queries[r].seen.end());
    shared = std::max(shared, shared_end(queries[r].seen));
  }
  score_with_tiles(head, queries, count, first / SCORE_BLOCK * SCORE_BLOCK, end, s, tiles);
  first = first / BLOCK_SLOTS * BLOCK_SLOTS;
  const int blocks = std::max(0, (shared - first) / BLOCK_SLOTS);
  float totals[TILE_QUERIES];
  for (int r = 0; r < count; r++) {
    const Seen& seen = queries[r].seen;
    float* scores = s.scores + r * s.width;
    totals[r] = soften(seen, scores);
    const int own_begin = seen.first / BLOCK_SLOTS * BLOCK_SLOTS, own_end = shared_end(seen);
    for (int b = 0; b < blocks; b++) {
      const int at = first + b * BLOCK_SLOTS;
      char* to = s.weights + b * 2 * TILE_BYTES + r * 64;
      if (at >= own_begin && at < own_end) {
        split_weights(scores + at, to, to + TILE_BYTES);
      } else {
        _mm512_store_si512(to, _mm512_setzero_si512());
        _mm512_store_si512(to + TILE_BYTES, _mm512_setzero_si512());
      }
    }
  }
  memset(s.mixed, 0, count * head.dim * sizeof(float));
  tiles.configure(count, 6);
  const size_t block_bytes = head.dim / TILE_LANES * TILE_BYTES;
  mix_channels(head.dim, s.weights, s.values + (first - begin) / BLOCK_SLOTS * block_bytes, blocks,
               s.mixed);
  for (int r = 0, same = 1; r < count; r += same) {
    const Seen& seen = queries[r].seen;
    for (same = 1; r + same < count && queries[r + same].seen.path == seen.path;) same++;
    if (seen.depth) mix_path(head, seen, r, same, s);
  }
  for (int r = 0; r < count; r++) {
    const Floats scale = broadcast(1.f / totals[r]);
    const Rows out{queries[r].out, 0, halves};
    for (int c = 0; c < head.dim; c += LANES)
      out.put(0, c, load(s.mixed + (size_t)r * head.dim + c) * scale);
  }
}

inline void attend_with_tiles(const Head& head, const Query* queries, int total,
                              const TileScratch& s, Tiles& tiles, bool halves) {
  int begin = INT32_MAX, shared = 0, end = 0;
  for (int r = 0; r < total; r++) {
    begin = std::min(begin, queries[r].seen.first);
    shared = std::max(shared, shared_end(queries[r].seen));
    end = std::max(end, queries[r].seen.end());
  }
  begin = begin / BLOCK_SLOTS * BLOCK_SLOTS;
  char* to = s.values;
  for (int at = begin; at < shared; at += BLOCK_SLOTS) {
    // Slots that nobody has written may hold anything, and zero times NaN is NaN.
    pack_block(
        head.dim,
        [&](int i) -> const Half* {
          return at + i < end ? (const Half*)head.values + (size_t)(at + i) * head.dim : nullptr;
        },
        to);
    to += head.dim / TILE_LANES * TILE_BYTES;
  }
  const int pieces = (total + TILE_QUERIES - 1) / TILE_QUERIES;
  for (int i = 0, r = 0; i < pieces; i++) {
    const int count = total / pieces + (i < total % pieces);
    attend_tile(head, queries + r, count, begin, s, tiles, halves);
    r += count;
  }
}

#else
inline void attend_with_tiles(const Head&, const Query*, int, const TileScratch&, Tiles&, bool) {}
#endif

}  // namespace aquiline
