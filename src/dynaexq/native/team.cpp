#include "team.hpp"

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace dynaexq {
namespace {

constexpr int kSpins = 4000;  // some microseconds: a phase's last unit on another thread

// The entry point of GCC's OpenMP runtime; LLVM's and Intel's offer it too.
using OpenMpParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

OpenMpParallel find_openmp() {
  if (void* found = dlsym(RTLD_DEFAULT, "GOMP_parallel")) return reinterpret_cast<OpenMpParallel>(found);
  for (const char* name : {"libgomp.so.1", "libomp.so.5", "libomp.so", "libiomp5.so"})
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD))
      if (void* found = dlsym(library, "GOMP_parallel")) return reinterpret_cast<OpenMpParallel>(found);
  return nullptr;
}

OpenMpParallel openmp() {
  static const OpenMpParallel found = find_openmp();
  return found;
}

// Threads that sleep between regions; one region at a time, a second caller works alone.
class Pool {
 public:
  void run(int threads, void (*body)(void*), void* data) {
    std::unique_lock<std::mutex> region(region_, std::try_to_lock);
    if (!region.owns_lock()) return body(data);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(workers_.size()) < threads - 1) workers_.emplace_back([this] { serve(); });
      body_ = body;
      data_ = data;
      wanted_ = threads - 1;
    }
    wake_.notify_all();
    body(data);
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;  // who has not woken by now is not needed: all work is done
    idle_.wait(lock, [this] { return running_ == 0; });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return ending_ || wanted_ > 0; });
      if (ending_) return;
      --wanted_;
      ++running_;
      lock.unlock();
      body_(data_);
      lock.lock();
      if (--running_ == 0) idle_.notify_one();
    }
  }

  std::mutex region_, mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::thread> workers_;
  void (*body_)(void*) = nullptr;
  void* data_ = nullptr;
  int wanted_ = 0, running_ = 0;
  bool ending_ = false;
};

}  // namespace

void run_team(int threads, void (*body)(void*), void* data) {
  if (threads <= 1) return body(data);
  if (const OpenMpParallel parallel = openmp()) return parallel(body, data, static_cast<unsigned>(threads), 0);
  static Pool pool;
  pool.run(threads, body, data);
}

const char* team_kind() { return openmp() ? "openmp" : "own"; }

void Phase::reset(int units, int threads) {
  units_ = units;
  ranges_ = std::min(std::max(threads, 1), kMostThreads);
  joined_.store(0, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  for (int i = 0; i < ranges_; ++i) {
    range_[i].next.store(static_cast<int>(static_cast<long>(units) * i / ranges_), std::memory_order_relaxed);
    range_[i].end = static_cast<int>(static_cast<long>(units) * (i + 1) / ranges_);
  }
}

void Phase::wait() const {
  for (int spins = 0; done_.load(std::memory_order_acquire) < units_; ++spins) {
    if (spins >= kSpins) {
      sched_yield();
      continue;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }
}

}  // namespace dynaexq
