// Threads for one parallel region, shared with torch where torch is there.
#pragma once
#include <atomic>

namespace dynaexq {

// Runs body(data) on up to `threads` threads, the caller among them, and returns when all have ended. Where the
// process has an OpenMP runtime (torch brings one), its team of the calling thread is used: a second pool would
// fight with it for cores, since both wait by spinning. Otherwise threads of our own, which sleep when idle.
void run_team(int threads, void (*body)(void*), void* data);

// "openmp" or "own".
const char* team_kind();

constexpr int kMostThreads = 64;

// Work units of one phase of a parallel region. A thread first takes units of a range of its own, so that it reads
// weights in a row, then what is left of the others' ranges. `work` returns when all units are done: the next phase
// may read what this one wrote. Any number of threads may take part.
class Phase {
 public:
  void reset(int units, int threads);

  template <class Function>
  void work(Function function) {
    const int own = joined_.fetch_add(1, std::memory_order_relaxed) % ranges_;
    for (int turn = 0; turn < ranges_; ++turn) {
      Range& range = range_[(own + turn) % ranges_];
      int unit;
      while ((unit = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end) {
        function(unit);
        done_.fetch_add(1, std::memory_order_release);
      }
    }
    wait();
  }

 private:
  struct alignas(64) Range {
    std::atomic<int> next{0};
    int end = 0;
  };

  void wait() const;

  int units_ = 0, ranges_ = 1;
  std::atomic<int> joined_{0};
  alignas(64) std::atomic<int> done_{0};
  Range range_[kMostThreads];
};

template <class Function>
void run_team(int threads, Function& function) {
  run_team(threads, [](void* data) { (*static_cast<Function*>(data))(); }, &function);
}

}  // namespace dynaexq
