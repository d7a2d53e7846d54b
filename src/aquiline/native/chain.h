// A draft network's chains in one call: embed, the network, its logits, the likeliest token, again.
#pragma once
#include "readout.h"
#include "stack.h"

namespace aquiline {

constexpr int PICK_CHUNK = 1024;  // logits that one thread looks at; sums do not depend on threads

struct Pick {
  float largest, total;  // total: of e^(x - largest)
  int index;
};

// The first of the largest of x[0 … size), and what the logarithm of its probability needs.
inline Pick pick(const float* x, int size) {
  Pick p{x[0], 0.f, 0};
  for (int i = 1; i < size; i++)
    if (x[i] > p.largest) p.largest = x[i], p.index = i;
  Floats total{};
  for (int i = 0; i < size; i += LANES) {
    const int count = lanes_at(i, size);
    Floats e = exponential(load_part(x + i, count) - broadcast(p.largest));
    for (int j = count; j < LANES; j++) e[j] = 0.f;
    total += e;
  }
  p.total = sum(total);
  return p;
}

class ChainPass {
 public:
  ChainPass(const Chain& chain, ChainCall& call, Nodes& nodes)
      : chain_(chain), call_(call), inner_(*call.call), nodes_(nodes), batch_(inner_.batch),
        pass_(*chain.stack, inner_, nodes, none_),
        logits_call_{inner_.stream_out, call.logits, batch_, inner_.threads, 0},
        feedback_call_{inner_.stream_out, (void*)inner_.hidden, batch_, inner_.threads, 0},
        logits_(*chain.logits, logits_call_), feedback_(*feedback(), feedback_call_) {}

  void lay_out(Scratch& scratch) {
    // The scores of attention are laid out for the last level, which sees the most.
    const int span = nodes_.span;
    nodes_.span = span + call_.levels;
    pass_.lay_out(scratch);
    nodes_.span = span;
    logits_.lay_out(scratch);
    feedback_.lay_out(scratch);
    chunks_ = (chain_.logits->outputs + PICK_CHUNK - 1) / PICK_CHUNK;
    picks_ = scratch.take<Pick>((size_t)batch_ * chunks_);
  }

  void run(const Member& member) {
    for (int level = 0;; level++) {
      look(member);
      member.wait();
      if (member.id == 0) choose(level);
      member.wait();
      if (finished_) return;
      pass_.run(member);
      member.wait();
      logits_.run(member);
      member.wait();
      if (chain_.feedback) {
        feedback_.run(member);
        member.wait();
      }
    }
  }

 private:
  const Readout* feedback() const { return chain_.feedback ? chain_.feedback : chain_.logits; }

  void look(const Member& member) {
    const int size = chain_.logits->outputs;
    const Range mine = member.part((int64_t)batch_ * chunks_);
    for (int i = mine.begin; i < mine.end; i++) {
      const int begin = i % chunks_ * PICK_CHUNK;
      picks_[i] = pick(call_.logits + (size_t)(i / chunks_) * size + begin,
                       std::min(PICK_CHUNK, size - begin));
      picks_[i].index += begin;
    }
  }

  // Writes a level's tokens and scores, and prepares the forward of the next one.
  void choose(int level) {
    bool alive = false;
    for (int b = 0; b < batch_; b++) {
      const Pick* parts = picks_ + (size_t)b * chunks_;
      Pick best = parts[0];
      for (int i = 1; i < chunks_; i++)
        if (parts[i].largest > best.largest) best = parts[i];
      float total = 0.f;
      for (int i = 0; i < chunks_; i++)
        total += parts[i].total * std::exp(parts[i].largest - best.largest);
      const size_t at = (size_t)b * call_.levels + level;
      const float above = level ? call_.scores[at - 1] : 0.f;
      call_.scores[at] = above - std::log(total);
      call_.tokens[at] = chain_.to_target ? chain_.to_target[best.index] : best.index;
      alive = alive || call_.scores[at] >= call_.floor;
    }
    call_.done = level + 1;
    finished_ = !alive || call_.done == call_.levels || !advance(level);
  }

  bool advance(int level) {
    const Stack& s = *chain_.stack;
    const size_t bytes = s.hidden * (s.half ? sizeof(Half) : sizeof(float));
    for (int b = 0; b < batch_; b++) {
      const int64_t token = call_.tokens[(size_t)b * call_.levels + level];
      if (token < 0 || token >= chain_.embeddings) {
        fail(inner_, "token", token, chain_.embeddings);
        return false;
      }
      memcpy((char*)inner_.embedded + b * bytes, (const char*)chain_.embedding + token * bytes,
             bytes);
      if (level && !chain_.feedback)
        memcpy((char*)inner_.hidden + b * bytes, (const char*)inner_.stream_out + b * bytes, bytes);
    }
    // The first level's nodes are read already.
    for (Node& node : nodes_.nodes) {
      if (!level) break;
      node.slot++, node.position++, node.committed++;
    }
    return true;
  }

  const Chain& chain_;
  ChainCall& call_;
  Call& inner_;
  Nodes& nodes_;
  const int batch_;
  const std::vector<int32_t> none_;
  Pass pass_;
  const ReadoutCall logits_call_, feedback_call_;
  ReadoutPass logits_, feedback_;
  Pick* picks_ = nullptr;
  int chunks_ = 0;
  bool finished_ = false;
};

}  // namespace aquiline
