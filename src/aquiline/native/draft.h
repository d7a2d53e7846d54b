// A draft network's work in two calls: what became text; and trees, level by level: embed, the
// network, its logits, the likeliest tokens, again.
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

// A drafted token: a node of the tree, if it is among the best.
struct Candidate {
  int64_t token;
  float score;  // joint log-probability
  int parent;   // among the row's candidates; -1: the root
};

class DraftPass {
 public:
  DraftPass(const DraftNetwork& network, DraftCall& call, Nodes& nodes)
      : network_(network),
        call_(call),
        inner_(*call.call),
        nodes_(nodes),
        batch_(inner_.batch),
        width_(inner_.width),
        value_bytes_(network.stack->half ? sizeof(Half) : sizeof(float)),
        pass_(*network.stack, inner_, nodes, none_),
        logits_call_{nullptr, nullptr, batch_ * width_, inner_.threads, 0},
        feedback_call_{nullptr, nullptr, batch_ * width_, inner_.threads, 0},
        logits_(*network.logits, logits_call_),
        feedback_(network.feedback ? *network.feedback : *network.logits, feedback_call_) {
    for (int i = 0; i < batch_ * width_; i++) {
      nodes_.nodes[i].committed = (int)inner_.committed[i / width_];
      see(nodes_.nodes[i], nullptr, 0);
    }
  }

  void lay_out(Scratch& scratch) {
    // The scores of attention are laid out for the last level, which sees the most.
    const int span = nodes_.span;
    nodes_.span = span + call_.levels * width_;
    pass_.lay_out(scratch);
    nodes_.span = span;
    logits_.lay_out(scratch);
    feedback_.lay_out(scratch);
    const int n = batch_ * width_;
    const size_t row = (size_t)network_.stack->hidden * value_bytes_;
    inner_.embedded = scratch.take<char>(n * row);
    inner_.hidden = scratch.take<char>(n * row);
    inner_.stream_out = scratch.take<char>(n * row);
    fed_back_ = network_.feedback ? scratch.take<char>(n * row) : (char*)inner_.stream_out;
    next_logits_ = scratch.take<float>((size_t)n * outputs());
    logits_call_.x = feedback_call_.x = inner_.stream_out;
    logits_call_.out = next_logits_, feedback_call_.out = fed_back_;
    chunks_ = (outputs() + PICK_CHUNK - 1) / PICK_CHUNK;
    picks_ = scratch.take<Pick>((size_t)n * chunks_);
    kept_from_ = scratch.take<float>(n);
    sorted_ = scratch.take<float>(call_.races ? (size_t)n * outputs() : 0);
    candidates_ = scratch.take<Candidate>((size_t)batch_ * first(call_.levels));
    expanded_ = scratch.take<int>(n);
    places_ = scratch.take<int>(2 * first(call_.levels));
  }

