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

// Work units of one phase of a parallel region, handed out one by one; `work` returns when all are done, so the
// next phase may read what this one wrote. Any number of threads may take part.
class Phase {
 public:
  void reset(int units) {
    units_ = units;
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
  }

  template <class Function>
  void work(Function function) {
    int unit;
    while ((unit = next_.fetch_add(1, std::memory_order_relaxed)) < units_) {
      function(unit);
      done_.fetch_add(1, std::memory_order_release);
    }
    wait();
  }

 private:
  void wait() const;

  int units_ = 0;
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> done_{0};
};

template <class Function>
void run_team(int threads, Function& function) {
  run_team(threads, [](void* data) { (*static_cast<Function*>(data))(); }, &function);
}

}  // namespace dynaexq
