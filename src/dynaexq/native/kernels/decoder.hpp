// One step of a decoder layer for sequences that each add one token: norm, attention, norm, router, experts, in one call.
#pragma once
#include <cstddef>
#include <cstdint>

#include "experts.hpp"
#include "linear.hpp"
#include "rows.hpp"
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

struct RouterParts {
  Projection matrix;
  int experts, top_k;
  bool renormalize;  // the chosen probabilities sum to one
};

// Keys and values [sequences, kv_heads, room, width]; this step's go to place `past`, attention sees 0..past.
struct CacheView {
  float *keys, *values;
  std::ptrdiff_t sequence_stride, head_stride;  // in floats; tokens are `width` apart
  int past;
};

struct StepCall {
  const float* hidden;       // [sequences, hidden]
  const float *cosine, *sine;  // [width], or [sequences, width] where position_stride is the width
  std::ptrdiff_t position_stride;
  CacheView cache;
  const std::uint64_t* words;  // handles of a pinned window
  std::int64_t* ids;           // [sequences, top_k], written
  float* weights;              // [sequences, top_k], written
  float* out;                  // [sequences, hidden]
  int sequences;
};

class DecoderLayer {
 public:
  // Everything that is pointed to must outlive the layer.
  DecoderLayer(int hidden, Norm before_attention, AttentionParts attention, Norm before_experts, RouterParts router,
               const ExpertLayers& experts, const LayerGate& gate, const TileSet& tiles);

  // Throws what ExpertLayers::forward throws.
  void step(const StepCall& call, int threads) const;

 private:
  void attend(const StepCall& call, float* queries, float* keys, const float* values, float* scores, float* mixed,
              int threads) const;
  void route(const StepCall& call, const float* logits) const;

  int hidden_;
  Norm before_attention_, before_experts_;
  AttentionParts attention_;
  RouterParts router_;
  const ExpertLayers& experts_;
  const LayerGate& gate_;
  const TileSet& tiles_;
};

}  // namespace dynaexq
