// The kernels of one set by themselves: multiply, rounding, gate, weighted sum.
#include <algorithm>
#include <string>

#include "check.hpp"
#include "packing.hpp"
#include "rows.hpp"

namespace dynaexq::test {
namespace {

constexpr int kTiles = 3, kRows = kTiles * kTileRows;

// One multiply: a matrix, activations and what each token should give.
struct Case {
  WeightFormat format;
  Precision precision;
  int columns;
  Packed packed;
  std::vector<float> x;  // [kBlockTokens, columns]
  std::string name;

  Case(const TileSet& set, WeightFormat f, bool exact, Codes codes)
      : format(f), precision(precision_for(f, exact)), columns(f.bits == 16 ? 75 : 3 * f.group) {
    Random random(1000 * f.whole_bits() + f.group);
    packed = pack(format, kRows, columns, random, codes);
    x = random.normals(static_cast<std::size_t>(kBlockTokens) * columns);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const int token = static_cast<int>(i) / columns;
      if (codes == Codes::Largest)
        x[i] = token % 2 ? -1.0f : 1.0f;  // every product at its limit, all of one sign
      else
        x[i] *= static_cast<float>(std::pow(10.0, token % 7 - 3));
    }
    name = std::string(set.name) + ", " + describe(f) + (exact ? ", exact" : "") +
           (codes == Codes::Largest ? ", largest codes" : "");
  }

