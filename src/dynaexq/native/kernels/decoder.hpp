// One step of decoder layers for sequences that each add one token: norm, attention, norm, router, experts.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

#include "attention.hpp"
#include "experts.hpp"
#include "tiles.hpp"

namespace dynaexq {

struct RouterParts {
  Projection matrix;
  int experts, top_k;
  bool renormalize;  // the chosen probabilities sum to one
};

// What one layer needs in a step, and its router's choices.
struct LayerStep {
  CacheView cache;
  const std::uint64_t* words;  // handles of a pinned window
  std::int64_t* ids;           // [sequences, top_k], written
  float* weights;              // [sequences, top_k], written
  std::function<void()> routed;  // called when these are, before words are read; may be empty
  std::function<void()> arrive;  // makes words that are of no format yet point to experts; may be empty
  float* router_rows = nullptr;  // [sequences, hidden], where what the router is given is written before; or null
};

class DecoderLayer {
 public:
  // Everything that is pointed to must outlive the layer. Throws std::invalid_argument for an unsupported geometry.
  DecoderLayer(int hidden, Norm before_attention, const AttentionParts& attention, Norm before_experts,
               RouterParts router, const ExpertLayers& experts, const LayerGate& gate, const TileSet& tiles);

  int top_k() const { return router_.top_k; }

  // hidden [sequences, hidden] -> out, which may be the same. Throws what ExpertLayers::forward throws.
  void step(const Sequences& sequences, const LayerStep& step, const float* hidden, float* out, int threads) const;

 private:
  void route(const float* logits, int sequences, std::int64_t* ids, float* weights) const;

  int hidden_;
  Norm before_attention_, before_experts_;
  Attention attention_;
  RouterParts router_;
  const ExpertLayers& experts_;
  const LayerGate& gate_;
  const TileSet& tiles_;
};

}  // namespace dynaexq
