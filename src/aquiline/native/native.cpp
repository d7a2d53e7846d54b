// The functions that Python calls. Each returns 0, or 1 and a message.
#include <omp.h>

#include "stack.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace aquiline {
namespace {

thread_local Scratch scratch;

template <class F>
void in_parallel(int threads, F&& run) {
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  run(Member{omp_get_thread_num(), omp_get_num_threads(), &barrier});
}

void forward(const Stack& stack, Call& call, const Nodes& nodes) {
  std::vector<int32_t> wanted;
  if (stack.final_norm && call.logits)
    for (int b = 0; b < call.batch; b++)
      for (int i = 0; i < call.asked; i++)
        wanted.push_back(b * call.width +
                         (call.logits_at ? (int)call.logits_at[(size_t)b * call.asked + i] : i));
  Pass pass(stack, call, nodes, wanted);
  scratch.measure();
  pass.lay_out(scratch, call.threads);
  scratch.allocate();
  pass.lay_out(scratch, call.threads);
  in_parallel(call.threads, [&](const Member& member) { pass.run(member); });
}

// Norms (each thread its own rows) and the product, `CHUNK` rows at a time.
void read_out(const Readout& r, const ReadoutCall& call) {
  constexpr int CHUNK = 256;
  const bool half = r.matrix.weight && r.matrix.takes_halves();
  const int inputs = r.matrix.weight ? r.matrix.inputs : r.inputs, size = r.inputs / r.parts;
  const size_t stride = row_stride(padded(inputs, LANES), half);
  const int most = (int)std::min<int64_t>(CHUNK, call.n);
  Rows rows;
  float *wide = nullptr, *out = nullptr;
  const size_t wide_stride = padded(r.inputs, LANES) + LANES;
  for (int twice = 0; twice < 2; twice++) {
    if (twice)
      scratch.allocate();
    else
      scratch.measure();
    rows = {scratch.take<char>(most * stride), stride, half};
    wide = scratch.take<float>(call.threads * wide_stride);
    out = scratch.take<float>((size_t)call.threads * most * BLOCK * LANES);
  }
  in_parallel(call.threads, [&](const Member& member) {
    Tiles tiles;
    float *mine = wide + member.id * wide_stride,
          *y = out + (size_t)member.id * most * BLOCK * LANES;
    for (int64_t start = 0; start < call.n; start += CHUNK) {
      const int n = (int)std::min<int64_t>(CHUNK, call.n - start);
      const Range part = member.part(n);
      for (int t = part.begin; t < part.end; t++) {
        const Values given{call.x, (bool)r.half_in};
        for (int i = 0; i < r.inputs; i += LANES) {
          const int count = lanes_at(i, r.inputs);
          store_part(mine + i, given.at((size_t)(start + t) * r.inputs + i, count), count);
        }
        if (r.norm)
          for (int p = 0; p < r.parts; p++) {
            const Floats scale = broadcast(inverse_rms(mine + p * size, size, r.eps));
            for (int i = 0; i < size; i += LANES) {
              const int count = lanes_at(i, size);
              float* x = mine + p * size + i;
              store_part(x, load_part(x, count) * scale * load_part(r.norm + p * size + i, count),
                         count);
            }
          }
        if (r.matrix.weight) {
          copy_row(mine, r.inputs, rows, t);
          rows.zero(t, padded(r.inputs, LANES), inputs);
        } else {
          for (int i = 0; i < r.inputs; i += LANES) {
            const int count = lanes_at(i, r.inputs);
            put_part(call.out, r.half_out, (size_t)(start + t) * r.inputs + i,
                     load_part(mine + i, count), count);
          }
        }
      }
      if (!r.matrix.weight) continue;
      member.wait();
      const Range vectors = member.part(r.matrix.vectors);
      for (int v = vectors.begin; v < vectors.end; v += BLOCK) {
        const int count = std::min(BLOCK, vectors.end - v);
        multiply(r.matrix, rows, n, v, count, y, BLOCK * LANES, tiles);
        for (int t = 0; t < n; t++)
          for (int i = 0; i < count; i++) {
            const int at = (v + i) * LANES;
            if (at >= r.outputs) break;
            put_part(call.out, r.half_out, (size_t)(start + t) * r.outputs + at,
                     load(y + ((size_t)t * BLOCK + i) * LANES), lanes_at(at, r.outputs));
          }
      }
      member.wait();
    }
  });
}

}  // namespace
}  // namespace aquiline

using namespace aquiline;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int aquiline_forward(const Stack* stack, Call* call) {
  try {
    static thread_local Nodes nodes;
    nodes.paths.clear();
    nodes.positions.clear();
    nodes.span = 0;
    if (!read_nodes(*stack, *call, nodes)) return 1;
    forward(*stack, *call, nodes);
    return 0;
  } catch (const std::bad_alloc&) {
    snprintf(call->message, sizeof call->message, "no memory for a forward of %d nodes",
             call->batch * call->width);
    return 1;
  }
}

EXPORT int aquiline_read_out(const Readout* readout, const ReadoutCall* call) {
  try {
    read_out(*readout, *call);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

EXPORT void aquiline_facts(Facts* facts) {
  *facts = {LANES,
            HAS_PAIR_DOTS,
            tiles_allowed(),
            (int)sizeof(Stack),
            (int)sizeof(Layer),
            (int)sizeof(Call),
            (int)sizeof(Readout),
            (int)sizeof(ReadoutCall)};
}

// Asks for huge pages: weights are read from end to end, and small pages cost a tenth of the time.
EXPORT void aquiline_advise(void* memory, uint64_t bytes) {
#if defined(__linux__)
  const uintptr_t page = 1 << 21, begin = ((uintptr_t)memory + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}
}
