// A layer of experts in several formats with an arena of its own, and what it should give in float64.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "experts.hpp"
#include "packing.hpp"

namespace dynaexq::test {

constexpr std::size_t kBlock = 4096;

// Expert e has format e % formats. The arena ends with the last byte of its last version.
struct Layer {
  int hidden, intermediate;
  std::vector<VersionFormat> formats;
  std::vector<std::uint64_t> words;
  std::vector<std::array<Packed, 3>> experts;
  std::vector<std::uint8_t> bytes;

  // `down_bits` of each format, where down has others than gate and up.
  Layer(int hidden_size, int intermediate_size, const std::vector<WeightFormat>& which, int count, Random& random,
        const std::vector<int>& down_bits = {})
      : hidden(hidden_size), intermediate(intermediate_size) {
    for (std::size_t i = 0; i < which.size(); ++i) {
      const std::size_t up = align(tile_bytes(which[i], hidden) * (intermediate / 8));
      formats.push_back({which[i], {0, up, 2 * up}, {}, down_bits.empty() ? 0 : down_bits[i]});
    }
    for (int e = 0; e < count; ++e) {
      const std::uint64_t format = e % which.size();
      words.push_back(format << 56 | bytes.size() / kBlock << 28 | 0xfffffff);
      const std::size_t start = bytes.size();
      experts.push_back({pack(which[format], intermediate, hidden, random),
                         pack(which[format], intermediate, hidden, random),
                         pack(formats[format].down(), hidden, intermediate, random)});
      for (int part = 0; part < 3; ++part) {
        bytes.resize(start + formats[format].sections[part], kSentinel);
        const std::vector<std::uint8_t>& matrix = experts.back()[part].bytes;
        bytes.insert(bytes.end(), matrix.begin(), matrix.end());
      }
      if (e + 1 < count) bytes.resize((bytes.size() + kBlock - 1) / kBlock * kBlock, kSentinel);
    }
  }

  ExpertLayers bind(const Guarded& arena, bool exact, const TileSet& set) const {
    return {arena.data(), bytes.size(), static_cast<int>(experts.size()), hidden, intermediate, formats, exact, set};
  }
};

struct Input {
  int tokens, top_k;
  std::vector<float> hidden, weights;
  std::vector<std::int64_t> ids;

  // Every token takes `k` experts of `experts`, some of them twice.
  Input(const Layer& layer, int n, int k, Random& random)
      : tokens(n),
        top_k(k),
        hidden(random.normals(static_cast<std::size_t>(n) * layer.hidden)),
        weights(random.normals(n * k)) {
    for (int pair = 0; pair < n * k; ++pair) {
      const bool again = pair % k && random.below(6) == 0;
      ids.push_back(again ? ids.back() : random.below(static_cast<int>(layer.experts.size())));
    }
  }