  // What the kernel sees of an activation.
  double restored(const Row& row, int token, int column) const {
    if (precision == Precision::Float) return x[static_cast<std::size_t>(token) * columns + column];
    const int value = precision == Precision::Int8 ? static_cast<const std::int8_t*>(row.values)[column]
                                                   : static_cast<const std::int16_t*>(row.values)[column];
    return value * static_cast<double>(row.scale[column / activation_group(format)]);
  }
};

void check_accuracy(const Case& test, const Row* rows, const float* out) {
  const double bound = test.precision == Precision::Int8 ? 2e-2 : test.precision == Precision::Int16 ? 1e-3 : 1e-5;
  double squares = 0;
  for (int t = 0; t < kBlockTokens; ++t) {
    double rounded[kRows] = {}, original[kRows] = {};
    for (int r = 0; r < kRows; ++r)
      for (int k = 0; k < test.columns; ++k) {
        const double weight = test.packed.values[static_cast<std::size_t>(r) * test.columns + k];
        rounded[r] += weight * test.restored(rows[t], t, k);
        original[r] += weight * static_cast<double>(test.x[static_cast<std::size_t>(t) * test.columns + k]);
      }
    const float* got = out + t * kRows;
    CHECK(distance(got, rounded, kRows) < 1e-5, "%s, token %d: %g from what it saw", test.name.c_str(), t,
          distance(got, rounded, kRows));
    const double error = distance(got, original, kRows);
    CHECK(error < 2 * bound, "%s, token %d: %g from the truth", test.name.c_str(), t, error);
    squares += error * error;
  }
  const double error = std::sqrt(squares / kBlockTokens);
  CHECK(error < bound, "%s: %g from the truth", test.name.c_str(), error);
}

void check_multiply(const TileSet& set, WeightFormat format, bool exact, Codes codes) {
  const Case test(set, format, exact, codes);
  const Multiply multiply = set.multiply(format, test.precision);
  if (!CHECK(multiply, "%s", test.name.c_str())) return;
  const RowLayout layout(test.precision, test.columns, format);
  const Guarded own(test.packed.bytes), base(test.packed.base), memory(layout.stride() * kBlockTokens);
  const Tiles weights = test.packed.tiles(own.data(), base.data());
  std::vector<Row> rows;
  for (int t = 0; t < kBlockTokens; ++t) {
    const Guarded x(test.x.data() + static_cast<std::size_t>(t) * test.columns, test.columns * sizeof(float));
    layout.fill(set, memory.data(), t, x.as<float>(), 0, test.columns);
    rows.push_back(layout.at(memory.data(), t));
  }
  const Guarded all(kBlockTokens * kRows * sizeof(float));
  multiply(weights, kTiles, test.columns, rows.data(), kBlockTokens, all.as<float>(), kRows);
  const float* out = all.as<float>();
  check_accuracy(test, rows.data(), out);

  std::vector<float> plain(kBlockTokens * kRows);
  const Multiply slow = scalar_tiles().multiply(format, test.precision);
  slow(weights, kTiles, test.columns, rows.data(), kBlockTokens, plain.data(), kRows);
  const double bound = test.precision == Precision::Float ? 1e-5 : 1e-6;
  for (int t = 0; t < kBlockTokens; ++t)
    CHECK(distance(out + t * kRows, plain.data() + t * kRows, kRows) < bound, "%s, token %d: %g from scalar",
          test.name.c_str(), t, distance(out + t * kRows, plain.data() + t * kRows, kRows));

  constexpr int kStride = kRows + 3;
  for (int count = 1; count <= 17; ++count) {
    const int first = count * 5 % (kBlockTokens - count);
    const Guarded some(((count - 1) * kStride + kRows) * sizeof(float));
    multiply(weights, kTiles, test.columns, rows.data() + first, count, some.as<float>(), kStride);
    for (int t = 0; t < count; ++t) {
      const float* got = some.as<float>() + t * kStride;
      CHECK(same_bits(got, out + (first + t) * kRows, kRows), "%s, %d tokens, token %d", test.name.c_str(), count, t);
      std::uint8_t gap[12];
      std::memset(gap, kSentinel, sizeof gap);
      if (t + 1 < count) CHECK(!std::memcmp(got + kRows, gap, sizeof gap), "%s wrote between rows", test.name.c_str());
    }
    CHECK(some.nothing_before(), "%s", test.name.c_str());
  }
}

void check_rounding(const TileSet& set, Precision precision, int group) {
  const WeightFormat format{precision == Precision::Int8 ? 2 : 8, group};  // whose activations share scales by group
  const int size = precision == Precision::Int8 ? 1 : 2, steps = precision == Precision::Int8 ? 127 : 32767;
  const int columns = 12 * group;
  Random random(group);
  std::vector<float> x = random.normals(columns);
  const float factors[12] = {1, 1e-3f, 1e30f, 1e37f, 1e-29f, 1e-32f, 1e-35f, 1e-41f, 0, 1, 1, 1};
  for (int k = 0; k < columns; ++k) x[k] *= factors[k / group];
  x[9 * group + 3] = NAN;
  x[10 * group + group - 1] = HUGE_VALF;
  x[11 * group] = -HUGE_VALF;
  const Guarded values(columns * size), plain_values(columns * size);
  const Guarded scale(12 * sizeof(float)), plain_scale(12 * sizeof(float));
  const Guarded sum(12 * sizeof(float)), plain_sum(12 * sizeof(float));
  set.quantize(x.data(), columns, format, precision, values.data(), scale.as<float>(), sum.as<float>());
  scalar_tiles().quantize(x.data(), columns, format, precision, plain_values.data(), plain_scale.as<float>(),
                          plain_sum.as<float>());
  CHECK(same_bits(values.data(), plain_values.data(), columns * size), "%s, group %d", set.name, group);
  CHECK(same_bits(scale.data(), plain_scale.data(), 9 * sizeof(float)), "%s, group %d", set.name, group);
  CHECK(same_bits(sum.data(), plain_sum.data(), 9 * sizeof(float)), "%s, group %d", set.name, group);
  for (int g = 0; g < 12; ++g) {
    const double step = static_cast<double>(scale.as<float>()[g]);
    if (g > 8) CHECK(std::isnan(step), "%s, group %d of %d: not finite, but its scale is %g", set.name, g, group, step);
    if (g > 8 || factors[g] == 0) continue;
    double total = 0;
    for (int k = g * group; k < (g + 1) * group; ++k) {
      const int value = size == 1 ? values.as<std::int8_t>()[k] : values.as<std::int16_t>()[k];
      total += value * step;
      CHECK(std::abs(value) <= steps, "%s: %d", set.name, value);
      CHECK(std::fabs(value * step - static_cast<double>(x[k])) <= 0.501 * step + 1e-30, "%s, column %d: %g became %g",
            set.name, k, static_cast<double>(x[k]), value * step);
    }
    CHECK(std::fabs(static_cast<double>(sum.as<float>()[g]) - total) <= 1e-6 * std::fabs(total) + 1e-36,
          "%s, group %d", set.name, g);
  }
}

void check_gate(const TileSet& set, const Gate& gate) {
  std::vector<float> g, u;
  for (float x : {-1e38f, -1e30f, -1e6f, -300.0f, -90.0f, -87.5f, -20.0f, -7.0f, -1.5f, -1e-3f, -1e-40f, 0.0f, 1e-40f,
                  1e-3f, 0.7f, 5.0f, 7.0f, 7.01f, 50.0f, 88.0f, 90.0f, 1e6f, 1e30f, 1e38f})
    for (float y : {-1e6f, -8.0f, -1.0f, 0.5f, 3.0f, 8.0f, 1e6f, 1.0f}) {
      g.push_back(x);
      u.push_back(y);
    }
  const Guarded gated(g), up(u);
  set.apply_gate(gate, gated.as<float>(), up.as<float>(), static_cast<int>(g.size()));
  for (std::size_t i = 0; i < g.size(); ++i) {
    double a = static_cast<double>(g[i]), b = static_cast<double>(u[i]);
    const double limit = static_cast<double>(gate.limit);
    if (gate.kind == GateKind::ClampedSwiGlu) {
      a = std::min(a, limit);
      b = std::clamp(b, -limit, limit) + 1;
    }
    const double wanted = a / (1 + std::exp(-static_cast<double>(gate.alpha) * a)) * b;
    const double got = static_cast<double>(gated.as<float>()[i]);
    const bool overflows = std::fabs(wanted) > 3.4e38 && !std::isfinite(got);
    CHECK(overflows || std::fabs(got - wanted) <= 3e-5 * std::fabs(wanted) + 1e-28, "%s: gate %g, up %g: %g, not %g",
          set.name, static_cast<double>(g[i]), static_cast<double>(u[i]), got, wanted);
  }
  std::vector<float> poison(8, NAN), ones(8, 1.0f);
  std::vector<float> a = poison, b = ones;
  set.apply_gate(gate, a.data(), b.data(), 8);
  set.apply_gate(gate, ones.data(), poison.data(), 8);
  for (int i = 0; i < 8; ++i) CHECK(std::isnan(a[i]) && std::isnan(ones[i]), "%s loses NaN", set.name);
}

void check_sums(const TileSet& set) {
  Random random(9);
  const std::vector<float> x = random.normals(384), y = random.normals(384);
  for (int group : {32, 64, 128}) {
    const Guarded sum(384 / group * sizeof(float)), from(x);
    set.sum_groups(from.as<float>(), 384, group, sum.as<float>());
    for (int g = 0; g < 384 / group; ++g) {
      double wanted = 0;
      for (int k = g * group; k < (g + 1) * group; ++k) wanted += static_cast<double>(x[k]);
      CHECK(std::fabs(static_cast<double>(sum.as<float>()[g]) - wanted) < 1e-4, "%s, group %d", set.name, group);
    }
  }
  const Guarded out(x), addend(y);
  set.accumulate(out.as<float>(), addend.as<float>(), 0.3f, 384);
  for (int i = 0; i < 384; ++i) {
    const double wanted = static_cast<double>(x[i]) + 0.3 * static_cast<double>(y[i]);
    CHECK(std::fabs(static_cast<double>(out.as<float>()[i]) - wanted) < 1e-6, "%s, %d", set.name, i);
  }
}

// Attention of `queries` queries over random keys and values, written out in double precision.
void check_attention(const TileSet& set, int queries, int width, int tokens) {
  Random random(1000 * queries + 10 * width + tokens);
  const std::size_t stride = (tokens + 7) / 8 * 8;
  const std::vector<float> query = random.normals(queries * width, 2.0), keys = random.normals(tokens * width);
  const std::vector<float> values = random.normals(tokens * width);
  const Guarded q(query), k(keys), v(values), scores(queries * stride * sizeof(float));
  const Guarded out(queries * width * sizeof(float));
  const float scaling = 0.125f;
  AttendCall call{q.as<float>(), queries, k.as<float>(), v.as<float>(), width, tokens, scaling, scores.as<float>(), stride,
                  out.as<float>()};
  set.attend(call);
  for (int i = 0; i < queries; ++i) {
    std::vector<double> weights(tokens), wanted(width);
    double largest = -HUGE_VAL, total = 0;
    for (int t = 0; t < tokens; ++t) {
      for (int c = 0; c < width; ++c)
        weights[t] += static_cast<double>(query[i * width + c]) * static_cast<double>(keys[t * width + c]);
      weights[t] *= static_cast<double>(scaling);
      largest = std::max(largest, weights[t]);
    }
    for (double& weight : weights) total += weight = std::exp(weight - largest);
    for (int t = 0; t < tokens; ++t)
      for (int c = 0; c < width; ++c) wanted[c] += weights[t] / total * static_cast<double>(values[t * width + c]);
    const double error = distance(out.as<float>() + i * width, wanted.data(), width);
    CHECK(error < 1e-5, "%s: query %d of %d, width %d, %d tokens: %g", set.name, i, queries, width, tokens, error);
  }
  std::vector<float> alone(width), working(stride);
  for (int i = 0; i < queries; ++i) {
    set.attend({query.data() + i * width, 1, keys.data(), values.data(), width, tokens, scaling, working.data(), stride,
                alone.data()});
    CHECK(same_bits(alone.data(), out.as<float>() + i * width, width), "%s: query %d of %d depends on the others",
          set.name, i, queries);
  }
  q.as<float>()[(queries - 1) * width] = NAN;
  set.attend(call);
  for (int i = 0; i < queries * width; ++i)
    CHECK(std::isnan(out.as<float>()[i]) == (i >= (queries - 1) * width), "%s: a poisoned query", set.name);
  k.as<float>()[(tokens - 1) * width] = HUGE_VALF;
  set.attend(call);
  for (int i = 0; i < queries * width; ++i) CHECK(std::isnan(out.as<float>()[i]), "%s: a poisoned key", set.name);
}

// Keys or values of a format, and the same as floats.
struct Kept {
  std::vector<std::uint8_t> bytes;
  std::vector<float> scales, floats;
};

Kept keep(KvFormat format, int tokens, int width, Random& random) {
  Kept kept;
  const std::vector<float> normals = random.normals(tokens * width);
  if (format == KvFormat::Int8)
    for (int t = 0; t < tokens; ++t) kept.scales.push_back(0.01f + 0.001f * static_cast<float>(t));
  for (int i = 0; i < tokens * width; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &normals[i], 4);
    float value = normals[i];
    if (format == KvFormat::Int8) {
      const auto code = static_cast<std::int8_t>(std::max(-127.0f, std::min(127.0f, 60.0f * normals[i])));
      kept.bytes.push_back(static_cast<std::uint8_t>(code));
      value = static_cast<float>(code) * kept.scales[i / width];
    } else {
      const auto half = static_cast<std::uint16_t>(
          format == KvFormat::BFloat16 ? bits >> 16 : (bits >> 16 & 0x8000) | (0x3400 + (bits >> 13 & 0x7ff)));
      kept.bytes.push_back(static_cast<std::uint8_t>(half & 255));
      kept.bytes.push_back(static_cast<std::uint8_t>(half >> 8));
      bits = static_cast<std::uint32_t>(half) << 16;
      std::memcpy(&value, &bits, 4);
      if (format == KvFormat::Float16) value = float_of_half(half);
    }
    kept.floats.push_back(value);
  }
  return kept;
}

