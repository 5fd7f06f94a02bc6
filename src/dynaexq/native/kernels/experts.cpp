#include "experts.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../team.hpp"

namespace dynaexq {
namespace {

constexpr std::size_t kWaveBytes = 8 << 20;  // of rows between gate and down, all pairs of a wave together
constexpr int kRowFloats = 2 * kBlockTokens * kChunkRows;  // holds 64 tokens in groups of 128

constexpr unsigned kBlockShift = 12;
constexpr std::uint64_t kBlockMask = (std::uint64_t{1} << 28) - 1;

// Pairs (token, place among its experts) of one expert in one wave: [first, first + count) of the sorted pairs.
struct Segment {
  int expert, first, count, kernel;
  Tiles version;  // its first byte, or that of its base and its own; null until it arrives
};

}  // namespace

ExpertLayers::ExpertLayers(const std::uint8_t* arena, std::size_t arena_bytes, int experts, int hidden,
                           int intermediate, std::vector<VersionFormat> formats, bool exact, const TileSet& tiles)
    : arena_(arena),
      arena_bytes_(arena_bytes),
      experts_(experts),
      hidden_(hidden),
      intermediate_(intermediate),
      formats_(std::move(formats)),
      tiles_(tiles) {
  for (const VersionFormat& format : formats_) {
    const int group = format.weights.group;
    const WeightFormat down = format.down();
    const Precision precision = precision_for(format.weights, exact), down_precision = precision_for(down, exact);
    const Multiply multiply = tiles_.multiply(format.weights, precision);
    const Multiply multiply_down = tiles_.multiply(down, down_precision);
    const int unit = std::max(group, kTileRows);
    if (!multiply || !multiply_down || hidden_ % unit || intermediate_ % unit)
      throw std::invalid_argument("no kernel for " + std::to_string(format.weights.bits) + " bits in groups of " +
                                  std::to_string(group) + " of " + std::to_string(hidden_) + " x " +
                                  std::to_string(intermediate_));
    const RowLayout inner(down_precision, intermediate_, down);
    const Part own = measure(format.weights, down, format.sections[2]);
    const WeightFormat below = format.weights.base();
    const Part base = format.weights.base_bits ? measure(below, below, format.base_sections[2]) : Part{};
    kernels_.push_back({RowLayout(precision, hidden_, format.weights), inner, multiply, multiply_down, own, base});
    inner_stride_ = std::max(inner_stride_, inner.stride());
    unit_ = std::max(unit_, group);
  }
}

ExpertLayers::Part ExpertLayers::measure(WeightFormat format, WeightFormat down, std::size_t down_section) const {
  const std::size_t tile = tile_bytes(down, intermediate_);
  return {tile_bytes(format, hidden_), tile, down_section + tile * (hidden_ / kTileRows)};
}

// What one forward needs while it runs.
struct ExpertLayers::Run {
  const ExpertLayers& layers;
  const LayerCall& call;
  std::vector<int> starts;       // [experts + 1] into pairs
  std::vector<int> pairs;        // token * top_k + place, by expert, then by token
  std::vector<Segment> segments;
  bool pending = false;          // some segments have no version yet
  const float* hidden = nullptr;              // [tokens, hidden]
  std::vector<std::uint8_t*> hidden_rows;     // by kernel; null where no expert that is hit needs it
  std::uint8_t* inner = nullptr;
  float* out = nullptr;

  Run(const ExpertLayers& owner, const LayerCall& what)
      : layers(owner), call(what), starts(owner.experts_ + 1), pairs(what.tokens * what.top_k) {
    sort_pairs();
    find_versions();
  }

  void sort_pairs() {
    for (std::size_t pair = 0; pair < pairs.size(); ++pair) {
      const std::int64_t id = call.ids[pair];
      if (id < 0 || id >= layers.experts_) throw std::out_of_range("expert id " + std::to_string(id) + " is not there");
      ++starts[id + 1];
    }
    for (int expert = 0; expert < layers.experts_; ++expert) starts[expert + 1] += starts[expert];
    std::vector<int> next(starts.begin(), starts.end() - 1);
    for (std::size_t pair = 0; pair < pairs.size(); ++pair) pairs[next[call.ids[pair]]++] = static_cast<int>(pair);
  }