  void run(const Member& member) {
    for (int level = 0;; level++) {
      if (call_.races) {
        sift(member, level);
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
      if (network_.feedback) {
        feedback_.run(member);
        member.wait();
      }
    }
  }

 private:
  int outputs() const { return network_.logits->outputs; }
  // Nodes of a row whose children make up a level.
  int parents(int level) const { return level ? width_ : 1; }
  // Where a level begins among a row's candidates.
  int first(int level) const { return level ? call_.kept * (1 + (level - 1) * width_) : 0; }
  Candidate* row(int b) const { return candidates_ + (size_t)b * first(call_.levels); }
  const float* logits(int level, int i) const {
    return level ? next_logits_ + (size_t)i * outputs()
                 : call_.logits + (size_t)inner_.rows[i] * outputs();
  }
  bool races(int b) const { return call_.races && call_.races[b].temperature > 0.f; }

  // What the rows' settings keep of the logits.
  void sift(const Member& member, int level) {
    const int above = parents(level);
    const Range mine = member.part(batch_ * above);
    for (int i = mine.begin; i < mine.end; i++)
      kept_from_[i] = kept_from(call_.races[i / above], logits(level, i), outputs(),
                                sorted_ + (size_t)i * outputs());
  }

  void look(const Member& member, int level) {
    const int above = parents(level);
    const Range mine = member.part((int64_t)batch_ * chunks_);
    alignas(64) float late[PICK_CHUNK], raced[PICK_CHUNK];
    for (int at = mine.begin; at < mine.end; at++) {
      const int b = at / chunks_, begin = at % chunks_ * PICK_CHUNK;
      const int count = std::min(PICK_CHUNK, outputs() - begin);
      // The nodes of a level race with the same noise.
      if (races(b)) delays(call_.races[b], level, network_.to_target, begin, count, late);
      for (int i = b * above; i < (b + 1) * above; i++) {
        const float* x = logits(level, i) + begin;
        if (races(b)) {
          race(x, late, kept_from_[i], count, raced);
          x = raced;
        }
        picks_[(size_t)i * chunks_ + begin / PICK_CHUNK] = pick(x, count, begin, call_.kept);
      }
    }
  }

  // Adds a level's candidates, and prepares the forward of its best.
  void choose(int level) {
    float alive = 0.f;
    for (int b = 0; b < batch_; b++) {
      Pick best{};
      for (int i = 0; i < parents(level); i++) {
        const int parent = level ? expanded_[b * width_ + i] : -1;
        add_children(level, b, i, parent, best);
      }
      std::copy(best.indices, best.indices + width_, expanded_ + b * width_);
      alive += std::exp(best.values[0]);
    }
    call_.done = level + 1, call_.size = 0;
    finished_ = !(alive >= call_.floors[level]) || settled(level) || call_.done == call_.levels ||
                !advance(level);
    for (int b = 0; finished_ && b < batch_; b++) pack(b, first(level + 1));
  }

  // The children of a level's i-th parent; `best` holds the best `width_` of the level.
  void add_children(int level, int b, int i, int parent, Pick& best) {
    const Pick* parts = picks_ + (size_t)(b * parents(level) + i) * chunks_;
    Pick found = parts[0];
    for (int c = 1; c < chunks_; c++)
      for (int j = 0; j < parts[c].count; j++)
        if (found.count < call_.kept || parts[c].values[j] > found.values[found.count - 1])
          found.offer(parts[c].values[j], parts[c].indices[j], call_.kept);
    float total = 0.f;
    for (int c = 0; c < chunks_; c++)
      total += parts[c].total * std::exp(parts[c].values[0] - found.values[0]);
    const float above = level ? row(b)[parent].score : 0.f;
    for (int j = 0; j < call_.kept; j++) {
      const bool real = j < found.count;
      const int index = real ? found.indices[j] : 0, at = first(level) + i * call_.kept + j;
      const float score =
          real ? above + (found.values[j] - found.values[0]) - std::log(total) : -INFINITY;
      row(b)[at] = {network_.to_target ? network_.to_target[index] : index, score, parent};
      if (best.count < width_ || score > best.values[best.count - 1])
        best.offer(score, at, width_);
    }
  }

  // True if no child of this level could remain: it would score at most its parent's score.
  bool settled(int level) const {
    const int size = first(level + 1);
    for (int b = 0; b < batch_; b++) {
      const float best = row(b)[expanded_[b * width_]].score;
      if (best < call_.least) continue;
      if (size < call_.limit) return false;
      for (int i = 0; i < size; i++) places_[i] = i;
      std::nth_element(places_, places_ + call_.limit - 1, places_ + size, Better{row(b)});
      if (!(row(b)[places_[call_.limit - 1]].score >= best)) return false;
    }
    return true;
  }

  // The better of two candidates; of equals the earlier.
  struct Better {
    const Candidate* row;
    bool operator()(int i, int j) const {
      const float a = value(i), b = value(j);
      return a > b || (a == b && i < j);
    }
    float value(int i) const { return std::isnan(row[i].score) ? -INFINITY : row[i].score; }
  };

  // Writes a row's tree: the best of its `size` candidates, parents first.
  void pack(int b, int size) {
    const size_t room = 1 + call_.limit;
    int64_t *tokens = call_.tokens + b * room, *parents = call_.parents + b * room;
    float* scores = call_.scores + b * room;
    std::fill(tokens, tokens + room, 0), std::fill(parents, parents + room, -1);
    std::fill(scores, scores + room, -INFINITY);
    tokens[0] = call_.roots[b], scores[0] = 0.f;
    int *order = places_, *nodes = places_ + size, count = 0, kept = 1;
    for (int i = 0; i < size; i++) {
      const float score = row(b)[i].score;
      nodes[i] = -1;
      if (score >= call_.least && score > -INFINITY) order[count++] = i;
    }
    if (count > call_.limit) {
      std::nth_element(order, order + call_.limit, order + count, Better{row(b)});
      std::sort(order, order + call_.limit);
      count = call_.limit;
    }
    for (int i = 0; i < count; i++) {
      const Candidate& c = row(b)[order[i]];
      parents[kept] = c.parent < 0 ? 0 : nodes[c.parent];
      tokens[kept] = c.token, scores[kept] = c.score;
      nodes[order[i]] = kept++;
    }
    call_.counts[b] = kept;
    call_.size = std::max(call_.size, kept);
  }

  // Readies the next forward, of the nodes in `expanded_`.
  bool advance(int level) {
    const size_t bytes = (size_t)network_.stack->hidden * value_bytes_;
    Nodes before;
    if (level) before.nodes = nodes_.nodes, before.paths.swap(nodes_.paths);
    for (int i = 0; i < batch_ * width_; i++) {
      const int b = i / width_, at = expanded_[i];
      const int64_t token = row(b)[at].token;
      if (token < 0 || token >= network_.embeddings)
        return fail(inner_, "token", token, network_.embeddings);
      // Its parent's place among the nodes of the last forward.
      const int from = b * width_ + (level ? (at - first(level)) / call_.kept : 0);
      memcpy((char*)inner_.embedded + i * bytes, (const char*)network_.embedding + token * bytes,
             bytes);
      memcpy((char*)inner_.hidden + i * bytes,
             level ? fed_back_ + from * bytes
                   : (const char*)call_.feedback + inner_.rows[b] * bytes,
             bytes);
      if (!level) continue;
      const Node& parent = before.nodes[from];
      const int32_t* path = before.paths.data() + parent.path_begin;
      Node& node = nodes_.nodes[i];
      node.slot += width_, node.position++;
      see(node, path, parent.depth);
    }
    return true;
  }

  // Lets a node see its ancestors' slots and its own, beside the committed ones.
  void see(Node& node, const int32_t* ancestors, int depth) {
    std::vector<int32_t>& paths = nodes_.paths;
    node.path_begin = (int)paths.size(), node.depth = depth + 1;
    paths.insert(paths.end(), ancestors, ancestors + depth);
    paths.push_back(node.slot);
    nodes_.positions.resize(paths.size());  // windows do not occur
  }

  const DraftNetwork& network_;
  DraftCall& call_;
  Call& inner_;
  Nodes& nodes_;
  const int batch_, width_;
  const size_t value_bytes_;
  const std::vector<int32_t> none_;
  Pass pass_;
  ReadoutCall logits_call_, feedback_call_;
  ReadoutPass logits_, feedback_;
  char* fed_back_ = nullptr;
  float* next_logits_ = nullptr;
  Pick* picks_ = nullptr;
  float *kept_from_ = nullptr, *sorted_ = nullptr;
  Candidate* candidates_ = nullptr;
  int *expanded_ = nullptr, *places_ = nullptr;  // expanded_: (batch, width), by the row's candidates
  int chunks_ = 0;
  bool finished_ = false;
};

// Runs a draft network on what became text; its results at each row's last position begin drafts.
class IngestPass {
 public:
  IngestPass(const DraftNetwork& network, const IngestCall& call, const Nodes& nodes)
      : network_(network),
        call_(call),
        inner_(*call.call),
        row_bytes_((size_t)network.stack->hidden *
                   (network.stack->half ? sizeof(Half) : sizeof(float))),
        n_(inner_.batch * inner_.width),
        pass_(*network.stack, inner_, nodes, none_),
        fuse_call_{call.features, nullptr, n_, inner_.threads, 0},
        logits_call_{nullptr, nullptr, inner_.batch, inner_.threads, 0},
        feedback_call_{nullptr, nullptr, inner_.batch, inner_.threads, 0},
        fuse_(network.fuse ? *network.fuse : *network.logits, fuse_call_),
        logits_(*network.logits, logits_call_),
        feedback_(network.feedback ? *network.feedback : *network.logits, feedback_call_) {}

