// A decode step of a whole model: embedding, decoder layers, norm, output head.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "decoder.hpp"

namespace dynaexq {

// An embedding [rows, width]: bfloat16, or int8 codes with a float16 scale for each group.
struct EmbeddingRows {
  const void* values = nullptr;
  const std::uint16_t* scale = nullptr;
  int group = 0;  // 0: bfloat16
  int rows = 0;
};

class DecoderModel {
 public:
  // Everything that is pointed to must outlive the model.
  DecoderModel(int hidden, const EmbeddingRows& embedding, std::vector<const DecoderLayer*> layers, Norm last,
               const Projection& head, const TileSet& tiles);

  // tokens [sequences] -> logits [sequences, vocabulary]; `steps` has one element a layer. Throws std::out_of_range for
  // a token that is not there, and what DecoderLayer::step throws.
  void step(const Sequences& sequences, const std::int64_t* tokens, const std::vector<LayerStep>& steps, float* logits,
            int threads) const;
  int hidden() const { return hidden_; }
  int top_k() const { return layers_.empty() ? 0 : layers_[0]->top_k(); }

 private:
  void embed(std::int64_t token, float* out) const;

  int hidden_;
  EmbeddingRows embedding_;
  std::vector<const DecoderLayer*> layers_;
  Norm last_;
  Projection head_;
  const TileSet& tiles_;
};

}  // namespace dynaexq
