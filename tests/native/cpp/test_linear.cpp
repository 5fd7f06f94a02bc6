// Dense layers: rows that do not fill a tile, odd columns, waves, poison, threads.
#include <stdexcept>
#include <string>
#include <thread>

#include "check.hpp"
#include "linear.hpp"
#include "packing.hpp"

namespace dynaexq::test {
namespace {

template <class T>
std::vector<T> forward(const PackedLinear& linear, const std::vector<T>& x, int tokens, int rows, const float* bias,
                       int threads) {
  const Guarded from(x), out(static_cast<std::size_t>(tokens) * rows * sizeof(T));
  linear.forward(sizeof(T) == 2 ? Number::BFloat16 : Number::Float32, from.data(), tokens, bias, out.data(), threads);
  if (!out.nothing_before()) return {};
  return std::vector<T>(out.as<T>(), out.as<T>() + static_cast<std::size_t>(tokens) * rows);
}

void check_format(const TileSet& set, WeightFormat format, bool exact, int rows, int columns) {
  Random random(format.bits + rows);
  const Packed packed = pack(format, (rows + 7) / 8 * 8, columns, random);
  const Guarded weights(packed.bytes), bias(random.normals(rows));
  const PackedLinear linear(weights.data(), packed.bytes.size(), format, rows, columns, exact, set);
  const std::string name = std::string(set.name) + ", " + std::to_string(format.bits) + " bits, " +
                           std::to_string(rows) + " x " + std::to_string(columns) + (exact ? ", exact" : "");
  constexpr int kTokens = 70, kChecked = 6, kPoisoned = 4;
  std::vector<float> x = random.normals(kTokens * columns);
  const std::vector<float> all = forward(linear, x, kTokens, rows, bias.as<float>(), 2);
  if (!CHECK(all.size() == static_cast<std::size_t>(kTokens * rows), "%s wrote before out", name.c_str())) return;
  const Precision precision = precision_for(format, exact);
  const double bound = precision == Precision::Int8 ? 2e-2 : precision == Precision::Int16 ? 1e-3 : 1e-5;
  std::vector<double> wanted(kChecked * rows);
  for (int t = 0; t < kChecked; ++t)
    for (int r = 0; r < rows; ++r) {
      double& sum = wanted[t * rows + r] = static_cast<double>(bias.as<float>()[r]);
      for (int k = 0; k < columns; ++k) sum += packed.values[r * columns + k] * static_cast<double>(x[t * columns + k]);
    }
  CHECK(distance(all.data(), wanted.data(), wanted.size()) < bound, "%s: %g", name.c_str(),
        distance(all.data(), wanted.data(), wanted.size()));
  for (int tokens : {0, 1, 2, 3, 8, 9, 17, 65})
    for (int threads = 1; threads <= 4; ++threads) {
      const std::vector<float> some(x.begin(), x.begin() + tokens * columns);
      const std::vector<float> out = forward(linear, some, tokens, rows, bias.as<float>(), threads);
      CHECK(out.size() == static_cast<std::size_t>(tokens * rows) && same_bits(out.data(), all.data(), out.size()),
            "%s, %d tokens, %d threads", name.c_str(), tokens, threads);
    }
  std::vector<std::uint16_t> narrow, expected;
  std::vector<float> wide;
  for (int i = 0; i < 11 * columns; ++i) {
    narrow.push_back(to_bfloat16(x[i]));
    wide.push_back(from_bfloat16(narrow.back()));
  }
  for (float y : forward(linear, wide, 11, rows, nullptr, 1)) expected.push_back(to_bfloat16(y));
  CHECK(forward(linear, narrow, 11, rows, nullptr, 3) == expected, "%s, bfloat16", name.c_str());

  for (float poison : {NAN, HUGE_VALF, -HUGE_VALF, 1e-41f, 1e-35f, 1e30f}) {
    std::vector<float> bad(x.begin(), x.begin() + 9 * columns);
    for (int k = 0; k < (std::isfinite(poison) ? columns : 1); ++k) bad[kPoisoned * columns + k] = poison;
    const std::vector<float> out = forward(linear, bad, 9, rows, bias.as<float>(), 2);
    CHECK(same_bits(out.data(), all.data(), kPoisoned * rows) &&
              same_bits(&out[(kPoisoned + 1) * rows], &all[(kPoisoned + 1) * rows], 4 * rows),
          "%s: %g reaches other tokens", name.c_str(), static_cast<double>(poison));
    CHECK(all_finite(&out[kPoisoned * rows], rows) == std::isfinite(poison), "%s: %g", name.c_str(),
          static_cast<double>(poison));
  }
}

void check_waves(const TileSet& set) {
  Random random(3);
  const int columns = 2048, tokens = 1100, rows = 5;
  const Packed packed = pack({16, 0}, 8, columns, random);
  const PackedLinear linear(packed.bytes.data(), packed.bytes.size(), {16, 0}, rows, columns, false, set);
  const std::vector<float> x = random.normals(static_cast<std::size_t>(tokens) * columns);
  const std::vector<float> out = forward(linear, x, tokens, rows, nullptr, 2);
  for (int first : {0, 500, 1022, 1097}) {
    const std::vector<float> few(x.begin() + first * columns, x.begin() + (first + 3) * columns);
    CHECK(same_bits(forward(linear, few, 3, rows, nullptr, 1).data(), &out[first * rows], 3 * rows),
          "%s, tokens from %d", set.name, first);
  }
}

void check_misuse(const TileSet& set) {
  struct {
    std::size_t nbytes;
    WeightFormat format;
    int rows, columns;
  } wrong[] = {{2303, {4, 64}, 8, 512}, {2304, {4, 64}, 9, 512}, {9999, {4, 64}, 8, 96},  {9999, {4, 64}, 0, 64},
               {9999, {4, 64}, 8, 0},   {9999, {4, 40}, 8, 80},  {9999, {5, 64}, 8, 64}, {9999, {16, 0}, 8, 0},
               {9999, {16, 0}, -8, 8},  {1023, {16, 0}, 8, 64}};
  const std::vector<std::uint8_t> bytes(9999);
  for (const auto& w : wrong) {
    bool thrown = false;
    try {
      PackedLinear(bytes.data(), w.nbytes, w.format, w.rows, w.columns, false, set);
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    CHECK(thrown, "%s took %zu bytes as %d bits, group %d, %d x %d", set.name, w.nbytes, w.format.bits, w.format.group,
          w.rows, w.columns);
  }
}

void check_callers(const TileSet& set) {
  Random random(4);
  const Packed packed = pack({4, 64}, 104, 256, random);
  const PackedLinear linear(packed.bytes.data(), packed.bytes.size(), {4, 64}, 100, 256, false, set);
  const std::vector<float> x = random.normals(20 * 256);
  const std::vector<float> wanted = forward(linear, x, 20, 100, nullptr, 1);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 10; ++round)
        CHECK(forward(linear, x, 20, 100, nullptr, 1 + caller % 3) == wanted, "%s, caller %d", set.name, caller);
    });
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

void test_linear(const TileSet& set) {
  for (WeightFormat format : every_format())
    for (bool exact : {false, true}) {
      if (format.base_bits) continue;  // of experts alone
      const int columns = format.bits == 16 ? 37 : 2 * format.group;
      check_format(set, format, exact, 13, columns);
      if (format.group % 128 == 0) check_format(set, format, exact, 150, format.bits == 16 ? 64 : columns);
    }
  check_waves(set);
  check_misuse(set);
  check_callers(set);
}

}  // namespace dynaexq::test
