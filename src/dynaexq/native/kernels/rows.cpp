#include "rows.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace dynaexq {

RowLayout::RowLayout(Precision precision, int columns, WeightFormat format)
    : precision_(precision), columns_(columns), format_(format) {
  const std::size_t size = precision == Precision::Int8 ? 1 : precision == Precision::Int16 ? 2 : 4;
  const auto floats = [&](int group) {
    return group ? align(static_cast<std::size_t>(columns / group) * sizeof(float)) : 0;
  };
  scale_offset_ = align(columns * size);
  sum_offset_ = scale_offset_ + floats(activation_group(format));
  stride_ = sum_offset_ + floats(format.group);
}

Row RowLayout::at(std::uint8_t* base, std::size_t index) const {
  std::uint8_t* row = base + index * stride_;
  return {row, reinterpret_cast<const float*>(row + scale_offset_), reinterpret_cast<const float*>(row + sum_offset_)};
}

void RowLayout::fill(const TileSet& tiles, std::uint8_t* base, std::size_t index, const float* x, int first,
                     int count) const {
  std::uint8_t* row = base + index * stride_;
  const int group = format_.group;
  auto* scale = reinterpret_cast<float*>(row + scale_offset_) + (group ? first / activation_group(format_) : 0);
  auto* sum = reinterpret_cast<float*>(row + sum_offset_) + (group ? first / group : 0);
  if (precision_ == Precision::Float) {
    std::memcpy(row + first * sizeof(float), x, count * sizeof(float));
    if (group) tiles.sum_groups(x, count, group, sum);
    return;
  }
  const int size = precision_ == Precision::Int8 ? 1 : 2;
  tiles.quantize(x, count, format_, precision_, row + first * size, scale, sum);
}

int rows_per_unit(int rows, int unit, int tokens, int threads) {
  if (tokens > kFewTokens) return std::max(kChunkRows / unit * unit, unit);
  const int share = rows / (4 * std::max(threads, 1));
  return std::min(std::max(share / unit * unit, unit), kMostChunkRows / unit * unit);
}

void load_numbers(Number kind, const void* from, std::size_t first, std::size_t count, float* out) {
  if (kind == Number::Float32) {
    std::memcpy(out, static_cast<const float*>(from) + first, count * sizeof(float));
    return;
  }
  const auto* halves = static_cast<const std::uint16_t*>(from) + first;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(halves[i]) << 16;
    std::memcpy(out + i, &bits, 4);
  }
}

void store_numbers(Number kind, const float* from, std::size_t count, void* out, std::size_t first) {
  if (kind == Number::Float32) {
    std::memcpy(static_cast<float*>(out) + first, from, count * sizeof(float));
    return;
  }
  auto* halves = static_cast<std::uint16_t*>(out) + first;
  for (std::size_t i = 0; i < count; ++i) {  // to nearest, ties to even; NaN stays NaN
    std::uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    halves[i] = static_cast<std::uint16_t>(nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

float float_of_half(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  std::uint32_t bits = sign | 0x7f800000 | fraction << 13;  // inf, NaN
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  }
  if (exponent != 31) bits = sign | (exponent + 112) << 23 | fraction << 13;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

std::uint8_t* Scratch::take(std::size_t bytes) {
  if (bytes > size_) {
    std::free(memory_);
    size_ = 0;
    memory_ = static_cast<std::uint8_t*>(std::aligned_alloc(kAlignment, align(bytes)));
    if (!memory_) throw std::bad_alloc();
    size_ = bytes;
  }
  return memory_;
}

Scratch::~Scratch() { std::free(memory_); }

Scratch& Scratch::of_thread() {
  static thread_local Scratch scratch;
  return scratch;
}

}  // namespace dynaexq
