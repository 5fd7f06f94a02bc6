// A dense linear layer over packed weights: out = x W^T + bias.
#pragma once
#include <cstddef>
#include <cstdint>

#include "rows.hpp"
#include "tiles.hpp"

namespace dynaexq {

class PackedLinear {
 public:
  // `weights`: tiles of a matrix [rows, columns], rows padded to whole tiles; the caller keeps it alive.
  // Throws std::invalid_argument for a format or shape there is no kernel for, or fewer bytes than it takes.
  PackedLinear(const std::uint8_t* weights, std::size_t nbytes, WeightFormat format, int rows, int columns, bool exact,
               const TileSet& tiles);

  // x [tokens, columns] -> out [tokens, rows]; bias [rows] or null.
  void forward(Number number, const void* x, int tokens, const float* bias, void* out, int threads) const;

  // Several layers on the same x, in one parallel region.
  struct Use {
    const PackedLinear* layer;
    const float* bias;
    void* out;
  };
  static void forward(const Use* uses, int count, Number number, const void* x, int tokens, int threads);

 private:
  struct Rounded;
  void compute(const Rounded& rows, const Use& use, int first, int unit_rows) const;

  const std::uint8_t* weights_;
  int rows_, columns_;
  std::size_t tile_;
  RowLayout layout_;
  Multiply multiply_;
  const TileSet& tiles_;
};

// RMSNorm of rows [rows, width] into `out`; width is a multiple of 8.
void normalize_rows(const float* x, const float* weight, float epsilon, int rows, int width, float* out, int threads,
                    const TileSet& tiles);

}  // namespace dynaexq