  // Of the first tokens, the first experts.
  Input first(int n, int k) const {
    Input result(*this);
    const std::size_t width = tokens ? hidden.size() / tokens : 0;
    result.tokens = n;
    result.top_k = k;
    result.hidden.resize(n * width);
    result.ids.clear();
    result.weights.clear();
    for (int token = 0; token < n; ++token)
      for (int place = 0; place < k; ++place) {
        result.ids.push_back(ids[token * top_k + place]);
        result.weights.push_back(weights[token * top_k + place]);
      }
    return result;
  }
};

// One forward from guarded memory into guarded memory: T is float or, for bfloat16, uint16_t.
template <class T>
std::vector<T> forward(const ExpertLayers& layers, const Layer& layer, const std::vector<T>& hidden, const Input& input,
                       const LayerGate& gate, int threads) {
  const Guarded from(hidden), ids(input.ids), weights(input.weights), words(layer.words);
  const Guarded out(hidden.size() * sizeof(T));
  const LayerCall call{sizeof(T) == 2 ? Number::BFloat16 : Number::Float32,
                       from.data(),
                       ids.as<std::int64_t>(),
                       weights.as<float>(),
                       input.tokens,
                       input.top_k,
                       words.as<std::uint64_t>(),
                       &gate,
                       out.data()};
  layers.forward(call, threads);
  if (!out.nothing_before()) return {};
  return std::vector<T>(out.as<T>(), out.as<T>() + hidden.size());
}

inline std::vector<float> forward(const ExpertLayers& layers, const Layer& layer, const Input& input,
                                  const LayerGate& gate, int threads) {
  return forward<float>(layers, layer, input.hidden, input, gate, threads);
}

// Rounds values to what activations in front of a format are rounded to, as docs and tiles.hpp have it.
inline void round_values(std::vector<double>& x, WeightFormat format) {
  const double steps = format.whole_bits() == 8 ? 32767 : 127;
  const int group = activation_group(format);
  for (std::size_t first = 0; format.bits < 16 && first < x.size(); first += group) {
    double largest = 0;
    for (int k = 0; k < group; ++k) largest = std::max(largest, std::fabs(x[first + k]));
    if (largest < 1e-30) largest = HUGE_VAL;
    for (int k = 0; k < group; ++k)
      x[first + k] = std::isinf(largest) ? 0 : std::nearbyint(x[first + k] / (largest / steps)) * (largest / steps);
  }
}

inline std::vector<double> times(const Packed& matrix, const std::vector<double>& x) {
  std::vector<double> result(matrix.rows);
  for (int row = 0; row < matrix.rows; ++row) {
    const double* weights = matrix.values.data() + static_cast<std::size_t>(row) * matrix.columns;
    double sum = 0;
    for (int k = 0; k < matrix.columns; ++k) sum += weights[k] * x[k];
    result[row] = sum;
  }
  return result;
}

// One expert's output for one token.
inline std::vector<double> wanted_of_expert(const Layer& layer, int expert, const float* token, const LayerGate& gate,
                                            bool rounded) {
  const auto& [gate_matrix, up_matrix, down_matrix] = layer.experts[expert];
  std::vector<double> x(token, token + layer.hidden);
  if (rounded) round_values(x, gate_matrix.format);
  std::vector<double> a = times(gate_matrix, x), b = times(up_matrix, x);
  const int width = layer.intermediate;
  const double limit = static_cast<double>(gate.function.limit);
  for (int i = 0; i < width; ++i) {
    if (const float* bias = gate.gate_up_bias) {
      bias += expert * 2 * width;
      a[i] += static_cast<double>(gate.interleaved ? bias[2 * i] : bias[i]);
      b[i] += static_cast<double>(gate.interleaved ? bias[2 * i + 1] : bias[width + i]);
    }
    if (gate.function.kind == GateKind::ClampedSwiGlu) {
      a[i] = std::min(a[i], limit);
      b[i] = std::clamp(b[i], -limit, limit) + 1;
    }
    a[i] = a[i] / (1 + std::exp(-static_cast<double>(gate.function.alpha) * a[i])) * b[i];
  }
  if (rounded) round_values(a, down_matrix.format);
  std::vector<double> y = times(down_matrix, a);
  for (int i = 0; gate.down_bias && i < layer.hidden; ++i)
    y[i] += static_cast<double>(gate.down_bias[expert * layer.hidden + i]);
  return y;
}

inline std::vector<double> wanted_of_token(const Layer& layer, const Input& input, int token, const LayerGate& gate,
                                           bool rounded) {
  std::vector<double> result(layer.hidden);
  for (int pair = token * input.top_k; pair < (token + 1) * input.top_k; ++pair) {
    const float* x = input.hidden.data() + static_cast<std::size_t>(token) * layer.hidden;
    const std::vector<double> y = wanted_of_expert(layer, static_cast<int>(input.ids[pair]), x, gate, rounded);
    for (int i = 0; i < layer.hidden; ++i) result[i] += static_cast<double>(input.weights[pair]) * y[i];
  }
  return result;
}

}  // namespace dynaexq::test
