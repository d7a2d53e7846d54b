// The functions that Python calls. Each returns 0, or 1 and a message.
#include <omp.h>

#include "draft.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace aquiline {
namespace {

thread_local Scratch scratch;

// Runs a pass on `threads` threads, in memory that it lays out.
template <class P>
void in_parallel(P& pass, int threads) {
  scratch.measure();
  pass.lay_out(scratch);
  scratch.allocate();
  pass.lay_out(scratch);
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  pass.run(Member{omp_get_thread_num(), omp_get_num_threads(), &barrier});
}

void forward(const Stack& stack, Call& call, const Nodes& nodes) {
  std::vector<int32_t> wanted;
  if (stack.final_norm && call.logits)
    for (int b = 0; b < call.batch; b++)
      for (int i = 0; i < call.asked; i++)
        wanted.push_back(b * call.width +
                         (call.logits_at ? (int)call.logits_at[(size_t)b * call.asked + i] : i));
  Pass pass(stack, call, nodes, wanted);
  in_parallel(pass, call.threads);
}

void read_out(const Readout& readout, const ReadoutCall& call) {
  ReadoutPass pass(readout, call);
  in_parallel(pass, call.threads);
}

}  // namespace
}  // namespace aquiline

using namespace aquiline;

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int aquiline_forward(const Stack* stack, Call* call) {
  try {
    static thread_local Nodes nodes;
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

EXPORT int aquiline_draft(const DraftNetwork* network, DraftCall* call) {
  try {
    static thread_local Nodes nodes;
    Call& inner = *call->call;
    if (!read_nodes(*network->stack, inner, nodes)) return 1;
    for (const Node& node : nodes.nodes) {
      const int more = call->levels - 2;  // forwards after the first
      if (node.slot + more * inner.width >= inner.capacity)
        return !fail(inner, "slot", node.slot + more * inner.width, inner.capacity);
      if (node.position + more >= inner.angles)
        return !fail(inner, "position", node.position + more, inner.angles);
    }
    inner.message[0] = 0;
    DraftPass pass(*network, *call, nodes);
    in_parallel(pass, inner.threads);
    return inner.message[0] != 0;
  } catch (const std::bad_alloc&) {
    snprintf(call->call->message, sizeof call->call->message, "no memory for a draft of %d levels",
             call->levels);
    return 1;
  }
}

EXPORT int aquiline_ingest(const DraftNetwork* network, const IngestCall* call) {
  Call& inner = *call->call;
  try {
    static thread_local Nodes nodes;
    if (!read_nodes(*network->stack, inner, nodes)) return 1;
    for (int i = 0; i < inner.batch * inner.width; i++)
      if (call->tokens[i] < 0 || call->tokens[i] >= network->embeddings)
        return !fail(inner, "token", call->tokens[i], network->embeddings);
    for (int b = 0; b < inner.batch; b++)
      if (call->counts[b] < 1 || call->counts[b] > inner.width)
        return !fail(inner, "count", call->counts[b], inner.width + 1);
    IngestPass pass(*network, *call, nodes);
    in_parallel(pass, inner.threads);
    return 0;
  } catch (const std::bad_alloc&) {
    snprintf(inner.message, sizeof inner.message, "no memory for %d positions",
             inner.batch * inner.width);
    return 1;
  }
}

EXPORT int64_t aquiline_draw(const Race* race, const float* logits, int32_t size) {
  try {
    return draw(*race, logits, size);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

// How late the draft ids 0 … size - 1 start, into `out`.
EXPORT void aquiline_delays(const Race* race, const int64_t* to_target, int32_t size, float* out) {
  const Noise noise(race->seed, race->position);
  alignas(64) float late[LANES];
  for (int i = 0; i < size; i += LANES) {
    delays(noise, target_ids(to_target, i, size), race->factor, late);
    memcpy(out + i, late, lanes_at(i, size) * sizeof(float));
  }
}

// Squeezes vectors of words of pairs, (vectors, inputs / 2, 16, 2), see squeezed.h; `odd` gets a
// byte a unit.
EXPORT void aquiline_squeeze(const uint16_t* words, int32_t vectors, int32_t inputs, uint8_t* out,
                             uint8_t* tables, uint8_t* odd, int32_t threads) {
  const int units = inputs / UNIT_INPUTS;
#pragma omp parallel for num_threads(threads)
  for (int v = 0; v < vectors; v++)
    squeeze(words + (size_t)v * inputs * LANES, inputs, out + (size_t)v * units * UNIT_LINES * LINE,
            tables + (size_t)v * TABLE_SIZE, odd + (size_t)v * units);
}

EXPORT void aquiline_facts(Facts* facts) {
  *facts = {LANES,
            HAS_PAIR_DOTS,
            tiles_allowed(),
            CAN_SQUEEZE,
            {sizeof(Stack), sizeof(Layer), sizeof(Call), sizeof(Readout), sizeof(ReadoutCall),
             sizeof(DraftNetwork), sizeof(DraftCall), sizeof(IngestCall), sizeof(Race)}};
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
