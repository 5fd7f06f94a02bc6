// What all tests need: random numbers, memory with a guard page, comparisons, the list of kernel sets.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tiles.hpp"

namespace dynaexq::test {

class Random {  // splitmix64
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  int below(int end) { return static_cast<int>(bits() % static_cast<std::uint64_t>(end)); }
  double uniform(double low, double high) { return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1p-53; }
  double normal() {  // near enough: the sum of twelve uniforms
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform(0, 1);
    return sum;
  }
  std::vector<float> normals(std::size_t count, double factor = 1) {
    std::vector<float> result(count);
    for (float& x : result) x = static_cast<float>(factor * normal());
    return result;
  }

 private:
  std::uint64_t state_;
};

constexpr std::uint8_t kSentinel = 0xA5;

// Memory whose last byte is the last before a page that cannot be touched. What lies before it on its first page
// holds a sentinel.
class Guarded {
 public:
  explicit Guarded(std::size_t size) : size_(size) {
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t usable = (size / page + 1) * page;
    mapped_ = usable + page;
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(static_cast<std::uint8_t*>(memory) + usable, page, PROT_NONE)) std::abort();
    memory_ = static_cast<std::uint8_t*>(memory);
    data_ = memory_ + usable - size;
    std::memset(memory_, kSentinel, usable);
  }
  Guarded(const void* from, std::size_t size) : Guarded(size) {
    if (size) std::memcpy(data_, from, size);
  }
  template <class T>
  explicit Guarded(const std::vector<T>& from) : Guarded(from.data(), from.size() * sizeof(T)) {}
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(memory_, mapped_); }

  std::uint8_t* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  bool nothing_before() const {
    for (const std::uint8_t* at = memory_; at != data_; ++at)
      if (*at != kSentinel) return false;
    return true;
  }
  bool untouched() const {
    for (std::size_t i = 0; i < size_; ++i)
      if (data_[i] != kSentinel) return false;
    return nothing_before();
  }

 private:
  std::size_t size_, mapped_;
  std::uint8_t *memory_, *data_;
};

template <class T>
bool same_bits(const T* a, const T* b, std::size_t count) {
  return count == 0 || std::memcmp(a, b, count * sizeof(T)) == 0;
}

template <class T>
bool all_finite(const T* x, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    if (!std::isfinite(x[i])) return false;
  return true;
}

// |got - wanted| / |wanted|, Euclidean; infinite where either is not finite.
template <class T, class U>
double distance(const T* got, const U* wanted, std::size_t count) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double difference = static_cast<double>(got[i]) - static_cast<double>(wanted[i]);
    error += difference * difference;
    norm += static_cast<double>(wanted[i]) * static_cast<double>(wanted[i]);
  }
  if (!std::isfinite(error) || !std::isfinite(norm)) return HUGE_VAL;
  return error == 0 ? 0 : std::sqrt(error / norm);
}

inline std::uint16_t to_bfloat16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (std::isnan(x)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  const std::uint32_t low = bits & 0xffff, high = bits >> 16;
  return static_cast<std::uint16_t>(high + (low > 0x8000 || (low == 0x8000 && (high & 1))));
}

inline float from_bfloat16(std::uint16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline const TileSet& scalar_tiles() {
  const TileSet* const* set = available_tiles();
  while (set[1]) ++set;
  return **set;
}

// Sets of instructions this processor lacks, with the instructions written out in C++.
void add_emulated_sets(std::vector<const TileSet*>& sets);

void test_layout();
void test_tiles(const TileSet& set);
void test_experts(const TileSet& set);
void test_linear(const TileSet& set);

}  // namespace dynaexq::test
