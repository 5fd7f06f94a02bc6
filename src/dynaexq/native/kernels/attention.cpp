#include "attention.hpp"

#include <algorithm>
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
  std::memcpy(cache.keys + place, key, width * sizeof(float));
  std::memcpy(cache.values + place, memory.values + static_cast<std::size_t>(unit) * width, width * sizeof(float));
}

// One unit is a few of the queries that share a key head.
void Attention::attend(const Sequences& sequences, const CacheView& cache, const Memory& memory, int unit) const {
  const int part = unit % parts_by_head_, key_head = unit / parts_by_head_;
  const int sequence = key_head / parts_.kv_heads, head = key_head % parts_.kv_heads;
  const std::ptrdiff_t place = sequences.slots[sequence] * cache.slot_stride + head * cache.head_stride;
  const int first = part * kQueriesAtOnce, queries = std::min(kQueriesAtOnce, shared_ - first);
  const std::size_t at = static_cast<std::size_t>(key_head) * shared_ + first;
  tiles_.attend({memory.queries + at * parts_.width, queries, cache.keys + place, cache.values + place, parts_.width,
                 sequences.pasts[sequence] + 1, parts_.scaling, memory.scores + at * memory.scores_width,
                 memory.scores_width, memory.mixed + at * parts_.width});
}

void Attention::normalize(const Norm& norm, float* x, int rows, int width) const {
  for (int i = 0; norm.weight && i < rows; ++i)
    tiles_.normalize(x + i * width, norm.weight, norm.epsilon, width, x + i * width);
}

}  // namespace dynaexq
