#include "linear.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../team.hpp"

namespace dynaexq {
namespace {

constexpr int kMostUses = 4;  // layers in one parallel region
constexpr int kNormFloats = 1 << 15;  // so few are done by the calling thread
constexpr std::size_t kWaveBytes = 8 << 20;  // of rounded rows

}  // namespace

PackedLinear::PackedLinear(const std::uint8_t* weights, std::size_t nbytes, WeightFormat format, int rows, int columns,
                           bool exact, const TileSet& tiles)
    : weights_(weights),
      rows_(rows),
      columns_(columns),
      tile_(tile_bytes(format, columns)),
      layout_(precision_for(format, exact), columns, format),
      multiply_(tiles.multiply(format, precision_for(format, exact))),
      tiles_(tiles) {
  if (!multiply_ || format.base_bits || rows < 1 || columns < 1 || columns % std::max(format.group, 1))
    throw std::invalid_argument("no kernel for " + std::to_string(format.bits) + " bits in groups of " +
                                std::to_string(format.group) + " of a matrix [" + std::to_string(rows) + ", " +
                                std::to_string(columns) + "]");
  if ((rows + kTileRows - 1) / kTileRows * tile_ > nbytes) throw std::invalid_argument("packed weights are cut short");
}

// Rows of a wave of tokens, rounded for one layer.
struct PackedLinear::Rounded {
  Number number;
  const void* x;
  int start, count;         // tokens of the wave
  std::uint8_t *copies, *rows;
};

void PackedLinear::forward(Number number, const void* x, int tokens, const float* bias, void* out, int threads) const {
  const Use use{this, bias, out};
  forward(&use, 1, number, x, tokens, threads);
}

void PackedLinear::forward(const Use* uses, int uses_count, Number number, const void* x, int tokens, int threads) {
  const PackedLinear& first = *uses[0].layer;
  bool alike = true;  // layers of one format share the rounded rows
  for (int i = 1; i < uses_count; ++i) alike &= uses[i].layer->layout_.same_as(first.layout_);
  if (!alike) {
    for (int i = 0; i < uses_count; ++i) forward(uses + i, 1, number, x, tokens, threads);
    return;
  }
  const RowLayout& layout = first.layout_;
  const std::size_t width = first.columns_, copy = align(width * sizeof(float));
  const int most = static_cast<int>(std::max<std::size_t>(kBlockTokens, kWaveBytes / layout.stride()));
  for (int start = 0; start < tokens; start += most) {
    const int count = std::min(most, tokens - start);
    std::uint8_t* memory = Scratch::of_thread().take(count * (layout.stride() + copy));
    const Rounded rounded{number, x, start, count, memory, memory + count * copy};
    auto round_rows = [&](int from, int to) {
      for (int token = from; token < to; ++token) {
        const std::size_t at = (static_cast<std::size_t>(start) + token) * width;
        const float* source = static_cast<const float*>(x) + at;
        if (number != Number::Float32) {
          auto* floats = reinterpret_cast<float*>(rounded.copies + token * copy);
          load_numbers(number, x, at, width, floats);
          source = floats;
        }
        layout.fill(first.tiles_, rounded.rows, token, source, 0, first.columns_);
      }
    };
    int units[kMostUses + 1] = {};
    for (int i = 0; i < uses_count; ++i) {
      const int rows = rows_per_unit(uses[i].layer->rows_, kTileRows, count, threads);
      units[i + 1] = units[i] + (uses[i].layer->rows_ + rows - 1) / rows;
    }
    auto compute_unit = [&](int unit) {
      int i = 0;
      while (unit >= units[i + 1]) ++i;
      const PackedLinear& layer = *uses[i].layer;
      const int rows = rows_per_unit(layer.rows_, kTileRows, count, threads);
      layer.compute(rounded, uses[i], (unit - units[i]) * rows, rows);
    };
    Phase rounding, computing;
    if (count <= kAlone) round_rows(0, count);
    rounding.reset(count <= kAlone ? 0 : (count + kTokensAtOnce - 1) / kTokensAtOnce, threads);
    computing.reset(units[uses_count], threads);
    auto work = [&] {
      rounding.work([&](int unit) { round_rows(unit * kTokensAtOnce, std::min((unit + 1) * kTokensAtOnce, count)); });
      computing.work(compute_unit);
    };
    run_team(threads, work);
  }
}

void PackedLinear::compute(const Rounded& rounded, const Use& use, int first, int unit_rows) const {
  alignas(kAlignment) float result[kBlockTokens * kChunkRows];
  Row block[kBlockTokens];
  const int padded = std::min(unit_rows, (rows_ - first + kTileRows - 1) / kTileRows * kTileRows);
  const int wanted = std::min(unit_rows, rows_ - first);
  for (int from = 0; from < rounded.count; from += kBlockTokens) {
    const int here = std::min(kBlockTokens, rounded.count - from);
    for (int i = 0; i < here; ++i) block[i] = layout_.at(rounded.rows, from + i);
    multiply_({weights_ + first / kTileRows * tile_}, padded / kTileRows, columns_, block, here, result, padded);
    for (int i = 0; i < here; ++i) {
      float* row = result + i * padded;
      for (int j = 0; use.bias && j < wanted; ++j) row[j] += use.bias[first + j];
      const std::size_t token = static_cast<std::size_t>(rounded.start) + from + i;
      store_numbers(rounded.number, row, wanted, use.out, token * rows_ + first);
    }
  }
}

void normalize_rows(const float* x, const float* weight, float epsilon, int rows, int width, float* out, int threads,
                    const TileSet& tiles) {
  const int together = std::max(1, kNormFloats / width);  // rows of one work unit
  const int units = (rows + together - 1) / together;
  auto normalize = [&](int unit) {
    for (int row = unit * together; row < std::min((unit + 1) * together, rows); ++row) {
      const std::size_t at = static_cast<std::size_t>(row) * width;
      tiles.normalize(x + at, weight, epsilon, width, out + at);
    }
  };
  Phase phase;
  phase.reset(units, threads);
  auto work = [&] { phase.work(normalize); };
  run_team(units > 1 ? threads : 1, work);
}

}  // namespace dynaexq