// Kept in fewer bytes, keys and values give what the same numbers give as floats.
void check_kept_attention(const TileSet& set, KvFormat format, int queries, int width, int tokens) {
  Random random(100 * static_cast<int>(format) + width + tokens);
  const std::size_t stride = (tokens + 7) / 8 * 8;
  const std::vector<float> query = random.normals(queries * width, 2.0);
  const Kept keys = keep(format, tokens, width, random), values = keep(format, tokens, width, random);
  const Guarded k(keys.bytes), v(values.bytes), ks(keys.scales), vs(values.scales);
  std::vector<float> wanted(queries * width), got(queries * width), scores(queries * stride);
  AttendCall call{query.data(), queries, keys.floats.data(), values.floats.data(), width, tokens, 0.125f, scores.data(),
                  stride, wanted.data()};
  set.attend(call);
  call.keys = k.data(), call.values = v.data(), call.out = got.data(), call.format = format;
  call.key_scales = ks.as<float>(), call.value_scales = vs.as<float>();
  set.attend(call);
  if (format != KvFormat::Int8)
    CHECK(same_bits(got.data(), wanted.data(), queries * width), "%s: format %d", set.name, static_cast<int>(format));
  for (int i = 0; i < queries * width; ++i)
    CHECK(std::fabs(got[i] - wanted[i]) < 1e-5f, "%s: format %d, %g instead of %g", set.name, static_cast<int>(format),
          static_cast<double>(got[i]), static_cast<double>(wanted[i]));
}

