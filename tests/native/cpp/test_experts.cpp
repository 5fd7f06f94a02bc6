// A layer's experts: several formats in one call, gates, biases, waves, poison, threads.
#include <stdexcept>
#include <thread>

#include "check.hpp"
#include "layers.hpp"

namespace dynaexq::test {
namespace {

const Gate kSwiGlu{GateKind::SwiGlu, 1.0f, 0.0f}, kClamped{GateKind::ClampedSwiGlu, 1.702f, 7.0f};

constexpr std::uint64_t kNone = 0xfffffff;  // of a handle word's block numbers

// A layer with what its nested formats refine: Layer lays out what they add, this puts their bases in front of all
// versions, those of the last experts first.
Layer with_bases(Layer layer) {
  for (VersionFormat& format : layer.formats) {
    if (!format.weights.base_bits) continue;
    const std::size_t up = align(tile_bytes(format.weights.base(), layer.hidden) * (layer.intermediate / 8));
    format.base_sections = {0, up, 2 * up};
  }
  const std::size_t experts = layer.words.size();
  std::vector<std::uint8_t> bases;
  std::vector<std::uint64_t> blocks(experts, kNone);
  for (std::size_t e = experts; e-- > 0;) {
    const VersionFormat& format = layer.formats[layer.words[e] >> 56];
    if (!format.weights.base_bits) continue;
    const std::size_t start = bases.size();
    blocks[e] = start / kBlock;
    for (int part = 0; part < 3; ++part) {
      bases.resize(start + format.base_sections[part], kSentinel);
      const Packed& matrix = layer.experts[e][part];
      bases.insert(bases.end(), matrix.base.begin(), matrix.base.end());
    }
    bases.resize((bases.size() + kBlock - 1) / kBlock * kBlock, kSentinel);
  }
  for (std::size_t e = 0; e < experts; ++e) {
    const std::uint64_t own = (layer.words[e] >> 28 & kNone) + bases.size() / kBlock;
    const bool nested = blocks[e] != kNone;
    layer.words[e] = layer.words[e] >> 56 << 56 | (nested ? blocks[e] << 28 | own : own << 28 | kNone);
  }
  layer.bytes.insert(layer.bytes.begin(), bases.begin(), bases.end());
  return layer;
}

void check_output(const TileSet& set, const Layer& layer, const Input& input, const LayerGate& gate, bool exact,
                  const std::vector<float>& out, int most) {
  for (int token = 0; token < std::min(input.tokens, most); ++token) {
    const float* got = out.data() + static_cast<std::size_t>(token) * layer.hidden;
    const std::vector<double> truth = wanted_of_token(layer, input, token, gate, false);
    const double error = distance(got, truth.data(), layer.hidden);
    CHECK(error < (exact ? 1e-5 : 0.1), "%s, token %d: %g from the truth", set.name, token, error);
    if (exact) continue;
    // a value between the gate and down may fall to the other side of a half: one step of one value
    const std::vector<double> rounded = wanted_of_token(layer, input, token, gate, true);
    const double close = distance(got, rounded.data(), layer.hidden);
    CHECK(close < 3e-3, "%s, token %d: %g from rounded arithmetic", set.name, token, close);
  }
}

// One geometry: accuracy, and the same bits for any number of tokens, threads and in bfloat16.
void check_layer(const TileSet& set, const Layer& layer, const LayerGate& gate, bool exact, int most, Random& random) {
  const Guarded arena(layer.bytes);
  const ExpertLayers layers = layer.bind(arena, exact, set);
  const int width = layer.hidden;
  const Input input(layer, most, 4, random);
  const std::vector<float> all = forward(layers, layer, input, gate, 2);
  if (!CHECK(all.size() == input.hidden.size(), "%s wrote before out", set.name)) return;
  check_output(set, layer, input, gate, exact, all, 8);
  for (int tokens : {0, 1, 2, 3, 4, 5, 8, 9, 33}) {
    const Input some = input.first(tokens, 4);
    const bool few = tokens == 1 || tokens == 5 || tokens == 9;
    for (int threads = few ? 1 : 3; threads <= (few ? 4 : 3); ++threads) {
      const std::vector<float> out = forward(layers, layer, some, gate, threads);
      CHECK(out.size() == some.hidden.size() && same_bits(out.data(), all.data(), out.size()),
            "%s, exact %d, %d tokens, %d threads", set.name, exact, tokens, threads);
    }
  }
  for (int top_k = 1; top_k <= 3; ++top_k) {
    const Input some = input.first(9, top_k);
    check_output(set, layer, some, gate, exact, forward(layers, layer, some, gate, 2), 3);
  }
  Input half = input.first(33, 4);
  std::vector<std::uint16_t> narrow, expected;
  for (float& x : half.hidden) {
    narrow.push_back(to_bfloat16(x));
    x = from_bfloat16(narrow.back());
  }
  for (float x : forward(layers, layer, half, gate, 2)) expected.push_back(to_bfloat16(x));
  for (int threads : {1, 3}) {
    const std::vector<std::uint16_t> out = forward<std::uint16_t>(layers, layer, narrow, half, gate, threads);
    CHECK(out == expected, "%s, exact %d, bfloat16, %d threads, width %d", set.name, exact, threads, width);
  }
}

void check_poison(const TileSet& set, const Layer& layer, const LayerGate& gate, bool exact, Random& random) {
  const Guarded arena(layer.bytes);
  const ExpertLayers layers = layer.bind(arena, exact, set);
  const int width = layer.hidden, at = 5;
  for (int tokens : {6, 11}) {
    const Input clean(layer, tokens, 3, random);
    const std::vector<float> good = forward(layers, layer, clean, gate, 2);
    CHECK(all_finite(good.data(), good.size()), "%s", set.name);
    struct {
      float value;
      bool everywhere, finite, poisons;
    } cases[] = {{NAN, false, false, true},   {HUGE_VALF, false, false, true}, {-HUGE_VALF, false, false, true},
                 {1e-41f, true, true, false}, {1e-35f, true, true, false},     {0.0f, true, true, false},
                 {1e30f, true, false, false}, {-1e30f, false, false, false},   {3e38f, true, false, false}};
    for (const auto& c : cases) {
      if (tokens > 6 && !c.poisons) continue;
      Input input = clean;
      float* token = input.hidden.data() + at * width;
      if (c.everywhere)
        for (int k = 0; k < width; ++k) token[k] = k % 3 ? c.value : -c.value;
      else
        token[random.below(width)] = c.value;
      const std::vector<float> out = forward(layers, layer, input, gate, 2);
      const float* poisoned = out.data() + at * width;
      const char* what = "%s, exact %d, clamped %d, %g among %d tokens";
      const int clamped = gate.function.kind == GateKind::ClampedSwiGlu;
      const double value = static_cast<double>(c.value);
      CHECK(same_bits(out.data(), good.data(), at * width), what, set.name, exact, clamped, value, tokens);
      CHECK(same_bits(poisoned + width, good.data() + (at + 1) * width, (tokens - at - 1) * width), what, set.name,
            exact, clamped, value, tokens);
      if (c.finite) CHECK(all_finite(poisoned, width), what, set.name, exact, clamped, value, tokens);
      if (c.poisons) CHECK(!all_finite(poisoned, width), what, set.name, exact, clamped, value, tokens);
      if (c.finite || c.poisons || !all_finite(poisoned, width)) continue;
      const std::vector<double> truth = wanted_of_token(layer, input, at, gate, false);
      const double error = distance(poisoned, truth.data(), width);
      // where a weight is zero as the difference of code and offset, 1e30 leaves its rounding behind in float32
      CHECK(error < 0.1, "%s, exact %d, clamped %d, %g: %g from the truth", set.name, exact, clamped,
            value, error);
    }
  }
}

// Every format with one expert: its bytes are the last before the guard page.
void check_alone(const TileSet& set, bool exact) {
  std::vector<std::pair<WeightFormat, int>> formats;  // with the bits of down
  for (WeightFormat format : every_format()) formats.emplace_back(format, 0);
  for (int group : {32, 64, 128})
    for (auto [bits, down] : {std::pair{2, 3}, {2, 4}, {3, 4}, {4, 8}})
      formats.emplace_back(WeightFormat{bits, group}, down);
  for (const auto& [format, down] : formats) {
    Random random(format.whole_bits() + format.group);
    const int unit = std::max(format.group, 8);
    const Layer layer = with_bases({unit, 3 * unit, {format}, 1, random, {down}});
    const Guarded arena(layer.bytes);
    const ExpertLayers layers = layer.bind(arena, exact, set);
    const LayerGate gate{kSwiGlu, false, nullptr, nullptr};
    for (int tokens : {1, 2, 11}) {
      const Input input(layer, tokens, 1, random);
      check_output(set, layer, input, gate, exact, forward(layers, layer, input, gate, 2), 2);
    }
  }
}

// More pairs than one wave holds, one expert with more than fit into a wave.
void check_waves(const TileSet& set) {
  Random random(5);
  const Layer layer(8, 2048, {{16, 0}}, 3, random);
  Input input(layer, 560, 2, random);
  for (int pair = 0; pair < 1120; ++pair) input.ids[pair] = pair < 1090 && pair % 20 ? 1 : pair / 2 % 2 * 2;
  const Guarded arena(layer.bytes);
  const ExpertLayers layers = layer.bind(arena, false, set);
  const LayerGate gate{kSwiGlu, false, nullptr, nullptr};
  const std::vector<float> out = forward(layers, layer, input, gate, 2);
  check_output(set, layer, input, gate, true, out, 40);
  for (int first : {0, 300, 543, 557}) {
    Input few = input.first(3, 2);
    std::copy_n(input.hidden.data() + first * 8, 24, few.hidden.data());
    std::copy_n(input.ids.data() + first * 2, 6, few.ids.data());
    std::copy_n(input.weights.data() + first * 2, 6, few.weights.data());
    const std::vector<float> alone = forward(layers, layer, few, gate, 1);
    CHECK(same_bits(alone.data(), out.data() + first * 8, 24), "%s, tokens from %d", set.name, first);
  }
}

void check_misuse(const TileSet& set, const Layer& good, Random& random) {
  const Guarded arena(good.bytes);
  const ExpertLayers layers = good.bind(arena, false, set);
  const LayerGate gate{kSwiGlu, false, nullptr, nullptr};
  const Input input(good, 9, 2, random);
  const int experts = static_cast<int>(good.experts.size());
  const std::uint64_t blocks = (good.bytes.size() + kBlock - 1) / kBlock;
  const auto refuses = [&](const std::vector<std::int64_t>& ids, const std::vector<std::uint64_t>& words) {
    const Guarded out(input.hidden.size() * sizeof(float)), guarded_words(words), guarded_ids(ids);
    bool thrown = false;
    try {
      layers.forward({Number::Float32, input.hidden.data(), guarded_ids.as<std::int64_t>(), input.weights.data(), 9, 2,
                      guarded_words.as<std::uint64_t>(), &gate, out.data()},
                     2);
    } catch (const std::out_of_range&) {
      thrown = true;
    }
    return thrown && out.untouched();
  };
  for (std::int64_t id : {std::int64_t{-1}, std::int64_t{experts}, INT64_MAX, INT64_MIN, std::int64_t{1} << 32}) {
    std::vector<std::int64_t> ids = input.ids;
    ids.back() = id;
    CHECK(refuses(ids, good.words), "%s took the id %lld", set.name, static_cast<long long>(id));
  }
  const std::uint64_t last = good.words[experts - 1], formats = good.formats.size();
  const auto nested = [&](std::uint64_t word) { return good.formats[word >> 56].weights.base_bits > 0; };
  std::vector<std::uint64_t> wrong_words{formats << 56 | kNone, std::uint64_t{255} << 56 | kNone, blocks << 28 | kNone,
                                         kNone << 28 | kNone, UINT64_MAX};
  // one block further, the last bytes are outside
  wrong_words.push_back(last + (nested(last) ? 1 : std::uint64_t{1} << 28));
  for (std::uint64_t word : good.words)
    for (std::uint64_t block : {blocks, kNone}) {
      if (!nested(word)) continue;
      wrong_words.push_back((word & ~kNone) | block);
      wrong_words.push_back((word & ~(kNone << 28)) | block << 28);
    }
  for (std::uint64_t word : wrong_words) {
    std::vector<std::uint64_t> words = good.words;
    words[input.ids.back()] = word;
    CHECK(refuses(input.ids, words), "%s took the word %llx", set.name, static_cast<unsigned long long>(word));
  }
  struct {
    int hidden, intermediate;
    WeightFormat format;
  } wrong[] = {{96, 96, {4, 64}}, {128, 96, {4, 64}}, {96, 96, {4, 48}}, {96, 96, {5, 32}}, {96, 96, {4, 32, 2}},
               {12, 16, {16, 0}}};
  for (const auto& w : wrong) {
    bool thrown = false;
    try {
      ExpertLayers(arena.data(), good.bytes.size(), 1, w.hidden, w.intermediate, {{w.format, {0, 64, 128}}}, false,
                   set);
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    CHECK(thrown, "%s took %d x %d, %s", set.name, w.hidden, w.intermediate, describe(w.format).c_str());
  }
}

void check_callers(const TileSet& set, const Layer& layer, const LayerGate& gate, Random& random) {
  const Guarded arena(layer.bytes);
  const ExpertLayers layers = layer.bind(arena, false, set);
  const Input small(layer, 3, 2, random), large(layer, 20, 2, random);
  const std::vector<float> few = forward(layers, layer, small, gate, 1), many = forward(layers, layer, large, gate, 1);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 3; ++round) {
        const bool one = (caller + round) % 2;
        CHECK(forward(layers, layer, one ? small : large, gate, 1 + caller % 3) == (one ? few : many),
              "%s, caller %d", set.name, caller);
      }
    });
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

void test_experts(const TileSet& set) {
  Random random(77);
  const std::vector<Layer> layers{
      {192, 96, {{4, 32}, {8, 32}, {2, 32}, {1, 32}, {16, 0}}, 7, random},
      {64, 320, {{1, 64}, {16, 0}, {4, 64}, {8, 64}, {2, 32}}, 5, random},
      {256, 128, {{8, 128}, {2, 128}, {4, 128}, {1, 64}, {1, 128}}, 5, random},
      {72, 136, {{16, 0}}, 2, random},
      with_bases({128, 192, {{2, 64, 2}, {3, 32}, {4, 32, 4}, {4, 64}, {4, 64, 4}, {8, 64}, {2, 32, 2}}, 8, random}),
      {64, 192, {{2, 64}, {4, 64}, {3, 32}, {2, 32}, {4, 32}}, 6, random, {3, 8, 4, 4, 0}},
  };
  int turn = 0;
  for (const Layer& layer : layers) {
    const std::size_t experts = layer.experts.size();
    const std::vector<float> up_bias = random.normals(experts * 2 * layer.intermediate);
    const std::vector<float> down_bias = random.normals(experts * layer.hidden);
    const Guarded up(up_bias), down(down_bias);
    for (const LayerGate& gate : {LayerGate{kSwiGlu, false, nullptr, nullptr},
                                  LayerGate{kClamped, true, up.as<float>(), down.as<float>()},
                                  LayerGate{kClamped, false, up.as<float>(), nullptr}}) {
      check_layer(set, layer, gate, turn % 2, turn == 0 ? 200 : 40, random);
      ++turn;
      if (!gate.gate_up_bias || gate.interleaved)
        for (bool exact : {false, true}) check_poison(set, layer, gate, exact, random);
    }
    check_callers(set, layer, {kSwiGlu, true, up.as<float>(), down.as<float>()}, random);
    check_misuse(set, layer, random);
  }
  for (bool exact : {false, true}) check_alone(set, exact);
  check_waves(set);
}

}  // namespace dynaexq::test