  // Cuts the experts that are hit into segments no longer than a wave holds.
  void find_versions() {
    const int most = most_pairs();
    for (int expert = 0; expert < layers.experts_; ++expert) {
      int first = starts[expert];
      const int end = starts[expert + 1];
      if (first == end) continue;
      Segment segment{expert, 0, 0, 0, {nullptr}};
      if (!call.arrive || call.words[expert] >> 56 < layers.kernels_.size()) find_version_of(segment);
      pending |= !segment.version.base;
      for (; first < end; first += most) {
        segment.first = first;
        segment.count = std::min(most, end - first);
        segments.push_back(segment);
      }
    }
  }

  // After `arrive`.
  void find_arrived() {
    for (Segment& segment : segments)
      if (!segment.version.base) find_version_of(segment);
    pending = false;
  }

  void find_version_of(Segment& segment) const {
    const std::uint64_t word = call.words[segment.expert];
    segment.version = find_version(word);
    segment.kernel = static_cast<int>(word >> 56);
    if (!segment.version.base)
      throw std::out_of_range("the handle of expert " + std::to_string(segment.expert) + " points nowhere");
  }

  // Where the version behind a handle word (core.py) lies; null where it points out of the arena or the format table.
  Tiles find_version(std::uint64_t word) const {
    if (word >> 56 >= layers.kernels_.size()) return {nullptr};
    const Kernel& kernel = layers.kernels_[word >> 56];
    const std::size_t first = static_cast<std::size_t>(word >> 28 & kBlockMask) << kBlockShift;
    const std::size_t second = static_cast<std::size_t>(word & kBlockMask) << kBlockShift;
    const bool nested = kernel.base.last_byte > 0;
    if (first + (nested ? kernel.base : kernel.own).last_byte > layers.arena_bytes_) return {nullptr};
    if (!nested) return {layers.arena_ + first};
    if (second + kernel.own.last_byte > layers.arena_bytes_) return {nullptr};
    return {layers.arena_ + first, layers.arena_ + second};
  }

  // Tiles of section `which` from row `first` on.
  Tiles tiles_at(const Segment& segment, int which, int first) const {
    const Kernel& kernel = layers.kernels_[segment.kernel];
    const VersionFormat& format = layers.formats_[segment.kernel];
    const auto skip = [&](const Part& part, const std::array<std::size_t, 3>& sections) {
      return sections[which] + (which == 2 ? part.down_tile : part.gate_tile) * (first / kTileRows);
    };
    if (!segment.version.rest) return {segment.version.base + skip(kernel.own, format.sections)};
    return {segment.version.base + skip(kernel.base, format.base_sections),
            segment.version.rest + skip(kernel.own, format.sections)};
  }

  int most_pairs() const {
    return static_cast<int>(std::max<std::size_t>(kBlockTokens, kWaveBytes / layers.inner_stride_));
  }

  // Lays the scratch memory out: hidden as floats, its rows by precision, inner rows, sums.
  void take_scratch() {
    const std::size_t tokens = call.tokens, width = layers.hidden_;
    const bool converted = call.number != Number::Float32;
    std::size_t size = converted ? 2 * align(tokens * width * sizeof(float)) : 0;
    std::vector<std::size_t> offsets(layers.kernels_.size(), SIZE_MAX);
    const auto lay_out = [&](std::size_t kernel) {
      std::size_t& offset = offsets[kernel];
      if (offset != SIZE_MAX) return;
      for (std::size_t other = 0; other < offsets.size(); ++other)
        if (offsets[other] != SIZE_MAX &&
            layers.kernels_[other].hidden_rows.same_as(layers.kernels_[kernel].hidden_rows))
          offset = offsets[other];
      if (offset != SIZE_MAX) return;
      offset = size;
      size += tokens * layers.kernels_[kernel].hidden_rows.stride();
    };
    for (std::size_t kernel = 0; pending && kernel < offsets.size(); ++kernel) lay_out(kernel);
    for (const Segment& segment : segments) lay_out(segment.kernel);
    const std::size_t inner_offset = size;
    size += std::min<std::size_t>(pairs.size(), most_pairs()) * layers.inner_stride_;
    std::uint8_t* memory = Scratch::of_thread().take(size);
    hidden_rows.resize(offsets.size(), nullptr);
    for (std::size_t kernel = 0; kernel < offsets.size(); ++kernel)
      if (offsets[kernel] != SIZE_MAX) hidden_rows[kernel] = memory + offsets[kernel];
    inner = memory + inner_offset;
    auto* floats = reinterpret_cast<float*>(memory);
    hidden = converted ? floats : static_cast<const float*>(call.hidden);
    out = converted ? floats + align(tokens * width * sizeof(float)) / sizeof(float) : static_cast<float*>(call.out);
  }