void check_halves() {
  struct {
    std::uint16_t bits;
    float value;
  } const known[] = {{0x3c00, 1.0f},      {0xc000, -2.0f},         {0x7bff, 65504.0f},     {0x0400, 0x1p-14f},
                     {0x0001, 0x1p-24f},  {0x83ff, -0x1.ff8p-15f}, {0x0000, 0.0f},         {0x8000, -0.0f},
                     {0x7c00, HUGE_VALF}, {0xfc00, -HUGE_VALF},    {0x3555, 0x1.554p-2f}};
  for (const auto& half : known) {
    const float got = float_of_half(half.bits);
    CHECK(same_bits(&got, &half.value, 1), "half %x became %g", half.bits, static_cast<double>(got));
  }
  CHECK(std::isnan(float_of_half(0x7e00)), "NaN");
}

}  // namespace

// The packer and the decoder agree, and a matrix takes the bytes that the format says.
void test_layout() {
  check_halves();
  for (WeightFormat format : every_format()) {
    Random random(format.bits);
    const int columns = format.bits == 16 ? 75 : 3 * format.group;
    const Packed packed = pack(format, kRows, columns, random);
    const std::string name = describe(format);
    const auto check_size = [&](const std::vector<std::uint8_t>& bytes, WeightFormat part, int meta) {
      const std::size_t wanted = part.bits == 16 ? kRows * columns * 2
                                                 : kTiles * (columns / part.group) * (part.group * part.bits + meta);
      CHECK(bytes.size() == wanted && tile_bytes(part, columns) * kTiles == wanted, "%s: %zu bytes", name.c_str(),
            bytes.size());
    };
    check_size(packed.bytes, format, format.base_bits ? 0 : format.bits == 8 ? 16 : 32);
    if (format.base_bits) check_size(packed.base, format.base(), 32);
    const Tiles tiles = packed.tiles(packed.bytes.data(), packed.base.data());
    for (int row = 0; row < kRows; ++row)
      for (int column = 0; column < columns; ++column)
        CHECK(decode(tiles, format, columns, row, column) == packed.values[row * columns + column],
              "%s, row %d, column %d", name.c_str(), row, column);
  }
}

