// Handle words, and the epochs of the windows that are reading them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace dynaexq {

constexpr std::size_t kMaxWindows = 64;

// A fixed table of 64-bit handle words. One word is one expert; a publish is one atomic store.
// Windows pin the table: a pin registers the current epoch and copies every word. A buffer that
// was unlinked by a publish may be reused once no live window pinned an epoch at or before it.
class HandleTable {
 public:
  explicit HandleTable(std::size_t size);

  std::size_t size() const { return size_; }
  std::uint64_t load(std::size_t index) const;
  // Publishes `word` and returns the epoch that must have drained before what it replaced is reused.
  std::uint64_t publish(std::size_t index, std::uint64_t word);

  // Registers a window, copies the words to `out` (size() of them), returns the window's slot.
  std::size_t pin(std::uint64_t* out);
  void release(std::size_t slot);

  // True when every window that could have seen a word replaced at `epoch` has ended.
  bool drained(std::uint64_t epoch) const;
  std::size_t live_windows() const;

 private:
  void check(std::size_t index) const;

  std::size_t size_;
  std::unique_ptr<std::uint64_t[]> words_;
  std::uint64_t epoch_ = 1;                    // 0 marks a free slot
  std::uint64_t windows_[kMaxWindows] = {};
};

}  // namespace dynaexq