  void round_hidden(int first, int last) {
    const int width = layers.hidden_;
    for (int token = first; token < last; ++token) {
      const std::size_t at = static_cast<std::size_t>(token) * width;
      if (call.number != Number::Float32)
        load_numbers(call.number, call.hidden, at, width, const_cast<float*>(hidden) + at);
      for (std::size_t kernel = 0; kernel < hidden_rows.size(); ++kernel) {
        bool done = hidden_rows[kernel] == nullptr;
        for (std::size_t other = 0; other < kernel; ++other) done |= hidden_rows[other] == hidden_rows[kernel];
        if (!done)
          layers.kernels_[kernel].hidden_rows.fill(layers.tiles_, hidden_rows[kernel], token, hidden + at, 0, width);
      }
    }
  }

  // Rows [first, first + rows) of gate and up for a segment, through the activation, into its inner rows.
  void compute_inner(const Segment& segment, int inner_first, int first, int rows) {
    const Kernel& kernel = layers.kernels_[segment.kernel];
    const Tiles gate_tiles = tiles_at(segment, 0, first), up_tiles = tiles_at(segment, 1, first);
    alignas(kAlignment) float gate[kRowFloats], up[kRowFloats];
    Row block[kBlockTokens];
    for (int start = 0; start < segment.count; start += kBlockTokens) {
      const int count = std::min(kBlockTokens, segment.count - start);
      for (int i = 0; i < count; ++i) {
        const int token = pairs[segment.first + start + i] / call.top_k;
        block[i] = kernel.hidden_rows.at(hidden_rows[segment.kernel], token);
      }
      const int tiles = rows / kTileRows;
      kernel.multiply(gate_tiles, tiles, layers.hidden_, block, count, gate, rows);
      kernel.multiply(up_tiles, tiles, layers.hidden_, block, count, up, rows);
      add_gate_bias(segment.expert, first, rows, count, gate, up);
      layers.tiles_.apply_gate(call.gate->function, gate, up, count * rows);
      for (int i = 0; i < count; ++i)
        kernel.inner_rows.fill(layers.tiles_, inner + (inner_first + start + i) * layers.inner_stride_, 0,
                               gate + i * rows, first, rows);
    }
  }

  void add_gate_bias(int expert, int first, int rows, int count, float* gate, float* up) const {
    if (!call.gate->gate_up_bias) return;
    const std::size_t width = layers.intermediate_;
    const float* bias = call.gate->gate_up_bias + expert * 2 * width;
    const std::size_t step = call.gate->interleaved ? 2 : 1, second = call.gate->interleaved ? 1 : width;
    for (int i = 0; i < count; ++i)
      for (int row = 0; row < rows; ++row) {
        gate[i * rows + row] += bias[(first + row) * step];
        up[i * rows + row] += bias[(first + row) * step + second];
      }
  }

  // Rows [first, first + rows) of the outputs, summed over the segments in order of their experts.
  void compute_outputs(const Segment* begin, const Segment* end, int first, int rows) {
    alignas(kAlignment) float result[kRowFloats];
    Row block[kBlockTokens];
    const std::size_t width = layers.hidden_;
    for (const Segment* segment = begin; segment != end; ++segment) {
      const Kernel& kernel = layers.kernels_[segment->kernel];
      const Tiles down = tiles_at(*segment, 2, first);
      for (int start = 0; start < segment->count; start += kBlockTokens) {
        const int count = std::min(kBlockTokens, segment->count - start);
        const std::size_t at = segment->first + start - begin->first;
        for (int i = 0; i < count; ++i) block[i] = kernel.inner_rows.at(inner + (at + i) * layers.inner_stride_, 0);
        kernel.multiply_down(down, rows / kTileRows, layers.intermediate_, block, count, result, rows);
        for (int i = 0; i < count; ++i) {
          const int pair = pairs[segment->first + start + i];
          float* sums = out + pair / call.top_k * width + first;
          if (call.gate->down_bias)
            layers.tiles_.accumulate(result + i * rows, call.gate->down_bias + segment->expert * width + first, 1.0f,
                                     rows);
          layers.tiles_.accumulate(sums, result + i * rows, call.weights[pair], rows);
        }
      }
    }
  }

