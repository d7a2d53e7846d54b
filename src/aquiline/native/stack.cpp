#include "stack.h"

namespace aquiline {

namespace {

Rows take_rows(Scratch& scratch, int n, int inputs, bool half) {
  const size_t stride = row_stride(inputs, half);
  return {scratch.take<char>(n * stride), stride, half};
}

Rows take_codes(Scratch& scratch, int n, int inputs) {
  const size_t stride = code_stride(inputs);
  return {scratch.take<char>(n * stride), stride};
}

// The widest input of a product that reads codes; 0 if none does.
int widest_codes(const Stack& stack) {
  const Layer& l = stack.layers[0];
  int most = 0;
  for (const Matrix& m : {l.qkv, l.out, l.gate_up, l.down, stack.head, stack.fuse})
    if (m.weight && m.takes_codes()) most = std::max(most, m.inputs);
  return most;
}

// The widest input of a product that reads normed rows.
int widest(const Stack& stack) {
  return padded(stack.hidden, INPUT_PAD) * (stack.entry == PAIRED ? 2 : 1);
}

// Whether all products read bfloat16: a stack's layers have one kind, its head may have another.
bool all_halves(const Stack& stack) {
  return stack.layers[0].qkv.takes_halves() && !widest_codes(stack);
}

// Notes the largest of `size` logits, which begin with token `first`.
void raise(Largest& most, const float* logits, int size, int first) {
  for (int i = 0; i < size; i += LANES) {
    const int count = lanes_at(i, size);
    const Floats v = load_part(logits + i, count);
    if (!lanes_set((Ints)(v > broadcast(most.value)) | (Ints)(v != v))) continue;
    for (int j = 0; j < count && most.token >= 0; j++) {
      if (v[j] > most.value) most = {v[j], first + i + j};
      if (v[j] != v[j]) most.token = -1;
    }
  }
}

}  // namespace

void Pass::lay_out(Scratch& scratch) {
  const Stack& s = stack_;
  const bool half = all_halves(s);
  const int codes = widest_codes(s);
  const int rows = std::max(n_, (int)wanted_.size());
  const bool pairs = s.half && HAS_PAIR_DOTS;
  shared_.stream = padded(s.hidden, INPUT_PAD);
  shared_.head_stride = padded(s.dim, LANES);
  shared_.query_bytes = shared_.head_stride * (pairs ? sizeof(Half) : sizeof(float));
  shared_.x = scratch.take<float>(n_ * shared_.stream);
  shared_.queries = scratch.take<char>(n_ * s.heads * shared_.query_bytes);
  shared_.mixed = take_rows(scratch, n_, s.layers[0].out.inputs, half);
  shared_.inner = take_rows(scratch, n_, s.layers[0].down.inputs, half);
  const int joined = s.entry == TOKENS ? 0 : 2 * padded(s.hidden, INPUT_PAD);
  shared_.joined = take_rows(scratch, joined ? n_ : 0, joined, half);
  shared_.normed = take_rows(scratch, rows > OWN_NORMS ? rows : 0, widest(s), half);
  shared_.codes = take_codes(scratch, codes && rows > OWN_NORMS ? rows : 0, codes);
  own_.resize(call_.threads);
  for (Own& own : own_) {
    own.normed = take_rows(scratch, std::min(rows, OWN_NORMS), widest(s), half);
    own.codes = take_codes(scratch, codes ? std::min(rows, OWN_NORMS) : 0, codes);
    own.out =
        scratch.take<float>((size_t)rows * std::max<size_t>(BLOCK * LANES, shared_.head_stride));
    own.row = scratch.take<float>(shared_.stream);
    own.best = scratch.take<Largest>(call_.best ? wanted_.size() : 0);
    own.queries = scratch.take<Query>((size_t)call_.width * (s.heads / s.kv_heads));
    lay_out_attention(scratch, own);
  }
}

void Pass::lay_out_attention(Scratch& scratch, Own& own) {
  const int dim = stack_.dim, span = padded(nodes_.span, SCORE_BLOCK) + SCORE_BLOCK;
  if (attends_with_tiles(dim, stack_.half)) {
    TileScratch& a = own.tile_attention;
    const size_t blocks = span / BLOCK_SLOTS, block_bytes = dim / TILE_LANES * TILE_BYTES;
    a.width = span;
    a.values = scratch.take<char>(blocks * block_bytes);
    a.gathered = scratch.take<char>(block_bytes);
    a.weights = scratch.take<char>(blocks * 2 * TILE_BYTES);
    a.queries = scratch.take<char>(dim / TILE_INPUTS * TILE_BYTES);
    a.edge = scratch.take<char>(SCORE_BLOCK * dim * sizeof(Half));
    a.scores = scratch.take<float>(TILE_QUERIES * a.width);
    a.raw = scratch.take<float>(SCORE_BLOCK * TILE_QUERIES);
    a.mixed = scratch.take<float>(2 * TILE_QUERIES * dim);
  } else {
    AttentionScratch& a = own.attention;
    a.width = span;
    a.keys = scratch.take<Ints>(2 * padded(dim, LANES));
    a.scores = scratch.take<float>(MOST_QUERIES * a.width);
    a.mixed = scratch.take<float>(QUERY_TILE * shared_.head_stride);
  }
}

void Pass::run(const Member& member) {
  Tiles tiles;
  Own own = own_[member.id];
  own.tiles = &tiles;
  begin(member, own);
  member.wait();
  if (stack_.entry == FUSED) {
    fuse(member, own);
    member.wait();
  }
  for (int i = 0; i < stack_.num_layers; i++) {
    capture(member, own, i);
    layer(member, own, i);
  }
  finish(member, own);
}

// The stream's first rows, and the zeros that pad the rows of products.
void Pass::begin(const Member& member, const Own& own) {
  const Stack& s = stack_;
  const Layer& first = s.layers[0];
  const Range mine = member.part(n_);
  for (int t = mine.begin; t < mine.end; t++) {
    float* x = stream(t);
    memset(x + s.hidden, 0, (shared_.stream - s.hidden) * sizeof(float));
    shared_.mixed.zero(t, s.heads * (int)shared_.head_stride, first.out.inputs);
    shared_.inner.zero(t, padded(s.inner, LANES), first.down.inputs);
    if (s.entry == TOKENS) {
      read_values(s.embedding, s.half, (size_t)call_.tokens[t] * s.hidden, s.hidden, x);
      continue;
    }
    read_values(call_.hidden, s.half, (size_t)t * s.hidden, s.hidden, x);
    read_values(call_.embedded, s.half, (size_t)t * s.hidden, s.hidden, own.row);
    join(t, own.row);
  }
}

// What a draft network's first product reads of an embedding and the stream.
void Pass::join(int t, const float* embedded) {
  const Stack& s = stack_;
  const Rows& to = shared_.joined;
  float* x = stream(t);
  const int width = padded(s.hidden, INPUT_PAD);
  to.zero(t, 0, 2 * width);
  if (s.entry == PAIRED) {
    normalise(embedded, s.embedding_norm, s.hidden, s.eps, to, t);
    normalise(x, s.hidden_norm, s.hidden, s.eps, to, t, width);
    if (s.norm_before_residual) normalise(x, s.hidden_norm, s.hidden, s.eps, x);
    return;
  }
  copy_row(embedded, s.hidden, to, t);
  copy_row(x, s.hidden, to, t, width);
}

// EAGLE-1: the stream is fuse([embedded, hidden]).
void Pass::fuse(const Member& member, const Own& own) {
  const Matrix& m = stack_.fuse;
  const Rows x = read_by(member, own, m, shared_.joined, n_);
  const Range mine = member.part(m.vectors, LINE_VECTORS);
  for (int v = mine.begin; v < mine.end; v += BLOCK) {
    const int count = std::min(BLOCK, mine.end - v);
    multiply(m, x, n_, v, count, own.out, BLOCK * LANES, *own.tiles);
    for (int t = 0; t < n_; t++)
      memcpy(stream(t) + v * LANES, own.out + (size_t)t * BLOCK * LANES,
             count * LANES * sizeof(float));
  }
}

// Features at a boundary; FINAL is the stream after the last norm.
void Pass::capture(const Member& member, const Own& own, int boundary) {
  const int size = stack_.hidden;
  const Range mine = member.part(n_);
  for (int f = 0; f < call_.num_features; f++) {
    if (call_.features[f] != boundary) continue;
    for (int t = mine.begin; t < mine.end; t++) {
      const float* x = stream(t);
      if (boundary == FINAL) {
        normalise(x, stack_.final_norm, size, stack_.eps, own.row);
        x = own.row;
      }
      write_values(x, size, call_.feature_out, stack_.half,
                   ((size_t)t * call_.num_features + f) * size);
    }
  }
}

// Rows of the stream (all, or `which`), normed where there is a weight, as inputs of a product.
// Few rows cost less than a barrier: each thread computes its own.
Rows Pass::normed(const Member& member, const Own& own, const Matrix& matrix, const float* weight,
                  int n, const int32_t* which) {
  const bool alone = n <= OWN_NORMS;
  Rows to = alone ? own.normed : shared_.normed;
  to.half = matrix.takes_halves();
  const Range mine = alone ? Range{0, n} : member.part(n);
  for (int t = mine.begin; t < mine.end; t++) {
    const float* x = stream(which ? which[t] : t);
    if (weight)
      normalise(x, weight, stack_.hidden, stack_.eps, to, t);
    else
      copy_row(x, stack_.hidden, to, t);
    to.zero(t, padded(stack_.hidden, LANES), matrix.inputs);
  }
  if (!alone) member.wait();
  return read_by(member, own, matrix, to, n);
}

// Rows as a product reads them: codes of float32 rows where its weights are integers.
Rows Pass::read_by(const Member& member, const Own& own, const Matrix& matrix, const Rows& x,
                   int n) {
  if (!matrix.takes_codes()) return x;
  const bool alone = n <= OWN_NORMS;
  Rows to = alone ? own.codes : shared_.codes;
  to.split = splits(n);
  const Range mine = alone ? Range{0, n} : member.part(n);
  for (int t = mine.begin; t < mine.end; t++)
    quantise((const float*)x.row(t), matrix.inputs, to, t);
  if (!alone) member.wait();
  return to;
}

void Pass::layer(const Member& member, const Own& own, int index) {
  const Layer& l = stack_.layers[index];
  const bool paired = index == 0 && stack_.entry == PAIRED;
  project(member, own, l, index,
          paired ? read_by(member, own, l.qkv, shared_.joined, n_)
                 : normed(member, own, l.qkv, l.first_norm, n_, nullptr));
  member.wait();
  attention(member, own, l, index);
  member.wait();
  add(member, own, l.out, shared_.mixed);
  member.wait();
  feed_forward(member, own, l);
  member.wait();
  add(member, own, l.down, shared_.inner);
  member.wait();
}

// Queries, keys and values, head by head.
void Pass::project(const Member& member, const Own& own, const Layer& layer, int index,
                   const Rows& x) {
  const int vectors = (int)shared_.head_stride / LANES;
  const Range mine = member.part(stack_.heads + 2 * stack_.kv_heads);
  for (int head = mine.begin; head < mine.end; head++) {
    for (int v = 0; v < vectors; v += BLOCK)
      multiply(layer.qkv, x, n_, head * vectors + v, std::min(BLOCK, vectors - v),
               own.out + v * LANES, shared_.head_stride, *own.tiles);
    finish_head(layer, index, head, own.out, shared_.head_stride);
  }
}

// Norms and turns one head of all nodes, and puts it where the attention finds it.
void Pass::finish_head(const Layer& layer, int index, int head, float* y, size_t stride) {
  const Stack& s = stack_;
  const bool query = head < s.heads, value = head >= s.heads + s.kv_heads;
  const float* norm = query ? layer.query_norm : value ? nullptr : layer.key_norm;
  const int kv_head = (head - s.heads) % s.kv_heads;
  for (int t = 0; t < n_; t++) {
    const Node& node = nodes_.nodes[t];
    float* x = y + t * stride;
    if (norm) normalise(x, norm, s.dim, s.eps, x);
    if (!value && layer.rotated) {
      const size_t angle = (size_t)node.position * s.rotary_half;
      rotate(x, call_.cosines + angle, call_.sines + angle, s.rotary_half);
    }
    if (query) {
      const bool pairs = s.half && HAS_PAIR_DOTS;
      const Rows to{shared_.queries + ((size_t)t * s.heads + head) * shared_.query_bytes, 0, pairs};
      copy_row(x, s.dim, to, 0);
      continue;
    }
    const size_t at =
        (((size_t)index * call_.cache_rows + node.row) * s.kv_heads + kv_head) * call_.capacity +
        node.slot;
    write_values(x, s.dim, value ? call_.values : call_.keys, s.half, at * s.dim);
  }
}

void Pass::attention(const Member& member, const Own& own, const Layer& layer, int index) {
  const Stack& s = stack_;
  const int group = s.heads / s.kv_heads, per_head = call_.width * group;
  const Rows& mixed = shared_.mixed;
  const size_t result_bytes = shared_.head_stride * (mixed.half ? sizeof(Half) : sizeof(float));
  const size_t size = s.half ? sizeof(Half) : sizeof(float);
  const Range mine = member.part((int64_t)call_.batch * s.kv_heads * per_head);
  for (int i = mine.begin, count; i < mine.end; i += count) {
    // Queries of one row and key head, nodes slowest.
    const int segment = i / per_head, b = segment / s.kv_heads, kv_head = segment % s.kv_heads;
    count = std::min(mine.end, (segment + 1) * per_head) - i;
    for (int q = 0; q < count; q++) {
      const int place = i + q - segment * per_head, t = b * call_.width + place / group;
      const int head = kv_head * group + place % group;
      own.queries[q] = {shared_.queries + ((size_t)t * s.heads + head) * shared_.query_bytes,
                        nodes_.seen(t, layer.window), mixed.row(t) + head * result_bytes};
    }
    const int row = nodes_.nodes[b * call_.width].row;
    const size_t at =
        (((size_t)index * call_.cache_rows + row) * s.kv_heads + kv_head) * call_.capacity * s.dim;
    const Head head{(const char*)call_.keys + at * size, (const char*)call_.values + at * size,
                    s.dim, (int)call_.capacity, s.scale};
    if (attends_with_tiles(s.dim, s.half))
      attend_with_tiles(head, own.queries, count, own.tile_attention, *own.tiles, mixed.half);
    else if (s.half)
      attend<Half>(head, own.queries, count, own.attention, mixed.half);
    else
      attend<float>(head, own.queries, count, own.attention, mixed.half);
  }
}

// The stream += a product.
void Pass::add(const Member& member, const Own& own, const Matrix& matrix, const Rows& given) {
  const Rows x = read_by(member, own, matrix, given, n_);
  const Range mine = member.part(matrix.vectors, LINE_VECTORS);
  for (int v = mine.begin; v < mine.end; v += BLOCK) {
    const int count = std::min(BLOCK, mine.end - v);
    multiply(matrix, x, n_, v, count, own.out, BLOCK * LANES, *own.tiles);
    for (int t = 0; t < n_; t++)
      for (int i = 0; i < count; i++) {
        float* y = stream(t) + (v + i) * LANES;
        store(y, load(y) + load(own.out + ((size_t)t * BLOCK + i) * LANES));
      }
  }
}

void Pass::feed_forward(const Member& member, const Own& own, const Layer& layer) {
  const Rows x = normed(member, own, layer.gate_up, layer.second_norm, n_, nullptr);
  const Range mine = member.part(layer.gate_up.vectors, 2);
  for (int v = mine.begin; v < mine.end; v += BLOCK) {
    const int count = std::min(BLOCK, mine.end - v);
    multiply(layer.gate_up, x, n_, v, count, own.out, BLOCK * LANES, *own.tiles);
    for (int t = 0; t < n_; t++)
      for (int i = 0; i < count; i += 2) {
        const float* y = own.out + ((size_t)t * BLOCK + i) * LANES;
        shared_.inner.put(t, (v + i) / 2 * LANES, activate(load(y), stack_.gelu) * load(y + LANES));
      }
  }
}

// Features, the stream and logits.
void Pass::finish(const Member& member, const Own& own) {
  const Stack& s = stack_;
  capture(member, own, s.num_layers);
  capture(member, own, FINAL);
  const Range mine = member.part(n_);
  for (int t = mine.begin; call_.stream_out && t < mine.end; t++)
    write_values(stream(t), s.hidden, call_.stream_out, s.half, (size_t)t * s.hidden);
  const int n = (int)wanted_.size();
  if (!n) return;
  const Rows x = normed(member, own, s.head, s.final_norm, n, wanted_.data());
  const Range part = member.part(s.head.vectors, BLOCK);
  for (int t = 0; call_.best && t < n; t++) own.best[t] = {-INFINITY, 0};
  for (int v = part.begin; v < part.end; v += BLOCK) {
    const int count = std::min(BLOCK, part.end - v);
    multiply(s.head, x, n, v, count, own.out, BLOCK * LANES, *own.tiles);
    for (int t = 0; t < n; t++) {
      const float* y = own.out + (size_t)t * BLOCK * LANES;
      const int size = std::min(count * LANES, s.vocab - v * LANES);
      write_values(y, size, call_.logits, false, (size_t)t * s.vocab + v * LANES);
      if (call_.best) raise(own.best[t], y, size, v * LANES);
    }
  }
  if (!call_.best) return;
  member.wait();
  if (member.id == 0) choose(member);
}

// The best of what the threads found; of equals the first, as their parts are in order.
void Pass::choose(const Member& member) const {
  for (size_t t = 0; t < wanted_.size(); t++) {
    Largest most = own_[0].best[t];
    for (int i = 1; i < member.size; i++) {
      const Largest& other = own_[i].best[t];
      if (most.token >= 0 && (other.token < 0 || other.value > most.value)) most = other;
    }
    call_.best[t] = most.token;
  }
}

}  // namespace aquiline
