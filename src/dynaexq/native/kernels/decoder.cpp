#include "decoder.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "../team.hpp"

namespace dynaexq {
namespace {

// Cuts one block of scratch memory into aligned arrays of floats.
class Cutter {
 public:
  std::size_t add(std::size_t floats) {
    const std::size_t at = size_;
    size_ += align(floats * sizeof(float)) / sizeof(float);
    return at;
  }
  float* take() {
    static thread_local Scratch scratch;  // its own: the linear layers use the thread's
    return reinterpret_cast<float*>(scratch.take(size_ * sizeof(float)));
  }

 private:
  std::size_t size_ = 0;
};

// x * cos + rotate_half(x) * sin, in place.
void rotate(float* x, const float* cosine, const float* sine, int width) {
  const int half = width / 2;
  for (int i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cosine[i] - second * sine[i];
    x[i + half] = second * cosine[i + half] + first * sine[i + half];
  }
}

void add_rows(const float* a, const float* b, std::size_t count, float* out) {
  for (std::size_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

}  // namespace

DecoderLayer::DecoderLayer(int hidden, Norm before_attention, AttentionParts attention, Norm before_experts,
                           RouterParts router, const ExpertLayers& experts, const LayerGate& gate,
                           const TileSet& tiles)
    : hidden_(hidden),
      before_attention_(before_attention),
      before_experts_(before_experts),
      attention_(attention),
      router_(router),
      experts_(experts),
      gate_(gate),
      tiles_(tiles) {
  if (attention.width % 16 || attention.heads % attention.kv_heads || hidden % 8 || router.top_k > router.experts)
    throw std::invalid_argument("a decoder layer of unsupported geometry");
}

void DecoderLayer::step(const StepCall& call, int threads) const {
  const std::size_t rows = call.sequences;
  const int heads = attention_.heads * attention_.width, kv_heads = attention_.kv_heads * attention_.width;
  const std::size_t scores_width = align((call.cache.past + 1) * sizeof(float)) / sizeof(float);
  Cutter cutter;
  const std::size_t normed_at = cutter.add(rows * hidden_), middle_at = cutter.add(rows * hidden_);
  const std::size_t queries_at = cutter.add(rows * heads), keys_at = cutter.add(rows * kv_heads);
  const std::size_t values_at = cutter.add(rows * kv_heads), mixed_at = cutter.add(rows * heads);
  const std::size_t scores_at = cutter.add(rows * attention_.heads * scores_width);
  const std::size_t logits_at = cutter.add(rows * router_.experts);
  float* memory = cutter.take();
  float *normed = memory + normed_at, *middle = memory + middle_at, *logits = memory + logits_at;

  const auto normalize = [&](const Norm& norm, const float* x, int count, int width, float* out) {
    normalize_rows(x, norm.weight, norm.epsilon, count, width, out, threads, tiles_);
  };
  const auto project = [&](const Projection& by, const float* x, float* out) {
    by.matrix->forward(Number::Float32, x, call.sequences, by.bias, out, threads);
  };
  normalize(before_attention_, call.hidden, call.sequences, hidden_, normed);
  const PackedLinear::Use projections[] = {{attention_.query.matrix, attention_.query.bias, memory + queries_at},
                                           {attention_.key.matrix, attention_.key.bias, memory + keys_at},
                                           {attention_.value.matrix, attention_.value.bias, memory + values_at}};
  PackedLinear::forward(projections, 3, Number::Float32, normed, call.sequences, threads);
  attend(call, memory + queries_at, memory + keys_at, memory + values_at, memory + scores_at, memory + mixed_at,
         threads);
  project(attention_.output, memory + mixed_at, normed);
  add_rows(call.hidden, normed, rows * hidden_, middle);
  normalize(before_experts_, middle, call.sequences, hidden_, normed);
  project(router_.matrix, normed, logits);
  route(call, logits);
  experts_.forward({Number::Float32, normed, call.ids, call.weights, call.sequences, router_.top_k, call.words, &gate_,
                    call.out},
                   threads);
  add_rows(middle, call.out, rows * hidden_, call.out);
}

// One work unit is one key-value head of one sequence, with the query heads that share it.
void DecoderLayer::attend(const StepCall& call, float* queries, float* keys, const float* values, float* scores,
                          float* mixed, int threads) const {
  const int width = attention_.width, shared = attention_.heads / attention_.kv_heads;
  const std::size_t scores_width = align((call.cache.past + 1) * sizeof(float)) / sizeof(float);
  const auto normalize = [&](const Norm& norm, float* x, int count, int size) {
    for (int i = 0; norm.weight && i < count; ++i)
      tiles_.normalize(x + i * size, norm.weight, norm.epsilon, size, x + i * size);
  };
  if (!attention_.norm_by_head) {
    normalize(attention_.query_norm, queries, call.sequences, attention_.heads * width);
    normalize(attention_.key_norm, keys, call.sequences, attention_.kv_heads * width);
  }
  auto work_unit = [&](int unit) {
    const int sequence = unit / attention_.kv_heads, head = unit % attention_.kv_heads;
    const float* cosine = call.cosine + sequence * call.position_stride;
    const float* sine = call.sine + sequence * call.position_stride;
    float* key = keys + static_cast<std::size_t>(unit) * width;
    float* query = queries + static_cast<std::size_t>(unit) * shared * width;
    if (attention_.norm_by_head) {
      normalize(attention_.key_norm, key, 1, width);
      normalize(attention_.query_norm, query, shared, width);
    }
    rotate(key, cosine, sine, width);
    for (int i = 0; i < shared; ++i) rotate(query + i * width, cosine, sine, width);
    const std::ptrdiff_t place = sequence * call.cache.sequence_stride + head * call.cache.head_stride;
    const std::ptrdiff_t last = place + static_cast<std::ptrdiff_t>(call.cache.past) * width;
    std::memcpy(call.cache.keys + last, key, width * sizeof(float));
    std::memcpy(call.cache.values + last, values + static_cast<std::size_t>(unit) * width, width * sizeof(float));
    for (int i = 0; i < shared; ++i) {
      const std::size_t at = static_cast<std::size_t>(unit) * shared + i;
      tiles_.attend(query + i * width, call.cache.keys + place, call.cache.values + place, width, call.cache.past + 1,
                    attention_.scaling, scores + at * scores_width, mixed + at * width);
    }
  };
  Phase phase;
  phase.reset(call.sequences * attention_.kv_heads, threads);
  auto work = [&] { phase.work(work_unit); };
  run_team(threads, work);
}

void DecoderLayer::route(const StepCall& call, const float* logits) const {
  const int experts = router_.experts, top_k = router_.top_k;
  for (int token = 0; token < call.sequences; ++token) {
    const float* row = logits + static_cast<std::size_t>(token) * experts;
    std::int64_t* ids = call.ids + static_cast<std::size_t>(token) * top_k;
    float* weights = call.weights + static_cast<std::size_t>(token) * top_k;
    const float largest = *std::max_element(row, row + experts);
    float total = 0.0f;
    for (int i = 0; i < experts; ++i) total += std::exp(row[i] - largest);
    int found = 0;
    for (int i = 0; i < experts; ++i) {  // insertion into a short sorted list; earlier experts win ties
      if (found == top_k && !(row[i] > row[ids[found - 1]])) continue;
      int place = found < top_k ? found++ : found - 1;
      for (; place > 0 && row[i] > row[ids[place - 1]]; --place) ids[place] = ids[place - 1];
      ids[place] = i;
    }
    float chosen = 0.0f;
    for (int i = 0; i < top_k; ++i) chosen += weights[i] = std::exp(row[ids[i]] - largest) / total;
    for (int i = 0; router_.renormalize && i < top_k; ++i) weights[i] /= chosen;
  }
}

}  // namespace dynaexq
