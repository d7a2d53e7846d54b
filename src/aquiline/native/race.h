// The exponential race that draws tokens, see race.py: its noise, drafts that race with it, and the
// draw.
#pragma once
#include <algorithm>
#include <vector>

#include "abi.h"
#include "rows.h"

namespace aquiline {

typedef double Doubles __attribute__((vector_size(LANES * 4)));
typedef int64_t Longs __attribute__((vector_size(LANES * 4)));
typedef uint32_t HalfWords __attribute__((vector_size(LANES * 2)));
typedef float HalfFloats __attribute__((vector_size(LANES * 2)));

INLINE Words mixed(Words x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The noise of one output position: a word for each token.
class Noise {
 public:
  Noise(uint64_t seed, int64_t position) {
    uint64_t x = seed * 0x9E3779B97F4A7C15u + (uint64_t)position + 1;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    key_ = x ^ (x >> 31);
  }
  INLINE Words operator()(Words tokens) const {
    const Words x = mixed(tokens * 0x9E3779B1u + (uint32_t)(key_ >> 32));
    return mixed(x + (uint32_t)key_);
  }
  // The noise itself, a float32.
  static float of(uint32_t word) { return (float)-std::log(((double)word + 0.5) * 0x1p-32); }

 private:
  uint64_t key_;
};

// The logarithm of normal numbers > 0 within 1 ulp (FreeBSD's e_log.c, without its special cases).
INLINE Doubles logarithm(Doubles x) {
  const Longs bits = (Longs)x;
  // The power of two that brings x into √½ … √2.
  const Longs power = (bits + (0x3ff0000000000000 - 0x3fe6a09e667f3bcd)) >> 52;
  const Doubles f = (Doubles)(bits - ((power - 1023) << 52)) - 1.0;
  // An integer of few bits beside 1.5 · 2⁵² is a double.
  const Doubles k = (Doubles)(power - 1023 + 0x4338000000000000) - 0x1.8p52;
  const Doubles s = f / (f + 2.0), z = s * s, w = z * z;
  const Doubles even = w * (3.999999999940941908e-01 +
                            w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const Doubles odd = z * (6.666666666666735130e-01 +
                           w * (2.857142874366239149e-01 +
                                w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  const Doubles half = 0.5 * f * f;
  return k * 6.93147180369123816490e-01 -
         ((half - (s * (half + even + odd) + k * 1.90821492927058770002e-10)) - f);
}

// How late LANES tokens start: the logarithms of their noise times `factor`.
INLINE void delays(const Noise& noise, Words tokens, double factor, float* out) {
  const Words x = noise(tokens);
  HalfWords halves[2];
  memcpy(halves, &x, sizeof x);
  for (int i = 0; i < 2; i++) {
    const Doubles u = (__builtin_convertvector(halves[i], Doubles) + 0.5) * 0x1p-32;
    const HalfFloats rounded = __builtin_convertvector(-logarithm(u), HalfFloats);
    const Doubles late = logarithm(__builtin_convertvector(rounded, Doubles)) * factor;
    const HalfFloats result = __builtin_convertvector(late, HalfFloats);
    memcpy(out + i * (LANES / 2), &result, sizeof result);
  }
}

// Target ids of the draft ids from `first` on; those beyond `size` are 0.
INLINE Words target_ids(const int64_t* to_target, int first, int size) {
  Words ids;
  for (int i = 0; i < LANES; i++) {
    const int id = first + i < size ? first + i : 0;
    ids[i] = to_target ? (uint32_t)to_target[id] : (uint32_t)id;
  }
  return ids;
}

// The delays at this level of `count` draft ids from `first` on; writes whole vectors.
inline void delays(const Race& race, int level, const int64_t* to_target, int first, int count,
                   float* out) {
  const Noise noise(race.seed, race.position + level);
  for (int i = 0; i < count; i += LANES)
    delays(noise, target_ids(to_target, first + i, first + count), race.factor, out + i);
}

// x[0 … count) less their delays; -∞ below `floor`.
inline void race(const float* x, const float* late, float floor, int count, float* out) {
  for (int i = 0; i < count; i += LANES) {
    const int part = lanes_at(i, count);
    const Floats logits = load_part(x + i, part);
    const Ints kept = (Ints)(logits >= broadcast(floor));
    const Ints raced = (Ints)(logits - load(late + i)), barred = (Ints)broadcast(-INFINITY);
    store_part(out + i, (Floats)((raced & kept) | (barred & ~kept)), part);
  }
}

constexpr int NUCLEUS = 128;      // tokens among which top_p is looked for, as in coupled.py
constexpr float COLDEST = 1e-6f;  // as there

// The least logit of a row that top_k, top_p and min_p keep; `best` is room for `size` values.
inline float kept_from(const Race& race, const float* x, int size, float* best) {
  float floor = -INFINITY, most = -INFINITY;
  if (!(race.min_p > 0.f || race.top_k || race.top_p < 1.f)) return floor;
  for (int i = 0; i < size; i++) most = std::max(most, x[i]);
  if (race.min_p > 0.f) floor = most + race.temperature * std::log(race.min_p);
  if (!race.top_k && race.top_p >= 1.f) return floor;
  const int count = std::min(race.top_k ? race.top_k : NUCLEUS, size);
  memcpy(best, x, size * sizeof(float));
  std::nth_element(best, best + count - 1, best + size, std::greater<float>());
  if (race.top_k) floor = std::max(floor, best[count - 1]);
  if (race.top_p >= 1.f) return floor;
  std::sort(best, best + count, std::greater<float>());
  const float warm = std::max(race.temperature, COLDEST);
  const auto weight = [&](float logit) { return std::exp((logit - most) / warm); };
  float total = 0.f, held = 0.f;
  for (int i = 0; i < (race.top_k ? count : size); i++) total += weight(best[i]);
  for (int i = 0; i < count; i++) {
    held += weight(best[i]) / total;
    if (!(held < race.top_p)) return std::max(floor, best[i]);
  }
  return floor;
}

// What top_k, top_p and min_p keep of the target's logits: nothing below `from`, and all above
// `unsure`. Between them rounding decides.
struct Kept {
  float from = -INFINITY, unsure = -INFINITY;

  void raise(float least, float doubtful) {
    from = std::max(from, least);
    unsure = std::max(unsure, doubtful);
  }
};

// The logits of a draw, and the largest of each vector of them.
class Logits {
 public:
  Logits(const float* x, int size) : x_(x), size_(size), most_((size + LANES - 1) / LANES) {
    Floats top = broadcast(-INFINITY);
    Ints broken{};
    for (int i = 0; i < size; i += LANES) {
      const Floats v = vector(i);
      broken |= (Ints)(v != v);
      top = max(top, v);
      most_[i / LANES] = largest(v);
    }
    top_ = lanes_set(broken) ? NAN : largest(top);
  }

  int size() const { return size_; }
  float top() const { return top_; }                    // NaN if any is
  float most(int i) const { return most_[i / LANES]; }  // of the vector from i on
  float operator[](int i) const { return x_[i]; }
  INLINE Floats vector(int i) const {
    Floats v = load_part(x_ + i, lanes_at(i, size_));
    for (int j = lanes_at(i, size_); j < LANES; j++) v[j] = -INFINITY;
    return v;
  }
  // Those from `least` on, largest first.
  std::vector<float> sorted(float least) const {
    std::vector<float> found;
    for (int i = 0; i < size_; i += LANES)
      for (int j = 0; most(i) >= least && j < lanes_at(i, size_); j++)
        if (x_[i + j] >= least) found.push_back(x_[i + j]);
    std::sort(found.begin(), found.end(), std::greater<float>());
    return found;
  }
  // At most the count-th largest: that of the vectors' largest.
  float below(int count) const {
    if (count >= (int)most_.size()) return -INFINITY;
    std::vector<float> order = most_;
    std::nth_element(order.begin(), order.begin() + count - 1, order.end(), std::greater<float>());
    return order[count - 1];
  }
  // Σ e^((x - top) · inverse)
  float total(float inverse) const {
    Floats sums{};
    for (int i = 0; i < size_; i += LANES)
      sums += exponential((vector(i) - broadcast(top_)) * broadcast(inverse));
    return sum(sums);
  }

 private:
  const float* x_;
  int size_;
  std::vector<float> most_;
  float top_;
};

inline Kept kept(const Race& race, const Logits& x, float margin) {
  constexpr float ROUNDING = 1e-4f;  // far above what two sums of probabilities differ by
  Kept result;
  const int k = race.top_k < x.size() ? race.top_k : 0;
  const float inverse = 1.f / race.temperature;
  if (race.min_p > 0.f) {
    const float least = x.top() + race.temperature * std::log(race.min_p);
    result.raise(least - race.temperature * margin, least + race.temperature * margin);
  }
  if (!k && race.top_p >= 1.f) return result;
  float total = k ? 0.f : x.total(inverse);
  // Tokens that are left out here hold at most half of what top_p drops.
  const float rare = (1.f - race.top_p) * total / (2.f * (float)x.size());
  const std::vector<float> best =
      x.sorted(k ? x.below(k) : x.top() + race.temperature * std::log(rare));
  int count = (int)best.size();
  if (k) {
    const float least = best[k - 1];
    // Neighbours may become equal when they are divided by the temperature.
    result.raise(least - std::fabs(least) * 0x1p-22f, std::nextafter(least, -INFINITY));
    while (count > k && best[count - 1] < least) count--;
  }
  if (race.top_p >= 1.f) return result;
  const auto weight = [&](float logit) { return std::exp((logit - x.top()) * inverse); };
  for (int i = 0; k && i < count; i++) total += weight(best[i]);
  float before = 0.f, unsure = -INFINITY;
  for (int i = 0; i < count; i++) {
    if (i && before >= (race.top_p - ROUNDING) * total && unsure == -INFINITY) unsure = best[i];
    if (i && before >= (race.top_p + ROUNDING) * total) {
      result.raise(best[i - 1], unsure);
      return result;
    }
    before += weight(best[i]);
  }
  result.raise(-INFINITY, unsure);
  return result;
}

// The first two of a race, by how early they finish.
struct Winner {
  double best = -INFINITY, second = -INFINITY;
  int token = -1;

  void offer(double earliness, int from) {
    if (earliness > best)
      second = best, best = earliness, token = from;
    else
      second = std::max(second, earliness);
  }
};

// The token that race.py draws with the target's logits. -1 where rounding might decide, or a
// number is not finite: race.py then draws itself, so that the result is always its own.
inline int64_t draw(const Race& race, const float* logits, int size) {
  const Logits x(logits, size);
  const float top = x.top(), start = top / race.temperature, inverse = 1.f / race.temperature;
  if (!std::isfinite(start) || !std::isfinite(inverse)) return -1;
  constexpr float LN2 = 0.69314718f;
  const float margin = 1e-4f + 1e-6f * std::fabs(start);
  const Kept limits = kept(race, x, margin);
  const Noise noise(race.seed, race.position);
  const Words ids = (Words)lane_numbers();
  Winner winner;
  float bar = -3.2f;  // the likeliest token's noise is below e^3.2
  for (int i = 0; i < size; i += LANES) {
    // Noise is at least 2⁻³³.
    const float least = std::max(limits.from, top + race.temperature * (bar - 23.f));
    if (x.most(i) < least) continue;
    const Floats v = x.vector(i);
    const Words words = noise(ids + (uint32_t)i);
    // The noise is at least w = 1 - u, whose bits are a lower bound of its binary logarithm.
    const Floats w = __builtin_convertvector(~words, Floats) + broadcast(0.5f);
    const Floats log2 =
        fma(__builtin_convertvector((Ints)w, Floats), broadcast(0x1p-23f), broadcast(-159.f));
    const Floats earliest = fma(log2, broadcast(-LN2), (v - broadcast(top)) * broadcast(inverse));
    const Ints runs = (Ints)(earliest >= broadcast(bar)) & (Ints)(v >= broadcast(limits.from));
    for (uint32_t left = lanes_set(runs); left; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      const float z = v[lane] / race.temperature;
      winner.offer((double)(z - start) - std::log((double)Noise::of(words[lane])), i + lane);
    }
    bar = std::max(bar, (float)winner.best - 1e-3f - 10.f * margin);
  }
  if (winner.token < 0 || winner.best - winner.second < margin) return -1;
  return x[winner.token] > limits.unsure ? winner.token : -1;
}

}  // namespace aquiline
