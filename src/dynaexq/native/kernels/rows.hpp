// Rows of activations in scratch memory, in the precision that a weight format wants.
#pragma once
#include <cstddef>
#include <cstdint>

#include "tiles.hpp"

namespace dynaexq {

constexpr std::size_t kAlignment = 64;

constexpr std::size_t align(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
constexpr std::size_t align_floats(std::size_t count) { return align(count * sizeof(float)) / sizeof(float); }

// The precision in which activations meet weights of a format: 8-bit weights are too good for 8-bit activations.
constexpr Precision precision_for(WeightFormat format, bool exact) {
  if (exact || format.bits == 16) return Precision::Float;
  return format.whole_bits() == 8 ? Precision::Int16 : Precision::Int8;
}

// Where the parts of a row for weights of a format lie: values, then scales, then sums, each aligned.
class RowLayout {
 public:
  RowLayout() = default;
  RowLayout(Precision precision, int columns, WeightFormat format);

  std::size_t stride() const { return stride_; }
  Row at(std::uint8_t* base, std::size_t index) const;
  bool same_as(const RowLayout& other) const {
    return precision_ == other.precision_ && columns_ == other.columns_ && format_.group == other.format_.group &&
           activation_group(format_) == activation_group(other.format_);
  }

  // Fills columns [first, first + count) of row `index` from `x`; both are multiples of the group.
  void fill(const TileSet& tiles, std::uint8_t* base, std::size_t index, const float* x, int first, int count) const;

 private:
  Precision precision_ = Precision::Float;
  int columns_ = 0;
  WeightFormat format_ = {16, 0};
  std::size_t scale_offset_ = 0, sum_offset_ = 0, stride_ = 0;
};

constexpr int kChunkRows = 64;        // output rows that one work unit computes for many tokens
constexpr int kFewTokens = 8;         // up to so many, units read longer runs of weights
constexpr int kTokensAtOnce = 8;  // rounded by one work unit
constexpr int kAlone = 4;         // so few tokens are rounded before the team starts
constexpr int kMostChunkRows = kChunkRows * kBlockTokens / kFewTokens;

// Output rows of one work unit: a multiple of `unit`, at most kMostChunkRows for few tokens, else kChunkRows or `unit`.
int rows_per_unit(int rows, int unit, int tokens, int threads);

// Numbers as models keep them.
enum class Number : std::uint8_t { Float32, BFloat16 };

void load_numbers(Number kind, const void* from, std::size_t first, std::size_t count, float* out);
void store_numbers(Number kind, const float* from, std::size_t count, void* out, std::size_t first);

float float_of_half(std::uint16_t half);

// Scratch memory of the calling thread, kept from call to call; grows to the largest call.
class Scratch {
 public:
  // Uninitialised memory of at least `bytes`, aligned; what an earlier call returned is invalid then.
  std::uint8_t* take(std::size_t bytes);
  ~Scratch();
  static Scratch& of_thread();

 private:
  std::uint8_t* memory_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace dynaexq
