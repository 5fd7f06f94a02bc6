// Attention of one step: each sequence adds one token to its keys and values and looks at all of them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "linear.hpp"
#include "tiles.hpp"

namespace dynaexq {

struct Norm {
  const float* weight = nullptr;  // null: no norm
  float epsilon = 0.0f;
};

struct Projection {
  const PackedLinear* matrix = nullptr;
  const float* bias = nullptr;
};

// Grouped-query attention with rotary positions over the whole head width, halves rotated against each other.
struct AttentionParts {
  Projection query, key, value, output;
  Norm query_norm, key_norm;
  bool norm_by_head;  // else over all heads of a token together
  int heads, kv_heads, width;
  float scaling;
};

// The sequences of a step, the same for all layers.
struct Sequences {
  const float *cosine, *sine;  // [positions, width]
  const std::int32_t *positions, *slots, *pasts;  // [count]: in the text, in the cache; tokens already there
  int count;
};

// Keys and values [slots, kv_heads, room, width] of one layer; a sequence's new ones go to place `past`.
struct CacheView {
  void *keys, *values;
  std::ptrdiff_t slot_stride, head_stride;  // in numbers; tokens are `width` apart
  KvFormat format = KvFormat::Float32;
  float *key_scales = nullptr, *value_scales = nullptr;  // [slots, kv_heads, room], of Int8
};

class Attention {
 public:
  // Throws std::invalid_argument for a geometry it cannot do.
  Attention(const AttentionParts& parts, const TileSet& tiles);

  // Floats of working memory that `forward` needs.
  std::size_t memory(const Sequences& sequences) const;

  // normed [count, hidden] -> out [count, hidden].
  void forward(const Sequences& sequences, const CacheView& cache, const float* normed, float* memory, float* out,
               int threads) const;

 private:
  struct Memory;
  std::size_t scores_width(const Sequences& sequences) const;
  void add_token(const Sequences& sequences, const CacheView& cache, const Memory& memory, int unit) const;
  void attend(const Sequences& sequences, const CacheView& cache, const Memory& memory, int unit) const;
  void normalize(const Norm& norm, float* x, int rows, int width) const;

  AttentionParts parts_;
  int shared_, parts_by_head_;  // query heads of a key head, and work units they make
  const TileSet& tiles_;
};

}  // namespace dynaexq
