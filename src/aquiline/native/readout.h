// Norms and one product for rows on their own: fused features, draft logits, the LM head.
#pragma once
#include "abi.h"
#include "scratch.h"
#include "team.h"

namespace aquiline {

constexpr int READOUT_ROWS = 256;  // at a time

class ReadoutPass {
 public:
  ReadoutPass(const Readout& readout, const ReadoutCall& call)
      : readout_(readout), call_(call), most_((int)std::min<int64_t>(READOUT_ROWS, call.n)) {}

  void lay_out(Scratch& scratch) {
    const Matrix& m = readout_.matrix;
    const bool half = m.weight && m.takes_halves();
    const int inputs = m.weight ? m.inputs : 0;
    const size_t stride = row_stride(padded(inputs, LANES), half);
    rows_ = {scratch.take<char>(most_ * stride), stride, half};
    const bool codes = m.weight && m.takes_codes();
    codes_ = {scratch.take<char>(codes ? most_ * code_stride(inputs) : 0), code_stride(inputs)};
    wide_stride_ = padded(readout_.inputs, LANES);
    wide_ = scratch.take<float>(call_.threads * wide_stride_);
    sums_ = scratch.take<float>((size_t)call_.threads * most_ * BLOCK * LANES);
  }

  void run(const Member& member) {
    Tiles tiles;
    for (int64_t start = 0; start < call_.n; start += READOUT_ROWS) {
      const int n = (int)std::min<int64_t>(READOUT_ROWS, call_.n - start);
      const Range mine = member.part(n);
      for (int t = mine.begin; t < mine.end; t++) read_row(member, start, t);
      if (!readout_.matrix.weight) continue;
      member.wait();
      multiply_rows(member, start, n, tiles);
      member.wait();
    }
  }

 private:
  // One row, normed: an input of the product, or the result where there is none.
  void read_row(const Member& member, int64_t start, int t) {
    const Readout& r = readout_;
    const int size = r.inputs / r.parts;
    float* x = wide_ + member.id * wide_stride_;
    read_values(call_.x, r.half_in, (size_t)(start + t) * r.inputs, r.inputs, x);
    for (int part = 0; r.norm && part < r.parts; part++)
      normalise(x + part * size, r.norm + part * size, size, r.eps, x + part * size);
    if (r.matrix.weight) {
      copy_row(x, r.inputs, rows_, t);
      rows_.zero(t, padded(r.inputs, LANES), r.matrix.inputs);
      return;
    }
    write_values(x, r.inputs, call_.out, r.half_out, (size_t)(start + t) * r.inputs);
  }

  void multiply_rows(const Member& member, int64_t start, int n, Tiles& tiles) {
    const Matrix& m = readout_.matrix;
    Rows x = rows_;
    if (m.takes_codes()) {
      x = codes_;
      x.split = splits(n);
      const Range mine = member.part(n);
      for (int t = mine.begin; t < mine.end; t++)
        quantise((const float*)rows_.row(t), m.inputs, x, t);
      member.wait();
    }
    float* sums = sums_ + (size_t)member.id * most_ * BLOCK * LANES;
    const Range mine = member.part(m.vectors, LINE_VECTORS);
    for (int v = mine.begin; v < mine.end; v += BLOCK) {
      const int count = std::min(BLOCK, mine.end - v);
      multiply(m, x, n, v, count, sums, BLOCK * LANES, tiles);
      for (int t = 0; t < n; t++)
        write_values(sums + (size_t)t * BLOCK * LANES,
                     std::min(count * LANES, readout_.outputs - v * LANES), call_.out,
                     readout_.half_out, (size_t)(start + t) * readout_.outputs + v * LANES);
    }
  }

  const Readout& readout_;
  const ReadoutCall& call_;
  const int most_;
  Rows rows_, codes_;
  float *wide_ = nullptr, *sums_ = nullptr;
  size_t wide_stride_ = 0;
};

}  // namespace aquiline
