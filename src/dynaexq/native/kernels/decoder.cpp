#include "decoder.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "rows.hpp"

namespace dynaexq {
namespace {

void add_rows(const float* a, const float* b, std::size_t count, float* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

}  // namespace

DecoderLayer::DecoderLayer(int hidden, Norm before_attention, const AttentionParts& attention, Norm before_experts,
                           RouterParts router, const ExpertLayers& experts, const LayerGate& gate,
                           const TileSet& tiles)
    : hidden_(hidden),
      before_attention_(before_attention),
      before_experts_(before_experts),
      attention_(attention, tiles),
      router_(router),
      experts_(experts),
      gate_(gate),
      tiles_(tiles) {
  if (hidden % 8 || router.top_k < 1 || router.top_k > router.experts)
    throw std::invalid_argument("a decoder layer of unsupported geometry");
}

void DecoderLayer::step(const Sequences& sequences, const LayerStep& step, const float* hidden, float* out,
                        int threads) const {
  static thread_local Scratch scratch;  // its own: linear layers and experts use the thread's
  const int count = sequences.count;
  const std::size_t size = static_cast<std::size_t>(count) * hidden_, rows = align_floats(size);
  const std::size_t logits_size = align_floats(static_cast<std::size_t>(count) * router_.experts);
  const std::size_t floats = 3 * rows + logits_size + attention_.memory(sequences);
  auto* normed = reinterpret_cast<float*>(scratch.take(floats * sizeof(float)));
  float *middle = normed + rows, *part = middle + rows, *logits = part + rows, *rest = logits + logits_size;
  const auto normalize = [&](const Norm& norm, const float* x) {
    normalize_rows(x, norm.weight, norm.epsilon, count, hidden_, normed, threads, tiles_);
  };
  normalize(before_attention_, hidden);
  attention_.forward(sequences, step.cache, normed, rest, part, threads);
  add_rows(hidden, part, size, middle);
  normalize(before_experts_, middle);
  router_.matrix.matrix->forward(Number::Float32, normed, count, router_.matrix.bias, logits, threads);
  route(logits, count, step.ids, step.weights);
  if (step.router_rows) std::copy(normed, normed + size, step.router_rows);
  if (step.routed) step.routed();
  experts_.forward({Number::Float32, normed, step.ids, step.weights, count, router_.top_k, step.words, &gate_, part,
                    step.arrive ? &step.arrive : nullptr},
                   threads);
  add_rows(middle, part, size, out);
}

void DecoderLayer::route(const float* logits, int sequences, std::int64_t* ids, float* weights) const {
  const int experts = router_.experts, top_k = router_.top_k;
  for (int token = 0; token < sequences; ++token, logits += experts, ids += top_k, weights += top_k) {
    const float largest = *std::max_element(logits, logits + experts);
    float total = 0.0f;
    for (int i = 0; i < experts; ++i) total += std::exp(logits[i] - largest);
    int found = 0;
    for (int i = 0; i < experts; ++i) {  // insertion into a short sorted list; earlier experts win ties
      if (found == top_k && !(logits[i] > logits[ids[found - 1]])) continue;
      int place = found < top_k ? found++ : found - 1;
      for (; place > 0 && logits[i] > logits[ids[place - 1]]; --place) ids[place] = ids[place - 1];
      ids[place] = i;
    }
    float chosen = 0.0f;
    for (int i = 0; i < top_k; ++i) chosen += weights[i] = std::exp(logits[ids[i]] - largest) / total;
    for (int i = 0; router_.renormalize && i < top_k; ++i) weights[i] /= chosen;
  }
}

}  // namespace dynaexq