  void lay_out(Scratch& scratch) {
    pass_.lay_out(scratch);
    fuse_.lay_out(scratch);
    logits_.lay_out(scratch);
    feedback_.lay_out(scratch);
    inner_.embedded = scratch.take<char>(n_ * row_bytes_);
    inner_.stream_out = scratch.take<char>(n_ * row_bytes_);
    fused_ = scratch.take<char>(n_ * row_bytes_);
    last_ = scratch.take<char>(inner_.batch * row_bytes_);
    fed_back_ = network_.feedback ? scratch.take<char>(inner_.batch * row_bytes_) : last_;
    found_ = scratch.take<float>((size_t)inner_.batch * network_.logits->outputs);
    inner_.hidden = network_.fuse ? fused_ : call_.features;
    fuse_call_.out = fused_;
    logits_call_.x = feedback_call_.x = last_;
    logits_call_.out = found_, feedback_call_.out = fed_back_;
  }

  void run(const Member& member) {
    const Range nodes = member.part(n_), rows = member.part(inner_.batch);
    for (int i = nodes.begin; i < nodes.end; i++)
      memcpy((char*)inner_.embedded + i * row_bytes_,
             (const char*)network_.embedding + call_.tokens[i] * row_bytes_, row_bytes_);
    if (network_.fuse) fuse_.run(member);
    member.wait();
    pass_.run(member);
    member.wait();
    for (int b = rows.begin; b < rows.end; b++)
      memcpy(last_ + b * row_bytes_,
             (const char*)inner_.stream_out +
                 ((size_t)b * inner_.width + call_.counts[b] - 1) * row_bytes_,
             row_bytes_);
    member.wait();
    logits_.run(member);
    if (network_.feedback) feedback_.run(member);
    member.wait();
    const size_t outputs = network_.logits->outputs;
    for (int b = rows.begin; b < rows.end; b++) {
      memcpy((char*)call_.feedback + inner_.rows[b] * row_bytes_, fed_back_ + b * row_bytes_,
             row_bytes_);
      memcpy(call_.logits + inner_.rows[b] * outputs, found_ + b * outputs,
             outputs * sizeof(float));
    }
  }

 private:
  const DraftNetwork& network_;
  const IngestCall& call_;
  Call& inner_;
  const size_t row_bytes_;
  const int n_;
  const std::vector<int32_t> none_;
  Pass pass_;
  ReadoutCall fuse_call_, logits_call_, feedback_call_;
  ReadoutPass fuse_, logits_, feedback_;
  char *fused_ = nullptr, *last_ = nullptr, *fed_back_ = nullptr;
  float* found_ = nullptr;
};

}  // namespace aquiline
