// Python's view of the kernels. Tensors come as addresses: their conversion would cost as much as a small layer.
// Callers (kernels/native.py, kernels/dense.py) answer for shapes, element types and lifetimes.
#include "bindings.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../team.hpp"
#include "decoder.hpp"
#include "experts.hpp"
#include "linear.hpp"
#include "model.hpp"

namespace nb = nanobind;

namespace dynaexq {
namespace {

using Address = std::uintptr_t;
using Words = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sections = std::array<std::size_t, 3>;                        // gate, up, down
// Bits, group, bits of the base, own and base sections, bits of down.
using FormatTuple = std::tuple<int, int, int, Sections, Sections, int>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

Number number_of(bool bfloat16) { return bfloat16 ? Number::BFloat16 : Number::Float32; }

const TileSet& find_tiles(const std::string& name) {
  for (const TileSet* const* set = available_tiles(); *set; ++set)
    if (name == (*set)->name) return **set;
  throw std::invalid_argument("no kernels for '" + name + "' on this processor");
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const TileSet* const* set = available_tiles(); *set; ++set) names.emplace_back((*set)->name);
  return names;
}

ExpertLayers make_layers(Address arena, std::size_t arena_bytes, int experts, int hidden, int intermediate,
                         const std::vector<FormatTuple>& formats, bool exact, const std::string& instructions) {
  std::vector<VersionFormat> versions;
  for (const auto& [bits, group, base_bits, sections, base_sections, down_bits] : formats)
    versions.push_back({{bits, group, base_bits}, sections, base_sections, down_bits});
  return ExpertLayers(at<const std::uint8_t>(arena), arena_bytes, experts, hidden, intermediate, std::move(versions),
                      exact, find_tiles(instructions));
}

LayerGate make_gate(bool clamped, float alpha, float limit, bool interleaved, Address gate_up_bias,
                    Address down_bias) {
  const GateKind kind = clamped ? GateKind::ClampedSwiGlu : GateKind::SwiGlu;
  return {{kind, alpha, limit}, interleaved, at<const float>(gate_up_bias), at<const float>(down_bias)};
}

// Python's `function(layer)`, called without the lock that it needs; nothing for None.
std::function<void()> make_callback(const nb::object& function, std::size_t layer) {
  if (function.is_none()) return {};
  return [&function, layer] {
    nb::gil_scoped_acquire locked;
    function(layer);
  };
}

void forward_experts(const ExpertLayers& layers, const LayerGate& gate, Words words, bool bfloat16, Address hidden,
                     Address ids, Address weights, int tokens, int top_k, Address out, int threads,
                     nb::object arrive) {
  std::function<void()> arrival;
  if (!arrive.is_none())
    arrival = [&arrive] {
      nb::gil_scoped_acquire locked;
      arrive();
    };
  const LayerCall call{number_of(bfloat16), at<const void>(hidden), at<const std::int64_t>(ids),
                       at<const float>(weights), tokens, top_k, words.data(), &gate, at<void>(out),
                       arrival ? &arrival : nullptr};
  nb::gil_scoped_release unlocked;
  layers.forward(call, threads);
}

Norm make_norm(const std::tuple<Address, float>& norm) {
  return {at<const float>(std::get<0>(norm)), std::get<1>(norm)};
}

using NormTuple = std::tuple<Address, float>;                       // weight (0: none), epsilon
using ProjectionTuple = std::tuple<const PackedLinear*, Address>;  // matrix, bias (0: none)

using EmbeddingTuple = std::tuple<Address, Address, int, int>;      // values, scale, group (0: bfloat16), rows

Projection make_projection(const ProjectionTuple& projection) {
  return {std::get<0>(projection), at<const float>(std::get<1>(projection))};
}

// cosine and sine of all positions; positions, slots and pasts of `count` sequences (int32)
using SequencesTuple = std::tuple<Address, Address, Address, Address, Address, int>;
// keys, values, slot and head stride, format (of KvFormat), scales of keys and of values
using CacheTuple = std::tuple<Address, Address, std::ptrdiff_t, std::ptrdiff_t, int, Address, Address>;

Sequences make_sequences(const SequencesTuple& sequences) {
  const auto& [cosine, sine, positions, slots, pasts, count] = sequences;
  return {at<const float>(cosine),       at<const float>(sine), at<const std::int32_t>(positions),
          at<const std::int32_t>(slots), at<const std::int32_t>(pasts), count};
}

LayerStep make_step(const CacheTuple& cache, const Words& words, std::int64_t* ids, float* weights) {
  const auto& [keys, values, slot_stride, head_stride, format, key_scales, value_scales] = cache;
  if (format < 0 || format > static_cast<int>(KvFormat::Int8)) throw std::invalid_argument("unknown format of a cache");
  return {{at<void>(keys), at<void>(values), slot_stride, head_stride, static_cast<KvFormat>(format),
           at<float>(key_scales), at<float>(value_scales)},
          words.data(), ids, weights, {}, {}, nullptr};
}


void step_layer(const DecoderLayer& layer, const SequencesTuple& sequences, const CacheTuple& cache, Words words,
                Address hidden, Address ids, Address weights, Address out, int threads, nb::object routed,
                nb::object arrive) {
  LayerStep step = make_step(cache, words, at<std::int64_t>(ids), at<float>(weights));
  step.routed = make_callback(routed, 0);
  step.arrive = make_callback(arrive, 0);
  const Sequences call = make_sequences(sequences);
  nb::gil_scoped_release unlocked;
  layer.step(call, step, at<const float>(hidden), at<float>(out), threads);
}

void step_model(const DecoderModel& model, const SequencesTuple& sequences, const std::vector<CacheTuple>& caches,
                const std::vector<Words>& words, Address tokens, Address ids, Address weights, Address router_rows,
                Address logits, int threads, nb::object routed, nb::object arrive) {
  if (caches.size() != words.size()) throw std::invalid_argument("caches and words are not of one length");
  const Sequences call = make_sequences(sequences);
  const std::ptrdiff_t choices = static_cast<std::ptrdiff_t>(call.count) * model.top_k();
  std::vector<LayerStep> steps;
  for (std::size_t i = 0; i < caches.size(); ++i) {
    steps.push_back(make_step(caches[i], words[i], at<std::int64_t>(ids) + i * choices, at<float>(weights) + i * choices));
    steps.back().routed = make_callback(routed, i);
    steps.back().arrive = make_callback(arrive, i);
    if (router_rows) steps.back().router_rows = at<float>(router_rows) + i * call.count * model.hidden();
  }
  nb::gil_scoped_release unlocked;
  model.step(call, at<const std::int64_t>(tokens), steps, at<float>(logits), threads);
}

PackedLinear make_linear(Address weights, std::size_t nbytes, int bits, int group, int rows, int columns, bool exact,
                         const std::string& instructions) {
  return PackedLinear(at<const std::uint8_t>(weights), nbytes, {bits, group}, rows, columns, exact,
                      find_tiles(instructions));
}

void forward_linear(const PackedLinear& linear, bool bfloat16, Address x, int tokens, Address bias, Address out,
                    int threads) {
  nb::gil_scoped_release unlocked;
  linear.forward(number_of(bfloat16), at<const void>(x), tokens, at<const float>(bias), at<void>(out), threads);
}

void normalize(Address x, Address weight, float epsilon, int rows, int width, Address out, int threads) {
  if (width < 8 || width % 8) throw std::invalid_argument("rows of " + std::to_string(width) + " numbers, not of eights");
  nb::gil_scoped_release unlocked;
  normalize_rows(at<const float>(x), at<const float>(weight), epsilon, rows, width, at<float>(out), threads,
                 **available_tiles());
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("instruction_sets", &instruction_sets);
  m.def("team_kind", &team_kind);
  m.def("normalize_rows", &normalize, nb::arg("x"), nb::arg("weight"), nb::arg("epsilon"), nb::arg("rows"),
        nb::arg("width"), nb::arg("out"), nb::arg("threads"));

  nb::class_<LayerGate>(m, "LayerGate")
      .def("__init__",
           [](LayerGate* self, bool clamped, float alpha, float limit, bool interleaved, Address gate_up_bias,
              Address down_bias) {
             new (self) LayerGate(make_gate(clamped, alpha, limit, interleaved, gate_up_bias, down_bias));
           },
           nb::arg("clamped"), nb::arg("alpha"), nb::arg("limit"), nb::arg("interleaved"), nb::arg("gate_up_bias"),
           nb::arg("down_bias"));

  nb::class_<ExpertLayers>(m, "ExpertLayers")
      .def("__init__",
           [](ExpertLayers* self, Address arena, std::size_t arena_bytes, int experts, int hidden, int intermediate,
              const std::vector<FormatTuple>& formats, bool exact, const std::string& instructions) {
             new (self) ExpertLayers(
                 make_layers(arena, arena_bytes, experts, hidden, intermediate, formats, exact, instructions));
           },
           nb::arg("arena"), nb::arg("arena_bytes"), nb::arg("experts"), nb::arg("hidden"), nb::arg("intermediate"),
           nb::arg("formats"), nb::arg("exact"), nb::arg("instructions"))
      .def("forward", &forward_experts, nb::arg("gate"), nb::arg("words"), nb::arg("bfloat16"), nb::arg("hidden"),
           nb::arg("ids"), nb::arg("weights"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("out"),
           nb::arg("threads"), nb::arg("arrive").none());

  nb::class_<PackedLinear>(m, "PackedLinear")
      .def("__init__",
           [](PackedLinear* self, Address weights, std::size_t nbytes, int bits, int group, int rows, int columns,
              bool exact, const std::string& instructions) {
             new (self) PackedLinear(make_linear(weights, nbytes, bits, group, rows, columns, exact, instructions));
           },
           nb::arg("weights"), nb::arg("nbytes"), nb::arg("bits"), nb::arg("group"), nb::arg("rows"),
           nb::arg("columns"), nb::arg("exact"), nb::arg("instructions"))
      .def("forward", &forward_linear, nb::arg("bfloat16"), nb::arg("x"), nb::arg("tokens"), nb::arg("bias"),
           nb::arg("out"), nb::arg("threads"));

  nb::class_<DecoderLayer>(m, "DecoderLayer")
      .def("__init__",
           [](DecoderLayer* self, int hidden, NormTuple before_attention, ProjectionTuple query, ProjectionTuple key,
              ProjectionTuple value, ProjectionTuple output, NormTuple query_norm, NormTuple key_norm,
              bool norm_by_head, int heads, int kv_heads, int width, float scaling, NormTuple before_experts,
              ProjectionTuple router, int expert_count, int top_k, bool renormalize, const ExpertLayers& experts,
              const LayerGate& gate) {
             const AttentionParts attention{make_projection(query), make_projection(key), make_projection(value),
                                            make_projection(output), make_norm(query_norm), make_norm(key_norm),
                                            norm_by_head, heads, kv_heads, width, scaling};
             new (self) DecoderLayer(hidden, make_norm(before_attention), attention, make_norm(before_experts),
                                     {make_projection(router), expert_count, top_k, renormalize}, experts, gate,
                                     **available_tiles());
           },
           nb::kw_only(), nb::arg("hidden"), nb::arg("before_attention"), nb::arg("query"), nb::arg("key"),
           nb::arg("value"), nb::arg("output"), nb::arg("query_norm"), nb::arg("key_norm"), nb::arg("norm_by_head"),
           nb::arg("heads"), nb::arg("kv_heads"), nb::arg("width"), nb::arg("scaling"), nb::arg("before_experts"),
           nb::arg("router"), nb::arg("expert_count"), nb::arg("top_k"), nb::arg("renormalize"), nb::arg("experts"),
           nb::arg("gate"))
      .def("step", &step_layer, nb::kw_only(), nb::arg("sequences"), nb::arg("cache"), nb::arg("words"),
           nb::arg("hidden"), nb::arg("ids"), nb::arg("weights"), nb::arg("out"), nb::arg("threads"),
           nb::arg("routed").none(), nb::arg("arrive").none());

  nb::class_<DecoderModel>(m, "DecoderModel")
      .def("__init__",
           [](DecoderModel* self, int hidden, const EmbeddingTuple& embedding, std::vector<const DecoderLayer*> layers,
              NormTuple norm, const ProjectionTuple& head) {
             const auto& [values, scale, group, rows] = embedding;
             new (self) DecoderModel(hidden, {at<const void>(values), at<const std::uint16_t>(scale), group, rows},
                                     std::move(layers), make_norm(norm), make_projection(head), **available_tiles());
           },
           nb::kw_only(), nb::arg("hidden"), nb::arg("embedding"), nb::arg("layers"), nb::arg("norm"), nb::arg("head"))
      .def("step", &step_model, nb::kw_only(), nb::arg("sequences"), nb::arg("caches"), nb::arg("words"),
           nb::arg("tokens"), nb::arg("ids"), nb::arg("weights"), nb::arg("router_rows"), nb::arg("logits"),
           nb::arg("threads"), nb::arg("routed").none(), nb::arg("arrive").none());
}

}  // namespace dynaexq