  // Gate and up of the experts that are there, while the others arrive; then of those.
  void compute_waiting(Segment* begin, Segment* end, int inner_rows, Phase& rounding, Phase& inner, int threads) {
    const int chunks = (layers.intermediate_ + inner_rows - 1) / inner_rows;
    std::vector<const Segment*> ready, rest;
    for (const Segment* segment = begin; segment != end; ++segment)
      (segment->version.base ? ready : rest).push_back(segment);
    const auto compute = [&](const std::vector<const Segment*>& some) {
      inner.reset(static_cast<int>(some.size()) * chunks, threads);
      auto work = [&] {
        rounding.work([&](int unit) { round_unit(unit); });
        inner.work([&](int unit) {
          compute_chunk(*some[unit / chunks], begin->first, unit % chunks * inner_rows, inner_rows);
        });
      };
      run_team(threads, work);
      rounding.reset(0, threads);
    };
    compute(ready);
    (*call.arrive)();
    find_arrived();
    compute(rest);
  }

  void round_unit(int unit) {
    round_hidden(unit * kTokensAtOnce, std::min((unit + 1) * kTokensAtOnce, call.tokens));
  }

  void compute_chunk(const Segment& segment, int wave_first, int first, int rows) {
    compute_inner(segment, segment.first - wave_first, first, std::min(rows, layers.intermediate_ - first));
  }

  void clear_outputs(int first, int rows) {
    for (int token = 0; token < call.tokens; ++token)
      std::memset(out + static_cast<std::size_t>(token) * layers.hidden_ + first, 0, rows * sizeof(float));
  }

  void store_outputs(int first, int rows) {
    if (call.number == Number::Float32) return;
    for (int token = 0; token < call.tokens; ++token) {
      const std::size_t at = static_cast<std::size_t>(token) * layers.hidden_ + first;
      store_numbers(call.number, out + at, rows, call.out, at);
    }
  }
};

void ExpertLayers::forward(const LayerCall& call, int threads) const {
  Run run(*this, call);
  run.take_scratch();
  Phase rounding, inner, outputs;
  const bool together = call.tokens > kAlone;
  if (!together) run.round_hidden(0, call.tokens);
  rounding.reset(together ? (call.tokens + kTokensAtOnce - 1) / kTokensAtOnce : 0, threads);
  int longest = 0;
  for (const Segment& segment : run.segments) longest = std::max(longest, segment.count);
  const int inner_rows = rows_per_unit(intermediate_, unit_, longest, 1);
  const int output_rows = rows_per_unit(hidden_, kTileRows, longest, threads);
  const int inner_chunks = (intermediate_ + inner_rows - 1) / inner_rows;
  const std::size_t most = run.most_pairs();
  Segment *begin = run.segments.data(), *last = begin + run.segments.size();
  do {  // a wave: as many segments as its inner rows have room for; without tokens, one empty wave
    Segment* end = begin;
    for (std::size_t room = most; end != last && static_cast<std::size_t>(end->count) <= room; ++end) room -= end->count;
    const bool waits = run.pending;
    if (waits) run.compute_waiting(begin, end, inner_rows, rounding, inner, threads);
    inner.reset(waits ? 0 : static_cast<int>(end - begin) * inner_chunks, threads);
    outputs.reset((hidden_ + output_rows - 1) / output_rows, threads);
    auto work = [&, begin, end] {
      rounding.work([&](int unit) { run.round_unit(unit); });
      inner.work([&](int unit) {
        run.compute_chunk(begin[unit / inner_chunks], begin->first, unit % inner_chunks * inner_rows, inner_rows);
      });
      outputs.work([&](int unit) {
        const int first = unit * output_rows, rows = std::min(output_rows, hidden_ - first);
        if (begin == run.segments.data()) run.clear_outputs(first, rows);
        run.compute_outputs(begin, end, first, rows);
        if (end == last) run.store_outputs(first, rows);
      });
    };
    run_team(threads, work);
    rounding.reset(0, threads);
    begin = end;
  } while (begin != last);
}

}  // namespace dynaexq
