#include "linear.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../team.hpp"

namespace dynaexq {
namespace {

constexpr int kTokensAtOnce = 8, kAlone = 4;
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
  if (!multiply_ || rows < 1 || columns < 1 || columns % std::max(format.group, 1))
    throw std::invalid_argument("no kernel for " + std::to_string(format.bits) + " bits in groups of " +
                                std::to_string(format.group) + " of a matrix [" + std::to_string(rows) + ", " +
                                std::to_string(columns) + "]");
  if ((rows + kTileRows - 1) / kTileRows * tile_ > nbytes) throw std::invalid_argument("packed weights are cut short");
}

void PackedLinear::forward(Number number, const void* x, int tokens, const float* bias, void* out, int threads) const {
  const int most = static_cast<int>(std::max<std::size_t>(kBlockTokens, kWaveBytes / layout_.stride()));
  const std::size_t width = columns_;
  for (int start = 0; start < tokens; start += most) {
    const int count = std::min(most, tokens - start);
    std::uint8_t* memory = Scratch::of_thread().take(count * (layout_.stride() + align(width * sizeof(float))));
    std::uint8_t* rows = memory + count * align(width * sizeof(float));
    auto round_rows = [&](int first, int last) {
      for (int token = first; token < last; ++token) {
        const std::size_t at = (static_cast<std::size_t>(start) + token) * width;
        auto* copy = reinterpret_cast<float*>(memory + token * align(width * sizeof(float)));
        const float* source = static_cast<const float*>(x) + at;
        if (number != Number::Float32) {
          load_numbers(number, x, at, width, copy);
          source = copy;
        }
        layout_.fill(tiles_, rows, token, source, 0, columns_);
      }
    };
    const int unit_rows = rows_per_unit(rows_, kTileRows, count, threads);
    auto compute = [&](int first) {
      alignas(kAlignment) float result[kBlockTokens * kChunkRows];
      Row block[kBlockTokens];
      const int padded = std::min(unit_rows, (rows_ - first + kTileRows - 1) / kTileRows * kTileRows);
      const int wanted = std::min(unit_rows, rows_ - first);
      for (int from = 0; from < count; from += kBlockTokens) {
        const int here = std::min(kBlockTokens, count - from);
        for (int i = 0; i < here; ++i) block[i] = layout_.at(rows, from + i);
        multiply_(weights_ + first / kTileRows * tile_, padded / kTileRows, columns_, block, here, result, padded);
        for (int i = 0; i < here; ++i) {
          float* row = result + i * padded;
          for (int j = 0; bias && j < wanted; ++j) row[j] += bias[first + j];
          store_numbers(number, row, wanted, out, (static_cast<std::size_t>(start) + from + i) * rows_ + first);
        }
      }
    };
    Phase rounding, computing;
    if (count <= kAlone) round_rows(0, count);
    rounding.reset(count <= kAlone ? 0 : (count + kTokensAtOnce - 1) / kTokensAtOnce, threads);
    computing.reset((rows_ + unit_rows - 1) / unit_rows, threads);
    auto work = [&] {
      rounding.work([&](int unit) { round_rows(unit * kTokensAtOnce, std::min((unit + 1) * kTokensAtOnce, count)); });
      computing.work([&](int unit) { compute(unit * unit_rows); });
    };
    run_team(threads, work);
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
