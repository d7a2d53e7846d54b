// A decoder stack over some nodes, by a team of threads in one parallel region.
#pragma once
#include "attend_tiles.h"
#include "nodes.h"
#include "scratch.h"
#include "team.h"

namespace aquiline {

// Rows up to which each thread norms and quantises all of them for itself.
constexpr int OWN_NORMS = 32;

// What the threads of one forward share.
struct Shared {
  float* x;       // (n, stream): the residual stream, zero beyond `hidden`
  char* queries;  // (n, heads, padded dim)
  Rows mixed, inner, normed, joined, codes;
  size_t stream, head_stride, query_bytes;
};

// The largest of a row's logits that one thread computed.
struct Largest {
  float value;
  int32_t token;  // -1 where one is NaN
};

struct Own {  // one thread's
  Rows normed, codes;
  float* out;      // products of a block
  float* row;      // of the stream's width
  Largest* best;   // (wanted)
  Query* queries;  // of one row and key head
  AttentionScratch attention;
  TileScratch tile_attention;
  Tiles* tiles;
};

class Pass {
 public:
  Pass(const Stack& stack, Call& call, const Nodes& nodes, const std::vector<int32_t>& wanted)
      : stack_(stack), call_(call), nodes_(nodes), wanted_(wanted), n_((int)nodes.nodes.size()) {}

  void lay_out(Scratch& scratch);
  void run(const Member& member);

 private:
  void lay_out_attention(Scratch& scratch, Own& own);
  void begin(const Member& member, const Own& own);
  void fuse(const Member& member, const Own& own);
  void join(int t, const float* embedded);
  void capture(const Member& member, const Own& own, int boundary);
  void layer(const Member& member, const Own& own, int index);
  void project(const Member& member, const Own& own, const Layer& layer, int index, const Rows& x);
  void finish_head(const Layer& layer, int index, int head, float* y, size_t stride);
  void attention(const Member& member, const Own& own, const Layer& layer, int index);
  void add(const Member& member, const Own& own, const Matrix& matrix, const Rows& x);
  void feed_forward(const Member& member, const Own& own, const Layer& layer);
  void finish(const Member& member, const Own& own);
  void choose(const Member& member) const;
  Rows normed(const Member& member, const Own& own, const Matrix& matrix, const float* weight,
              int n, const int32_t* which);
  Rows read_by(const Member& member, const Own& own, const Matrix& matrix, const Rows& x, int n);

  float* stream(int t) const { return shared_.x + t * shared_.stream; }

  const Stack& stack_;
  Call& call_;
  const Nodes& nodes_;
  const std::vector<int32_t>& wanted_;
  const int n_;
  Shared shared_{};
  std::vector<Own> own_;
};

}  // namespace aquiline
