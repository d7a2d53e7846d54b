// What Python passes: plain structs, mirrored by ctypes in library.py, which compares their sizes.
// Pointers are to memory that Python keeps alive; Python has checked dtypes, shapes and strides.
#pragma once
#include "matrix.h"

namespace aquiline {

struct Layer {
  Matrix qkv;      // rows: query heads, key heads, value heads, each padded to whole vectors
  Matrix out;      // inputs: the query heads, padded alike
  Matrix gate_up;  // a vector of gates, then its vector of ups, and so on
  Matrix down;
  const float* first_norm;  // null: the layer reads the stream as it is
  const float* second_norm;
  const float* query_norm;  // null where heads are not normed
  const float* key_norm;
  int32_t window;  // 0: sees everything
  int32_t rotated;
};

constexpr int FINAL = -1;  // boundary after the final norm

// How the stream begins.
enum Entry : int32_t {
  TOKENS = 0,  // rows of the embedding
  FUSED = 1,   // EAGLE-1: fuse([embedded, hidden])
  PAIRED = 2,  // EAGLE-3: hidden; the first layer reads [norm(embedded), norm(hidden)]
};

struct Stack {
  const Layer* layers;
  const void* embedding;    // vocab × hidden; TOKENS
  const float* final_norm;  // null: no final norm and no logits
  Matrix head;
  Matrix fuse;                  // FUSED
  const float* embedding_norm;  // PAIRED
  const float* hidden_norm;
  int32_t num_layers, hidden, heads, kv_heads, dim, rotary_half, inner, vocab;
  int32_t half;  // embedding, cache, features and streams are bfloat16, else float32
  int32_t gelu;
  int32_t entry;
  int32_t norm_before_residual;
  float eps, scale;
};

struct Call {
  int32_t batch, width, offset, threads;
  const int64_t* tokens;         // (batch, width); TOKENS
  const void* embedded;          // (batch, width, hidden); FUSED, PAIRED
  const void* hidden;            // (batch, width, hidden); FUSED, PAIRED
  const int64_t* positions;      // (batch, width)
  const uint8_t* ancestors;      // (batch, width, offset + width), or null for causal order
  const int64_t* committed;      // (batch)
  const int64_t* rows;           // (batch)
  const float *cosines, *sines;  // (angles, rotary_half)
  void *keys, *values;           // (layers, cache_rows, kv_heads, capacity, dim)
  int64_t angles, cache_rows, capacity;
  const int32_t* features;   // boundaries to return
  void* feature_out;         // (batch, width, num_features · hidden)
  const int64_t* logits_at;  // (batch, asked), or null for all nodes
  float* logits;             // (batch, asked, vocab)
  void* stream_out;          // (batch, width, hidden) after the last layer, or null
  int64_t* best;      // (batch, asked): the largest logit's token, -1 where one is NaN; or null
  int32_t num_features, asked;
  char message[160];  // of an error
};

// Norms and a product for rows on their own: draft logits, fused features, the LM head.
struct Readout {
  Matrix matrix;      // weight null: the norm alone
  const float* norm;  // null: none
  int32_t inputs;     // width of a row
  int32_t parts;      // equal parts of a row that are normed each on their own
  int32_t outputs;
  int32_t half_in, half_out;
  float eps;
};

struct ReadoutCall {
  const void* x;  // (n, inputs)
  void* out;      // (n, outputs)
  int64_t n;
  int32_t threads, reserved;
};

// A draft network with what makes trees of it.
struct DraftNetwork {
  const Stack* stack;
  const Readout* fuse;       // of the target's features; null: they are the hidden states
  const Readout* logits;     // float32 results
  const Readout* feedback;   // null: the stream itself
  const void* embedding;     // embeddings × hidden, as the stack's values
  const int64_t* to_target;  // target ids of draft ids, or null
  int64_t embeddings;
};

// A row that samples: the noise of its next token, and what drafts do with it (see coupled.py).
struct Race {
  uint64_t seed;
  int64_t position;
  double factor;                    // of the noise's logarithm: temperature / γ
  float temperature, top_p, min_p;  // temperature 0: a greedy row, which does not race
  int32_t top_k;
};

constexpr int MOST_KEPT = 16;

// Trees that grow by levels: each node has `kept` children, and the best `width` of a level have
// children of their own. The best `limit` nodes of at least `least` remain.
struct DraftCall {
  Call* call;             // of `width` nodes a row, all at the first level's position
  const float* logits;    // (cache rows, outputs): at the rows' roots
  const void* feedback;   // (cache rows, hidden) there
  const int64_t* roots;   // (batch) their tokens
  const float* floors;    // (levels): stop after a level whose bests' probabilities sum to less
  const Race* races;      // (batch), at the first level; null: no row samples
  int64_t *tokens, *parents, *counts;  // (batch, 1 + limit) padded, root first, and (batch)
  float* scores;                       // as `tokens`: joint log-probabilities
  double least;                        // as these
  int32_t levels, kept, limit;
  int32_t done, size;  // levels that were drafted, and nodes of the largest tree
  int32_t reserved;
};

// New positions of some rows: the target's features, and the token after each.
struct IngestCall {
  Call* call;              // of `width` causal nodes a row
  const void* features;    // (batch, width, fuse's inputs)
  const int64_t* tokens;   // (batch, width)
  const int64_t* counts;   // (batch): positions that are not padding
  void* feedback;          // (cache rows, hidden): written for each row's last position
  float* logits;           // (cache rows, outputs): likewise
};

struct Facts {
  int32_t lanes, pair_dots, tiles, squeezes;
  // bytes of Stack, Layer, Call, Readout, ReadoutCall, DraftNetwork, DraftCall, IngestCall, Race
  int32_t sizes[9];
};

}  // namespace aquiline
