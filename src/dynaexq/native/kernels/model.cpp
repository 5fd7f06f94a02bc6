#include "model.hpp"

#include <stdexcept>
#include <string>

#include "rows.hpp"

namespace dynaexq {

DecoderModel::DecoderModel(int hidden, const EmbeddingRows& embedding, std::vector<const DecoderLayer*> layers,
                           Norm last, const Projection& head, const TileSet& tiles)
    : hidden_(hidden), embedding_(embedding), layers_(std::move(layers)), last_(last), head_(head), tiles_(tiles) {}

void DecoderModel::step(const Sequences& sequences, const std::int64_t* tokens, const std::vector<LayerStep>& steps,
                        float* logits, int threads) const {
  if (steps.size() != layers_.size()) throw std::invalid_argument("not one step for each layer");
  static thread_local Scratch scratch;  // its own: layers use the thread's and one of theirs
  const std::size_t size = static_cast<std::size_t>(sequences.count) * hidden_;
  auto* hidden = reinterpret_cast<float*>(scratch.take(size * sizeof(float)));
  for (int i = 0; i < sequences.count; ++i) embed(tokens[i], hidden + static_cast<std::size_t>(i) * hidden_);
  for (std::size_t i = 0; i < layers_.size(); ++i) layers_[i]->step(sequences, steps[i], hidden, hidden, threads);
  normalize_rows(hidden, last_.weight, last_.epsilon, sequences.count, hidden_, hidden, threads, tiles_);
  head_.matrix->forward(Number::Float32, hidden, sequences.count, head_.bias, logits, threads);
}

void DecoderModel::embed(std::int64_t token, float* out) const {
  if (token < 0 || token >= embedding_.rows) throw std::out_of_range("token " + std::to_string(token) + " is not there");
  const std::size_t first = static_cast<std::size_t>(token) * hidden_;
  if (embedding_.group == 0) return load_numbers(Number::BFloat16, embedding_.values, first, hidden_, out);
  const auto* codes = static_cast<const std::int8_t*>(embedding_.values) + first;
  const std::uint16_t* scale = embedding_.scale + first / embedding_.group;
  for (int i = 0; i < hidden_; ++i) out[i] = static_cast<float>(codes[i]) * float_of_half(scale[i / embedding_.group]);
}

}  // namespace dynaexq
