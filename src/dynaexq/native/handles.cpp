#include "handles.hpp"

#include <stdexcept>

namespace dynaexq {

HandleTable::HandleTable(std::size_t size) : size_(size), words_(new std::uint64_t[size]()) {}

void HandleTable::check(std::size_t index) const {
  if (index >= size_) throw std::out_of_range("handle index out of range");
}

std::uint64_t HandleTable::load(std::size_t index) const {
  check(index);
  return __atomic_load_n(&words_[index], __ATOMIC_ACQUIRE);
}

// Hazard: pin() and publish() are the two sides of a Dekker handshake. A pin writes its slot and then
// reads words; a publish writes a word and then lets drained() read slots. All four accesses must stay
// sequentially consistent, or a window could keep an old word while its slot still looks free.
std::uint64_t HandleTable::publish(std::size_t index, std::uint64_t word) {
  check(index);
  __atomic_store_n(&words_[index], word, __ATOMIC_SEQ_CST);
  return __atomic_fetch_add(&epoch_, 1, __ATOMIC_SEQ_CST);
}

std::size_t HandleTable::pin(std::uint64_t* out) {
  for (std::size_t slot = 0; slot < kMaxWindows; ++slot) {
    std::uint64_t free_slot = 0;
    const std::uint64_t now = __atomic_load_n(&epoch_, __ATOMIC_SEQ_CST);
    if (!__atomic_compare_exchange_n(&windows_[slot], &free_slot, now, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_RELAXED))
      continue;
    for (std::size_t i = 0; i < size_; ++i) out[i] = __atomic_load_n(&words_[i], __ATOMIC_SEQ_CST);
    return slot;
  }
  throw std::runtime_error("too many windows are open at once (64)");
}

void HandleTable::release(std::size_t slot) {
  if (slot >= kMaxWindows || __atomic_load_n(&windows_[slot], __ATOMIC_RELAXED) == 0)
    throw std::out_of_range("no window is open in this slot");
  __atomic_store_n(&windows_[slot], 0, __ATOMIC_RELEASE);
}

bool HandleTable::drained(std::uint64_t epoch) const {
  for (const std::uint64_t& window : windows_) {
    const std::uint64_t pinned = __atomic_load_n(&window, __ATOMIC_SEQ_CST);
    if (pinned != 0 && pinned <= epoch) return false;
  }
  return true;
}

std::size_t HandleTable::live_windows() const {
  std::size_t live = 0;
  for (const std::uint64_t& window : windows_)
    live += __atomic_load_n(&window, __ATOMIC_ACQUIRE) != 0;
  return live;
}

}  // namespace dynaexq