void test_tiles(const TileSet& set) {
  for (WeightFormat format : every_format())
    for (bool exact : {false, true})
      for (Codes codes : {Codes::Random, Codes::Largest}) check_multiply(set, format, exact, codes);
  for (int group : {32, 64, 128}) {
    check_rounding(set, Precision::Int8, group);
    check_rounding(set, Precision::Int16, group);
  }
  check_gate(set, {GateKind::SwiGlu, 1.0f, 0.0f});
  check_gate(set, {GateKind::ClampedSwiGlu, 1.702f, 7.0f});
  check_sums(set);
  for (int queries = 1; queries <= kQueriesAtOnce; ++queries)
    for (int width : {16, 48, 128})
      for (int tokens : {1, 7, 8, 9, 40}) check_attention(set, queries, width, tokens);
  for (KvFormat format : {KvFormat::Float16, KvFormat::BFloat16, KvFormat::Int8})
    for (int queries : {1, 3, kQueriesAtOnce})
      for (int tokens : {1, 9, 40}) check_kept_attention(set, format, queries, 48, tokens);
  const WeightFormat none[] = {{4, 48}, {5, 64}, {2, 64, 4}, {4, 64, 2}, {1, 64, 1}, {3, 64, 3}, {8, 64, 8}};
  for (WeightFormat format : none)
    for (Precision precision : {Precision::Float, Precision::Int8, Precision::Int16})
      CHECK(!set.multiply(format, precision), "%s has a multiply for %s", set.name, describe(format).c_str());
  for (WeightFormat format : every_format())
    for (Precision precision : {Precision::Int8, Precision::Int16})
      CHECK(!set.multiply(format, precision) == (precision != precision_for(format, false)), "%s, %s", set.name,
            describe(format).c_str());
}

}  // namespace dynaexq::test
