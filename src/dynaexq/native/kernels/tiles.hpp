// What the kernels of every instruction set offer, and how they see a row of activations.
#pragma once
#include <cstddef>
#include <cstdint>

namespace dynaexq {

constexpr int kTileRows = 8;     // output rows interleaved in one tile (docs/format.md)
constexpr int kBlockTokens = 64; // tokens that one call of a multiply takes at most

// How the activations that meet a weight format are held. Rounding to Int8 or Int16 is by group, with a scale each.
enum class Precision : std::uint8_t { Float, Int8, Int16 };

// One row of activations. `scale` has one value an activation group (Int8, Int16); `sum` the sum of the restored
// values of each of the weights' groups, for their offsets.
struct Row {
  const void* values;
  const float* scale;
  const float* sum;
};

// Number format of packed weights: bits 1, 2, 3, 4 (scale and offset), 8 (scale alone), 16 (bfloat16, group 0). A nested
// format has base_bits, of the version it refines, and `bits` more in tiles without scale and offset: 2 + 2 or 4 + 4.
struct WeightFormat {
  int bits;
  int group;
  int base_bits = 0;

  constexpr int whole_bits() const { return base_bits + bits; }
  constexpr WeightFormat base() const { return {base_bits, group}; }
};

// Activations that share a scale. Against 4-bit weights 32: with as many as the weights' group, rounding would cost a
// tenth of what such weights lose (`benchmarks/rounding`). Against 3-bit weights 64: 16-bit sums hold no more.
constexpr int activation_group(WeightFormat format) {
  const int most = format.whole_bits() == 4 ? 32 : format.whole_bits() == 3 ? 64 : format.group;
  return format.group < most ? format.group : most;
}

// Bytes of one 8-row tile of `columns` inputs; of a nested format, of what it adds to its base's.
constexpr std::size_t tile_bytes(WeightFormat format, int columns) {
  if (format.bits == 16) return static_cast<std::size_t>(columns) * 16;
  const std::size_t meta = format.base_bits ? 0 : format.bits == 8 ? 16 : 32;
  return static_cast<std::size_t>(columns / format.group) * (format.group * format.bits + meta);
}

// Where tiles begin: those of the version itself, or of the base and of the format nested in it.
struct Tiles {
  const std::uint8_t* base;
  const std::uint8_t* rest = nullptr;
};

// out[token * stride + row] = sum over columns of weight[row, column] * token's value, for `count` tiles from
// `tiles` and `tokens` rows (1..kBlockTokens). A token's result does not depend on the other tokens.
using Multiply = void (*)(Tiles tiles, int count, int columns, const Row* rows, int tokens, float* out,
                          std::ptrdiff_t stride);

// Gate functions between the projections of an expert.
enum class GateKind : std::uint8_t { SwiGlu, ClampedSwiGlu };

struct Gate {
  GateKind kind;
  float alpha;  // of the sigmoid: 1 for SwiGlu
  float limit;  // ClampedSwiGlu: (up + 1) * gate * sigmoid(alpha * gate), gate <= limit, -limit <= up <= limit
};

constexpr int kQueriesAtOnce = 4;

// How keys and values are kept. Int8: each one [width] with a float scale of its own.
enum class KvFormat : std::uint8_t { Float32, Float16, BFloat16, Int8 };

// Attention of `queries` (1..kQueriesAtOnce) queries [width] over the same keys and values [tokens, width], to `out`
// [queries, width]. `scores` is working memory, scores_stride apart for each query, and at least `tokens` rounded up to
// 8. Width is a multiple of 16. Values that are not finite make the output of their query NaN.
struct AttendCall {
  const float* query;
  int queries;
  const void *keys, *values;
  int width, tokens;
  float scaling;
  float* scores;
  std::size_t scores_stride;
  float* out;
  KvFormat format = KvFormat::Float32;
  const float *key_scales = nullptr, *value_scales = nullptr;  // [tokens] each, of Int8
};

// Kernels compiled for one instruction set.
struct TileSet {
  const char* name;
  // The multiply for a format and a precision of activations; null where there is none.
  Multiply (*multiply)(WeightFormat format, Precision precision);
  // Rounds `columns` floats for weights of a format. An activation group with a value that is not finite gets scale
  // and sum NaN; one whose largest magnitude is below 1e-30 becomes zeros.
  void (*quantize)(const float* x, int columns, WeightFormat format, Precision precision, void* values, float* scale,
                   float* sum);
  // Group sums of float activations.
  void (*sum_groups)(const float* x, int columns, int group, float* sum);
  // gate[i] = activation(gate[i], up[i]); count is a multiple of 8.
  void (*apply_gate)(const Gate& gate, float* gated, const float* up, int count);
  // out[i] += weight * x[i]; count is a multiple of 8.
  void (*accumulate)(float* out, const float* x, float weight, int count);
  void (*attend)(const AttendCall& call);
  // out[i] = x[i] / sqrt(mean of x squared + epsilon) * weight[i]; count is a multiple of 8.
  void (*normalize)(const float* x, const float* weight, float epsilon, int count, float* out);
};

// The instruction sets this binary holds and this processor has, best first; the last is always "scalar".
const TileSet* const* available_tiles();

}  // namespace dynaexq
