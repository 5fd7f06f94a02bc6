#include "attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "../team.hpp"
#include "rows.hpp"

namespace dynaexq {
namespace {

// x * cos + rotate_half(x) * sin, in place.
void rotate(float* x, const float* cosine, const float* sine, int width) {
  const int half = width / 2;
  for (int i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cosine[i] - second * sine[i];
    x[i + half] = second * cosine[i + half] + first * sine[i + half];
  }
}

// Bytes of one number.
constexpr std::ptrdiff_t kept_bytes(KvFormat format) {
  return format == KvFormat::Float32 ? 4 : format == KvFormat::Int8 ? 1 : 2;
}

std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// To nearest, ties to even; what is too large becomes the largest number, NaN stays NaN.
std::uint16_t half_of(float x) {
  const auto sign = static_cast<std::uint16_t>(bits_of(x) >> 16 & 0x8000);
  if (std::isnan(x)) return sign | 0x7e00;
  const float size = std::min(std::fabs(x), 65504.0f);
  if (size < 6.103515625e-05f)  // below the smallest normal number: whole multiples of 2^-24
    return sign | static_cast<std::uint16_t>(std::nearbyintf(size * 16777216.0f));
  const std::uint32_t bits = bits_of(size) - (112u << 23);  // the exponent's other bias
  return sign | static_cast<std::uint16_t>((bits + 0xfff + (bits >> 13 & 1)) >> 13);
}

// Returns the scale, by which the row's largest magnitude is 127; NaN where a value is not finite.
float round_row(const float* x, int width, std::int8_t* out) {
  std::uint32_t bits = 0;  // as integers, inf and NaN are above all numbers
  for (int i = 0; i < width; ++i) bits = std::max(bits, bits_of(x[i]) & 0x7fffffffu);
  float largest;
  std::memcpy(&largest, &bits, sizeof largest);
  if (!(largest >= 1e-30f) || !std::isfinite(largest)) {
    std::fill_n(out, width, std::int8_t{0});
    return largest < 1e-30f ? 0.0f : NAN;
  }
  const float inverse = 127.0f / largest;
  for (int i = 0; i < width; ++i) out[i] = static_cast<std::int8_t>(std::nearbyintf(x[i] * inverse));
  return largest / 127.0f;
}

// Stores x [width] at number `place` of `rows`, a multiple of width.
void keep_row(KvFormat format, const float* x, int width, std::ptrdiff_t place, void* rows, float* scales) {
  switch (format) {
    case KvFormat::Float32: return store_numbers(Number::Float32, x, width, rows, place);
    case KvFormat::BFloat16: return store_numbers(Number::BFloat16, x, width, rows, place);
    case KvFormat::Float16: std::transform(x, x + width, static_cast<std::uint16_t*>(rows) + place, half_of); return;
    case KvFormat::Int8: scales[place / width] = round_row(x, width, static_cast<std::int8_t*>(rows) + place); return;
  }
}

}  // namespace

// Where the arrays of one call lie in its working memory.
struct Attention::Memory {
  float *queries, *mixed, *keys, *values, *scores;
  std::size_t scores_width;  // of one query
};

Attention::Attention(const AttentionParts& parts, const TileSet& tiles)
    : parts_(parts),
      shared_(parts.kv_heads ? parts.heads / parts.kv_heads : 0),
      parts_by_head_((shared_ + kQueriesAtOnce - 1) / kQueriesAtOnce),
      tiles_(tiles) {
  if (shared_ < 1 || parts.heads % parts.kv_heads || parts.width % 16)
    throw std::invalid_argument("attention of unsupported geometry");
}

std::size_t Attention::memory(const Sequences& sequences) const {
  return sequences.count * (2 * (parts_.heads + parts_.kv_heads) * static_cast<std::size_t>(parts_.width) +
                            parts_.heads * scores_width(sequences));
}

std::size_t Attention::scores_width(const Sequences& sequences) const {
  return align_floats(*std::max_element(sequences.pasts, sequences.pasts + sequences.count) + 1);
}

void Attention::forward(const Sequences& sequences, const CacheView& cache, const float* normed, float* working,
                        float* out, int threads) const {
  const int count = sequences.count;
  const std::size_t heads = static_cast<std::size_t>(count) * parts_.heads * parts_.width;
  const std::size_t kv_heads = static_cast<std::size_t>(count) * parts_.kv_heads * parts_.width;
  Memory memory{working, working + heads, working + 2 * heads, working + 2 * heads + kv_heads,
                working + 2 * (heads + kv_heads), scores_width(sequences)};
  const PackedLinear::Use projections[] = {{parts_.query.matrix, parts_.query.bias, memory.queries},
                                           {parts_.key.matrix, parts_.key.bias, memory.keys},
                                           {parts_.value.matrix, parts_.value.bias, memory.values}};
  PackedLinear::forward(projections, 3, Number::Float32, normed, count, threads);
  if (!parts_.norm_by_head) {
    normalize(parts_.query_norm, memory.queries, count, parts_.heads * parts_.width);
    normalize(parts_.key_norm, memory.keys, count, parts_.kv_heads * parts_.width);
  }
  Phase adding, attending;
  adding.reset(count * parts_.kv_heads, threads);
  attending.reset(count * parts_.kv_heads * parts_by_head_, threads);
  auto work = [&] {
    adding.work([&](int unit) { add_token(sequences, cache, memory, unit); });
    attending.work([&](int unit) { attend(sequences, cache, memory, unit); });
  };
  run_team(threads, work);
  parts_.output.matrix->forward(Number::Float32, memory.mixed, count, parts_.output.bias, out, threads);
}

// One unit is one key head of one sequence: finishes its key and the queries that share it, and stores key and value.
void Attention::add_token(const Sequences& sequences, const CacheView& cache, const Memory& memory, int unit) const {
  const int width = parts_.width, sequence = unit / parts_.kv_heads, head = unit % parts_.kv_heads;
  const std::ptrdiff_t position = static_cast<std::ptrdiff_t>(sequences.positions[sequence]) * width;
  const float *cosine = sequences.cosine + position, *sine = sequences.sine + position;
  float* key = memory.keys + static_cast<std::size_t>(unit) * width;
  float* query = memory.queries + static_cast<std::size_t>(unit) * shared_ * width;
  if (parts_.norm_by_head) {
    normalize(parts_.key_norm, key, 1, width);
    normalize(parts_.query_norm, query, shared_, width);
  }
  rotate(key, cosine, sine, width);
  for (int i = 0; i < shared_; ++i) rotate(query + i * width, cosine, sine, width);
  const std::ptrdiff_t place = sequences.slots[sequence] * cache.slot_stride + head * cache.head_stride +
                               static_cast<std::ptrdiff_t>(sequences.pasts[sequence]) * width;
  keep_row(cache.format, key, width, place, cache.keys, cache.key_scales);
  keep_row(cache.format, memory.values + static_cast<std::size_t>(unit) * width, width, place, cache.values,
           cache.value_scales);
}

// One unit is a few of the queries that share a key head.
void Attention::attend(const Sequences& sequences, const CacheView& cache, const Memory& memory, int unit) const {
  const int part = unit % parts_by_head_, key_head = unit / parts_by_head_;
  const int sequence = key_head / parts_.kv_heads, head = key_head % parts_.kv_heads;
  const std::ptrdiff_t place = sequences.slots[sequence] * cache.slot_stride + head * cache.head_stride;
  const int first = part * kQueriesAtOnce, queries = std::min(kQueriesAtOnce, shared_ - first);
  const std::size_t at = static_cast<std::size_t>(key_head) * shared_ + first;
  const std::ptrdiff_t skip = place * kept_bytes(cache.format), row = place / parts_.width;
  tiles_.attend({memory.queries + at * parts_.width, queries, static_cast<const char*>(cache.keys) + skip,
                 static_cast<const char*>(cache.values) + skip, parts_.width, sequences.pasts[sequence] + 1,
                 parts_.scaling, memory.scores + at * memory.scores_width, memory.scores_width,
                 memory.mixed + at * parts_.width, cache.format,
                 cache.key_scales ? cache.key_scales + row : nullptr,
                 cache.value_scales ? cache.value_scales + row : nullptr});
}

void Attention::normalize(const Norm& norm, float* x, int rows, int width) const {
  for (int i = 0; norm.weight && i < rows; ++i)
    tiles_.normalize(x + i * width, norm.weight, norm.epsilon, width, x + i * width);
}

}  // namespace dynaexq
