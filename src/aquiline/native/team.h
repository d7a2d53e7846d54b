// The threads of one forward: how they share work, and how they wait for each other.
#pragma once
#include <atomic>
#include <cstdint>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace aquiline {

struct Range {
  int begin, end;
};

// An own barrier and not OpenMP's: that one spins for milliseconds where a thread has lost its
// core, and a forward has five barriers a layer.
class Barrier {
 public:
  void wait(int team) {
    if (team == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == (uint32_t)team) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_seq_cst);
      if (sleeping_.load(std::memory_order_seq_cst)) wake();
      return;
    }
    for (int i = 0; i < SPINS; i++) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      pause();
    }
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    while (phase_.load(std::memory_order_acquire) == phase) sleep(phase);
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  static constexpr int SPINS = 2000;  // some 50 µs, several times what a layer's phase takes

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
#if defined(__linux__)
  void sleep(uint32_t phase) {
    syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
  }
  void wake() { syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
  void sleep(uint32_t) { std::this_thread::yield(); }
  void wake() {}
#endif

  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<uint32_t> sleeping_{0};
};

struct Member {  // one thread of a team
  int id, size;
  Barrier* barrier;

  void wait() const { barrier->wait(size); }
  // This thread's part of `total` pieces that come in groups of `grain`.
  Range part(int64_t total, int grain = 1) const {
    const int64_t groups = (total + grain - 1) / grain;
    const int64_t begin = groups * id / size * grain, end = groups * (id + 1) / size * grain;
    return {(int)begin, (int)(end < total ? end : total)};
  }
};

}  // namespace aquiline
