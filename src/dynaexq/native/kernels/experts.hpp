// One MoE layer's experts in one call: sort tokens by expert, gate and up, activation, down, weighted sum.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "rows.hpp"
#include "tiles.hpp"

namespace dynaexq {

// A format of the handle words' table, and where its sections begin in a version (formats/layout.py); of a nested
// format, also where those of its base begin. Down may have other bits than gate and up.
struct VersionFormat {
  WeightFormat weights;
  std::array<std::size_t, 3> sections;  // gate, up, down
  std::array<std::size_t, 3> base_sections = {};
  int down_bits = 0;  // 0: as many as gate and up

  WeightFormat down() const { return down_bits ? WeightFormat{down_bits, weights.group} : weights; }
};

struct LayerGate {
  Gate function;
  bool interleaved;           // gate_up_bias alternates gate and up
  const float* gate_up_bias;  // [experts, 2 * intermediate] or null
  const float* down_bias;     // [experts, hidden] or null
};

struct LayerCall {
  Number number;             // of hidden and out
  const void* hidden;        // [tokens, hidden]
  const std::int64_t* ids;   // [tokens, top_k]
  const float* weights;      // [tokens, top_k]
  int tokens, top_k;
  const std::uint64_t* words;  // [experts], handles of a pinned window
  const LayerGate* gate;
  void* out;                 // [tokens, hidden]
  // Where set, words may be of no format until this was called: experts that are there go as far as they can before.
  const std::function<void()>* arrive = nullptr;
};

// Experts of one geometry in an arena. Calls of several threads may overlap.
class ExpertLayers {
 public:
  // `exact`: activations stay float; else they are rounded to what the format needs (see precision_for).
  // Throws std::invalid_argument for a format or geometry there is no kernel for.
  ExpertLayers(const std::uint8_t* arena, std::size_t arena_bytes, int experts, int hidden, int intermediate,
               std::vector<VersionFormat> formats, bool exact, const TileSet& tiles);

  // Throws std::out_of_range for an expert id or handle that points nowhere, before `out` is written.
  void forward(const LayerCall& call, int threads) const;

 private:
  struct Part {  // of a version: bytes of a tile, and of all of it
    std::size_t gate_tile, down_tile, last_byte;
  };
  struct Kernel {
    RowLayout hidden_rows, inner_rows;
    Multiply multiply, multiply_down;
    Part own, base;  // a version that stands alone has no base
  };
  Part measure(WeightFormat format, WeightFormat down, std::size_t down_section) const;
  struct Run;

  const std::uint8_t* arena_;
  std::size_t arena_bytes_;
  int experts_, hidden_, intermediate_;
  std::vector<VersionFormat> formats_;
  std::vector<Kernel> kernels_;
  std::size_t inner_stride_ = 0;
  int unit_ = kTileRows;  // the largest group: rows of gate and up come in multiples of it
  const TileSet& tiles_;
};

}  // namespace dynaexq
