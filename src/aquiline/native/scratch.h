// Memory that one forward works in: kept by the calling thread, so that calls do not allocate.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace aquiline {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { free(memory_); }

  // First a pass that measures, then one that hands out: both call `take` in the same order.
  void measure() { base_ = nullptr, used_ = 0; }
  void allocate() {
    if (used_ > size_) {
      free(memory_);
      memory_ = nullptr, size_ = 0;
      const size_t wanted = used_ + used_ / 4;
      memory_ = (char*)malloc(wanted + ALIGNMENT);
      if (!memory_) throw std::bad_alloc();
      size_ = wanted;
    }
    base_ = (char*)(((uintptr_t)memory_ + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    used_ = 0;
  }
  template <class T>
  T* take(size_t count) {
    char* p = base_ + used_;
    used_ += (count * sizeof(T) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return (T*)(base_ ? p : nullptr);
  }

 private:
  static constexpr size_t ALIGNMENT = 64;
  char* memory_ = nullptr;
  char* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

}  // namespace aquiline
