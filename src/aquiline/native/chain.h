// A draft network's chains in one call: embed, the network, its logits, the likeliest tokens,
// again.
#pragma once
#include "race.h"
#include "readout.h"
#include "stack.h"

namespace aquiline {

constexpr int PICK_CHUNK = 1024;  // logits that one thread looks at; sums do not depend on threads

// The largest of a chunk, largest first and then by index, and what the logarithm of their
// probabilities needs.
struct Pick {
  float total;  // of e^(x - values[0])
  int count;
  float values[MOST_KEPT];
  int indices[MOST_KEPT];

  void offer(float x, int index, int most) {
    int at = count < most ? count++ : count - 1;
    for (; at && x > values[at - 1]; at--)
      values[at] = values[at - 1], indices[at] = indices[at - 1];
    values[at] = x, indices[at] = index;
  }
};

// Picks the `most` largest of x[0 … size); their indices begin at `first`.
inline Pick pick(const float* x, int size, int first, int most) {
  Pick p{};
  for (int i = 0; i < size; i++)
    if (p.count < most || x[i] > p.values[p.count - 1]) p.offer(x[i], first + i, most);
  if (p.values[0] == -INFINITY) return p;  // all barred
  Floats total{};
  for (int i = 0; i < size; i += LANES) {
    const int count = lanes_at(i, size);
    Floats e = exponential(load_part(x + i, count) - broadcast(p.values[0]));
    for (int j = count; j < LANES; j++) e[j] = 0.f;
    total += e;
  }
  p.total = sum(total);
  return p;
}

class ChainPass {
 public:
  ChainPass(const Chain& chain, ChainCall& call, Nodes& nodes)
      : chain_(chain),
        call_(call),
        inner_(*call.call),
        nodes_(nodes),
        batch_(inner_.batch),
        pass_(*chain.stack, inner_, nodes, none_),
        logits_call_{inner_.stream_out, call.logits, batch_, inner_.threads, 0},
        feedback_call_{inner_.stream_out, (void*)inner_.hidden, batch_, inner_.threads, 0},
        logits_(*chain.logits, logits_call_),
        feedback_(*feedback(), feedback_call_) {}

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
    kept_from_ = scratch.take<float>(batch_);
    sorted_ = scratch.take<float>(call_.races ? (size_t)batch_ * chain_.logits->outputs : 0);
  }

  void run(const Member& member) {
    for (int level = 0;; level++) {
      if (call_.races) {
        sift(member);
        member.wait();
      }
      look(member, level);
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

  // What the rows' settings keep of the logits.
  void sift(const Member& member) {
    const int size = chain_.logits->outputs;
    const Range mine = member.part(batch_);
    for (int b = mine.begin; b < mine.end; b++) {
      const size_t at = (size_t)b * size;
      kept_from_[b] = kept_from(call_.races[b], call_.logits + at, size, sorted_ + at);
    }
  }

  void look(const Member& member, int level) {
    const int size = chain_.logits->outputs;
    const Range mine = member.part((int64_t)batch_ * chunks_);
    alignas(64) float raced[PICK_CHUNK];
    for (int i = mine.begin; i < mine.end; i++) {
      const int b = i / chunks_, begin = i % chunks_ * PICK_CHUNK;
      const int count = std::min(PICK_CHUNK, size - begin);
      const float* x = call_.logits + (size_t)b * size + begin;
      if (call_.races && call_.races[b].temperature > 0.f) {
        race(call_.races[b], level, x, kept_from_[b], chain_.to_target, begin, count, raced);
        x = raced;
      }
      picks_[i] = pick(x, count, begin, call_.kept);
    }
  }

  // Writes a level's tokens and scores, and prepares the forward of the next one.
  void choose(int level) {
    float alive = 0.f;
    for (int b = 0; b < batch_; b++) {
      const Pick* parts = picks_ + (size_t)b * chunks_;
      Pick best = parts[0];
      for (int i = 1; i < chunks_; i++)
        for (int j = 0; j < parts[i].count; j++)
          if (best.count < call_.kept || parts[i].values[j] > best.values[best.count - 1])
            best.offer(parts[i].values[j], parts[i].indices[j], call_.kept);
      float total = 0.f;
      for (int i = 0; i < chunks_; i++)
        total += parts[i].total * std::exp(parts[i].values[0] - best.values[0]);
      const size_t at = first(b, level);
      const float above = level ? call_.scores[first(b, level - 1)] : 0.f;
      for (int j = 0; j < call_.kept; j++) {
        const bool real = j < best.count;
        const int index = real ? best.indices[j] : 0;
        call_.scores[at + j] =
            real ? above + (best.values[j] - best.values[0]) - std::log(total) : -INFINITY;
        call_.tokens[at + j] = chain_.to_target ? chain_.to_target[index] : index;
      }
      alive += std::exp(call_.scores[at]);
    }
    call_.done = level + 1;
    finished_ = !(alive >= call_.floors[level]) || call_.done == call_.levels || !advance(level);
  }

  // Where a row's candidates of a level begin.
  size_t first(int b, int level) const { return ((size_t)b * call_.levels + level) * call_.kept; }

  bool advance(int level) {
    const Stack& s = *chain_.stack;
    const size_t bytes = s.hidden * (s.half ? sizeof(Half) : sizeof(float));
    for (int b = 0; b < batch_; b++) {
      const int64_t token = call_.tokens[first(b, level)];
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
  float *kept_from_ = nullptr, *sorted_ = nullptr;
  int chunks_ = 0;
  bool finished_ = false;
};

}  // namespace aquiline
