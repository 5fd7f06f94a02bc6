// The kernels, written once over the vector type A of an instruction set: A is the only thing that differs.
// Every number of a token's result is computed in an order that the other tokens have no influence on.
#pragma once
#include <cstring>

#include "tiles.hpp"

namespace dynaexq {
namespace {

constexpr int kPrefetchBytes = 2048;
constexpr float kTiny = 1e-30f;

// Bytes of a group of 8 rows: in the version's own or its base's tiles, and of what a nested format adds.
template <int BITS, int GROUP>
constexpr int group_bytes() {
  return GROUP * BITS + (BITS == 8 ? 16 : 32);
}
template <int BITS, int GROUP, int REST, int TOKENS>
inline void prefetch_group(Tiles tiles) {
  if constexpr (TOKENS <= 4) {
    for (int at = 0; at < group_bytes<BITS, GROUP>(); at += 64) __builtin_prefetch(tiles.base + kPrefetchBytes + at, 0, 0);
    for (int at = 0; at < GROUP * REST; at += 64) __builtin_prefetch(tiles.rest + kPrefetchBytes + at, 0, 0);
  }
}

template <int BITS, int GROUP, int REST>
inline void next_group(Tiles& tiles) {
  tiles.base += group_bytes<BITS, GROUP>();
  tiles.rest += GROUP * REST;
}

// Codes of a group, vector by vector: kPlanes planes of 8 rows x 4 inputs each, unsigned bytes. Codes of 3 bits are
// two vectors, lower and upper bits; nested ones have their lower bits in the other tiles.
template <class A, int BITS, int GROUP, int REST>
struct CodeVectors {
  static constexpr int kPlanes = BITS == 3 ? 4 : 8 / BITS, kInputs = 4 * kPlanes;
  static constexpr int kShift = REST / 2;  // formats/nested.py

  static void load(Tiles group, int vector, typename A::B* plane) {
    const typename A::B packed = A::load_bytes(group.base + vector * 32);
    if constexpr (BITS == 3) {
      const typename A::B upper = A::load_bytes(group.base + GROUP * 2 + vector / 2 * 32);
#pragma GCC unroll 8
      for (int p = 0; p < kPlanes; ++p) {
        const typename A::B bit =
            vector % 2 ? A::template plane<1>(upper, kPlanes + p) : A::template plane<1>(upper, p);
        plane[p] = A::plus(A::template plane<2>(packed, p), A::template raise<2>(bit));
      }
    } else if constexpr (REST) {
      static_assert(REST == BITS);
      const typename A::B rest = A::load_bytes(group.rest + vector * 32);
#pragma GCC unroll 8
      for (int p = 0; p < kPlanes; ++p)
        plane[p] = A::plus(A::template raise<kShift>(A::template plane<BITS>(packed, p)), A::template plane<REST>(rest, p));
    } else {
#pragma GCC unroll 8
      for (int p = 0; p < kPlanes; ++p) plane[p] = A::template plane<BITS>(packed, p);
    }
  }

  // The same for floats: input 4 * (j % kPlanes) + j / kPlanes of a vector.
  struct Lanes {
    decltype(A::load_lanes(nullptr)) packed, more;
  };
  static Lanes load_lanes(Tiles group, int vector) {
    const auto packed = A::load_lanes(group.base + vector * 32);
    if constexpr (BITS == 3) return {packed, A::load_lanes(group.base + GROUP * 2 + vector / 2 * 32)};
    if constexpr (REST > 0) return {packed, A::load_lanes(group.rest + vector * 32)};
    return {packed, packed};
  }
  static typename A::F code(const Lanes& lanes, int vector, int j) {
    if constexpr (BITS == 3)
      return A::fma(A::template code<1>(lanes.more, j / kPlanes * 8 + vector % 2 * kPlanes + j % kPlanes),
                    A::broadcast(4.0f), A::template code<2>(lanes.packed, j));
    else if constexpr (REST > 0)
      return A::fma(A::template code<BITS>(lanes.packed, j), A::broadcast(static_cast<float>(1 << kShift)),
                    A::template code<REST>(lanes.more, j));
    else
      return A::template code<BITS>(lanes.packed, j);
  }

  // Scale and offset of a group, for codes from which `shift` was taken.
  static typename A::F scale(Tiles group) {
    const typename A::F stored = A::load_half(group.base + GROUP * BITS);
    if constexpr (REST == 0) return stored;
    return A::mul(stored, A::broadcast(1.0f / (1 << kShift)));
  }
  static typename A::F offset(Tiles group, typename A::F scale, float shift = 0) {
    const typename A::F stored = A::load_half(group.base + GROUP * BITS + 16);
    if constexpr (REST == 0) return stored;
    return A::fma(scale, A::broadcast(shift - ((1 << REST) - 1) / 2.0f), stored);
  }
};

// Adds weight scale * activation scale * dot to each token's accumulator.
template <class A, int TOKENS>
inline void add_dots(typename A::F* acc, const typename A::I* dots, typename A::F scale, const Row* rows, int group) {
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t)
    acc[t] = A::fma(A::to_float(dots[t]), A::mul(scale, A::broadcast(rows[t].scale[group])), acc[t]);
}

// Adds weight offset * sum of the group's activations.
template <class A, int TOKENS>
inline void add_offset(typename A::F* acc, typename A::F offset, const Row* rows, int group) {
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t) acc[t] = A::fma(offset, A::broadcast(rows[t].sum[group]), acc[t]);
}

// Sum of the products of planes [FIRST, FIRST + COUNT), added up in pairs to keep chains of additions short.
template <class A, int FIRST, int COUNT>
inline typename A::P pair_planes(const typename A::B* plane, const std::int8_t* values) {
  if constexpr (COUNT == 1)
    return A::product(plane[FIRST], A::broadcast4(values + 4 * FIRST));
  else
    return A::add_partials(pair_planes<A, FIRST, COUNT / 2>(plane, values),
                           pair_planes<A, FIRST + COUNT / 2, COUNT / 2>(plane, values));
}

// Adds the products of all planes of a vector to partial sums.
template <class A, int PLANES>
inline typename A::P add_planes(typename A::P sums, const typename A::B* plane, const std::int8_t* values) {
  if constexpr (A::kNarrowPartials) {
    return A::add_partials(sums, pair_planes<A, 0, PLANES>(plane, values));
  } else {
#pragma GCC unroll 8
    for (int p = 0; p < PLANES; ++p) sums = A::dot(sums, plane[p], A::broadcast4(values + 4 * p));
    return sums;
  }
}

// One tile against Int8 activations: unsigned codes times signed bytes, exact in integers within an activation group.
template <class A, int BITS, int GROUP, int REST, int TOKENS>
inline void tile_int8(Tiles tiles, int columns, const Row* rows, typename A::F* acc) {
  using C = CodeVectors<A, BITS, GROUP, REST>;
  constexpr int kShared = activation_group(REST ? WeightFormat{REST, GROUP, BITS} : WeightFormat{BITS, GROUP});
  constexpr int kParts = GROUP / kShared, kVectors = kShared / C::kInputs;
  // 16-bit partial sums hold so many products before they must be widened
  constexpr int kSafe =
      A::kNarrowPartials ? 32767 / (2 * 127 * ((1 << (BITS + REST)) - 1)) / C::kPlanes : kVectors;
  static_assert(kVectors >= 1 && kVectors <= kSafe);
  for (int t = 0; t < TOKENS; ++t) acc[t] = A::zero();
  const int groups = columns / GROUP;
  for (int g = 0; g < groups; ++g, next_group<BITS, GROUP, REST>(tiles)) {
    prefetch_group<BITS, GROUP, REST, TOKENS>(tiles);
    const typename A::F scale = C::scale(tiles);
    for (int part = 0; part < kParts; ++part) {
      typename A::P partial[TOKENS];
      for (int t = 0; t < TOKENS; ++t) partial[t] = A::zero_partial();
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const int vector = part * kVectors + v;
        typename A::B plane[C::kPlanes];
        C::load(tiles, vector, plane);
        const int k = g * GROUP + vector * C::kInputs;
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t) {
          const auto* values = static_cast<const std::int8_t*>(rows[t].values) + k;
          partial[t] = add_planes<A, C::kPlanes>(partial[t], plane, values);
          A::keep(partial[t]);
        }
      }
      typename A::I dots[TOKENS];
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; ++t) dots[t] = A::widen(partial[t]);
      add_dots<A, TOKENS>(acc, dots, scale, rows, g * kParts + part);
    }
    add_offset<A, TOKENS>(acc, C::offset(tiles, scale), rows, g);
  }
}

// One tile of 8-bit weights against Int16 activations, exact in integers within a group: signed codes with a scale, or
// nested ones, from which half of their range is taken to make them signed.
template <class A, int BITS, int GROUP, int REST, int TOKENS>
inline void tile_int16(Tiles tiles, int columns, const Row* rows, typename A::F* acc) {
  using C = CodeVectors<A, BITS, GROUP, REST>;
  for (int t = 0; t < TOKENS; ++t) acc[t] = A::zero();
  const int groups = columns / GROUP;
  for (int g = 0; g < groups; ++g, next_group<BITS, GROUP, REST>(tiles)) {
    prefetch_group<BITS, GROUP, REST, TOKENS>(tiles);
    typename A::W wide[TOKENS];
    for (int t = 0; t < TOKENS; ++t) wide[t] = A::zero_wide();
#pragma GCC unroll 4
    for (int v = 0; v < GROUP / C::kInputs; ++v) {
      typename A::B plane[C::kPlanes];
      if constexpr (REST > 0) C::load(tiles, v, plane);
#pragma GCC unroll 2
      for (int p = 0; p < C::kPlanes; ++p) {
        const auto codes = [&] {
          if constexpr (REST > 0) return A::spread(plane[p]);
          else return A::load_wide(tiles.base + v * 32);
        }();
        const int k = g * GROUP + v * C::kInputs + 4 * p;
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t) {
          const auto* values = static_cast<const std::int16_t*>(rows[t].values) + k;
          wide[t] = A::dot_wide(wide[t], codes, values);
          A::keep_wide(wide[t]);
        }
      }
    }
    typename A::I dots[TOKENS];
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) dots[t] = A::fold(wide[t]);
    const typename A::F scale = C::scale(tiles);
    add_dots<A, TOKENS>(acc, dots, scale, rows, g);
    if constexpr (REST > 0) add_offset<A, TOKENS>(acc, C::offset(tiles, scale, 128), rows, g);
  }
}

// One tile of codes against float activations: two chains of sums, even and odd inputs of a vector.
template <class A, int BITS, int GROUP, int REST, int TOKENS>
inline void tile_float(Tiles tiles, int columns, const Row* rows, typename A::F* acc) {
  using C = CodeVectors<A, BITS, GROUP, REST>;
  for (int t = 0; t < TOKENS; ++t) acc[t] = A::zero();
  const int groups = columns / GROUP;
  for (int g = 0; g < groups; ++g, next_group<BITS, GROUP, REST>(tiles)) {
    prefetch_group<BITS, GROUP, REST, TOKENS>(tiles);
    typename A::F even[TOKENS], odd[TOKENS];
    for (int t = 0; t < TOKENS; ++t) even[t] = odd[t] = A::zero();
    for (int v = 0; v < GROUP / C::kInputs; ++v) {
      const auto lanes = C::load_lanes(tiles, v);
      const int k = g * GROUP + v * C::kInputs;
#pragma GCC unroll 32
      for (int j = 0; j < C::kInputs; ++j) {
        const typename A::F code = C::code(lanes, v, j);
        const int input = k + 4 * (j % C::kPlanes) + j / C::kPlanes;
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t) {
          typename A::F& chain = (j & 1) ? odd[t] : even[t];
          chain = A::fma(code, A::broadcast(static_cast<const float*>(rows[t].values)[input]), chain);
        }
      }
    }
    const typename A::F scale = C::scale(tiles);
    for (int t = 0; t < TOKENS; ++t) acc[t] = A::fma(A::addf(even[t], odd[t]), scale, acc[t]);
    if constexpr (BITS < 8) add_offset<A, TOKENS>(acc, C::offset(tiles, scale), rows, g);
  }
}

// One bfloat16 tile against float activations: two chains of sums, even and odd columns.
template <class A, int TOKENS>
inline void tile_bf16(const std::uint8_t* weights, int columns, const Row* rows, typename A::F* acc) {
  typename A::F even[TOKENS], odd[TOKENS];
  for (int t = 0; t < TOKENS; ++t) even[t] = odd[t] = A::zero();
  for (int k = 0; k + 1 < columns; k += 2, weights += 32) {
    if (TOKENS <= 2) __builtin_prefetch(weights + kPrefetchBytes, 0, 0);
    const typename A::F first = A::load_bf16(weights), second = A::load_bf16(weights + 16);
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) {
      const auto* values = static_cast<const float*>(rows[t].values) + k;
      even[t] = A::fma(first, A::broadcast(values[0]), even[t]);
      odd[t] = A::fma(second, A::broadcast(values[1]), odd[t]);
    }
  }
  for (int t = 0; t < TOKENS; ++t) {
    if (columns & 1)
      even[t] = A::fma(A::load_bf16(weights),
                       A::broadcast(static_cast<const float*>(rows[t].values)[columns - 1]), even[t]);
    acc[t] = A::addf(even[t], odd[t]);
  }
}

template <class A, int BITS, int GROUP, int REST, Precision P, int TOKENS>
inline void tile(Tiles tiles, int columns, const Row* rows, float* out, std::ptrdiff_t stride) {
  typename A::F acc[TOKENS];
  if constexpr (BITS == 16)
    tile_bf16<A, TOKENS>(tiles.base, columns, rows, acc);
  else if constexpr (P == Precision::Float)
    tile_float<A, BITS, GROUP, REST, TOKENS>(tiles, columns, rows, acc);
  else if constexpr (P == Precision::Int16)
    tile_int16<A, BITS, GROUP, REST, TOKENS>(tiles, columns, rows, acc);
  else
    tile_int8<A, BITS, GROUP, REST, TOKENS>(tiles, columns, rows, acc);
  for (int t = 0; t < TOKENS; ++t) A::store(out + t * stride, acc[t]);
}

template <class A, int BITS, int GROUP, int REST, Precision P>
void multiply(Tiles tiles, int count, int columns, const Row* rows, int tokens, float* out, std::ptrdiff_t stride) {
  constexpr int kTokens = P == Precision::Int8 ? A::kTokensInt8 : A::kTokensOther;
  const std::size_t step = tile_bytes({BITS, GROUP}, columns), rest = REST ? tile_bytes({REST, GROUP, BITS}, columns) : 0;
  for (int r = 0; r < count; ++r, tiles.base += step, tiles.rest += rest, out += kTileRows) {
    int t = 0;
    for (; t + kTokens <= tokens; t += kTokens)
      tile<A, BITS, GROUP, REST, P, kTokens>(tiles, columns, rows + t, out + t * stride, stride);
    if constexpr (kTokens > 4)
      if (tokens - t >= 4) {
        tile<A, BITS, GROUP, REST, P, 4>(tiles, columns, rows + t, out + t * stride, stride);
        t += 4;
      }
    if constexpr (kTokens > 2)
      if (tokens - t >= 2) {
        tile<A, BITS, GROUP, REST, P, 2>(tiles, columns, rows + t, out + t * stride, stride);
        t += 2;
      }
    if constexpr (kTokens > 1)
      if (tokens > t) tile<A, BITS, GROUP, REST, P, 1>(tiles, columns, rows + t, out + t * stride, stride);
  }
}

template <class A, int BITS, int GROUP, int REST = 0>
Multiply pick_precision(Precision precision) {
  constexpr Precision kRounded = BITS + REST == 8 ? Precision::Int16 : Precision::Int8;
  if (precision == Precision::Float) return multiply<A, BITS, GROUP, REST, Precision::Float>;
  return precision == kRounded ? multiply<A, BITS, GROUP, REST, kRounded> : nullptr;
}

template <class A, int GROUP>
Multiply pick_multiply(WeightFormat format, Precision precision) {
  if (format.base_bits == 2 && format.bits == 2) return pick_precision<A, 2, GROUP, 2>(precision);
  if (format.base_bits == 4 && format.bits == 4) return pick_precision<A, 4, GROUP, 4>(precision);
  if (format.base_bits) return nullptr;
  if (format.bits == 8) return pick_precision<A, 8, GROUP>(precision);
  if (format.bits == 4) return pick_precision<A, 4, GROUP>(precision);
  if (format.bits == 3) return pick_precision<A, 3, GROUP>(precision);
  if (format.bits == 2) return pick_precision<A, 2, GROUP>(precision);
  if (format.bits == 1) return pick_precision<A, 1, GROUP>(precision);
  return nullptr;
}

template <class A>
Multiply find_multiply(WeightFormat format, Precision precision) {
  if (format.bits == 16) return precision == Precision::Float ? multiply<A, 16, 0, 0, Precision::Float> : nullptr;
  if (format.group == 32) return pick_multiply<A, 32>(format, precision);
  if (format.group == 64) return pick_multiply<A, 64>(format, precision);
  if (format.group == 128) return pick_multiply<A, 128>(format, precision);
  return nullptr;
}

template <class A>
void quantize(const float* x, int columns, WeightFormat format, Precision precision, void* values, float* scale,
              float* sum) {
  const float steps = precision == Precision::Int8 ? 127.0f : 32767.0f;
  const float nan = __builtin_nanf("");
  const int shared = activation_group(format), parts = format.group / shared;
  for (int g = 0; g < columns / shared; ++g, x += shared) {
    const float largest = A::largest_magnitude(x, shared);  // NaN or inf where a value is
    const bool poisoned = !(largest <= 3.402823466e38f);
    const float inverse = poisoned || largest < kTiny ? 0.0f : steps / largest;
    std::int32_t total;
    if (precision == Precision::Int8)
      total = A::round_int8(x, shared, inverse, static_cast<std::int8_t*>(values) + g * shared);
    else
      total = A::round_int16(x, shared, inverse, static_cast<std::int16_t*>(values) + g * shared);
    scale[g] = poisoned ? nan : inverse == 0.0f ? 0.0f : largest / steps;
    float& whole = sum[g / parts];
    whole = (g % parts ? whole : 0.0f) + (poisoned ? nan : scale[g] * static_cast<float>(total));
  }
}

template <class A>
void sum_groups(const float* x, int columns, int group, float* sum) {
  for (int g = 0; g < columns / group; ++g, x += group) {
    typename A::F total = A::zero();
    for (int i = 0; i < group; i += 8) total = A::addf(total, A::load(x + i));
    sum[g] = A::sum(total);
  }
}

// 2^x for x in -126..128, infinite from 127.5 on: a polynomial of degree 6 on the fraction, relative error below 2e-7.
template <class A>
inline typename A::F power_of_two(typename A::F x) {
  const typename A::F whole = A::round(x), f = A::sub(x, whole);
  typename A::F p = A::broadcast(1.5403530e-4f);
  p = A::fma(p, f, A::broadcast(1.3333558e-3f));
  p = A::fma(p, f, A::broadcast(9.6181291e-3f));
  p = A::fma(p, f, A::broadcast(5.5504109e-2f));
  p = A::fma(p, f, A::broadcast(2.4022651e-1f));
  p = A::fma(p, f, A::broadcast(6.9314718e-1f));
  p = A::fma(p, f, A::broadcast(1.0f));
  return A::scale_exponent(p, whole);
}

// x * sigmoid(alpha * x)
template <class A>
inline typename A::F swish(typename A::F x, float alpha) {
  typename A::F power = A::mul(x, A::broadcast(-1.44269504f * alpha));
  power = A::min(A::max(power, A::broadcast(-126.0f)), A::broadcast(128.0f));  // NaN: the quotient keeps it
  return A::div(x, A::addf(A::broadcast(1.0f), power_of_two<A>(power)));
}

template <class A>
void apply_gate(const Gate& gate, float* gated, const float* up, int count) {
  for (int i = 0; i < count; i += 8) {
    typename A::F g = A::load(gated + i), u = A::load(up + i);
    if (gate.kind == GateKind::ClampedSwiGlu) {
      const typename A::F limit = A::broadcast(gate.limit);
      g = A::min(limit, g);  // the second operand, the value, survives where it is NaN
      u = A::min(limit, A::max(A::broadcast(-gate.limit), u));
      u = A::addf(u, A::broadcast(1.0f));
    }
    A::store(gated + i, A::mul(swish<A>(g, gate.alpha), u));
  }
}

template <class A>
void accumulate(float* out, const float* x, float weight, int count) {
  const typename A::F factor = A::broadcast(weight);
  for (int i = 0; i < count; i += 8) A::store(out + i, A::fma(A::load(x + i), factor, A::load(out + i)));
}

template <class A>
void normalize(const float* x, const float* weight, float epsilon, int count, float* out) {
  typename A::F squares[2] = {A::zero(), A::zero()};
  for (int i = 0; i < count; i += 8) {
    const typename A::F value = A::load(x + i);
    squares[i / 8 % 2] = A::fma(value, value, squares[i / 8 % 2]);
  }
  const float mean = A::sum(A::addf(squares[0], squares[1])) / static_cast<float>(count);
  const typename A::F factor = A::broadcast(1.0f / __builtin_sqrtf(mean + epsilon));
  for (int i = 0; i < count; i += 8)
    A::store(out + i, A::mul(A::load(weight + i), A::mul(A::load(x + i), factor)));
}

// scores[t] = e^(scores[t] - the largest); returns their sum.
template <class A>
float exponentiate(float* scores, int tokens) {
  float largest = scores[0];
  for (int t = 1; t < tokens; ++t) largest = scores[t] > largest ? scores[t] : largest;
  for (int t = tokens; t % 8; ++t) scores[t] = largest;
  typename A::F total = A::zero();
  for (int t = 0; t < tokens; t += 8) {
    const typename A::F x = A::sub(A::load(scores + t), A::broadcast(largest));
    const typename A::F bounded = A::max(A::mul(x, A::broadcast(1.44269504f)), A::broadcast(-126.0f));
    const typename A::F power = A::addf(power_of_two<A>(bounded), A::sub(x, x));  // NaN where x is not finite
    A::store(scores + t, power);
    total = A::addf(total, power);
  }
  const int padding = -tokens & 7;
  return A::sum(total) - static_cast<float>(padding);
}

// Eight numbers of a row of keys or values, from number `at` on.
template <class A, KvFormat KV>
typename A::F load_kept(const void* rows, std::ptrdiff_t at) {
  const auto* bytes = static_cast<const std::uint8_t*>(rows);
  if constexpr (KV == KvFormat::Float32) return A::load(static_cast<const float*>(rows) + at);
  if constexpr (KV == KvFormat::Float16) return A::load_half(bytes + 2 * at);
  if constexpr (KV == KvFormat::BFloat16) return A::load_bf16(bytes + 2 * at);
  if constexpr (KV == KvFormat::Int8) return A::load_int8(bytes + at);
}

template <class A, KvFormat KV, int QUERIES>
void attend_together(const AttendCall& call) {
  constexpr int kWide = 2;  // vectors of the output at a time
  const int width = call.width;
  float shares[QUERIES];
  for (int t = 0; t < call.tokens; ++t) {
    const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(t) * width;
    typename A::F sums[QUERIES];
    for (int q = 0; q < QUERIES; ++q) sums[q] = A::zero();
    for (int i = 0; i < width; i += 8) {
      const typename A::F part = load_kept<A, KV>(call.keys, row + i);
      for (int q = 0; q < QUERIES; ++q) sums[q] = A::fma(A::load(call.query + q * width + i), part, sums[q]);
    }
    const float scaling = KV == KvFormat::Int8 ? call.scaling * call.key_scales[t] : call.scaling;
    for (int q = 0; q < QUERIES; ++q) call.scores[q * call.scores_stride + t] = scaling * A::sum(sums[q]);
  }
  for (int q = 0; q < QUERIES; ++q) {
    float* scores = call.scores + q * call.scores_stride;
    shares[q] = 1.0f / exponentiate<A>(scores, call.tokens);
    if (KV == KvFormat::Int8)
      for (int t = 0; t < call.tokens; ++t) scores[t] *= call.value_scales[t];
  }
  for (int i = 0; i < width; i += 8 * kWide) {
    typename A::F sums[QUERIES][kWide];
    for (int q = 0; q < QUERIES; ++q)
      for (int v = 0; v < kWide; ++v) sums[q][v] = A::zero();
    for (int t = 0; t < call.tokens; ++t) {
      typename A::F value[kWide];
      for (int v = 0; v < kWide; ++v)
        value[v] = load_kept<A, KV>(call.values, static_cast<std::ptrdiff_t>(t) * width + i + 8 * v);
      for (int q = 0; q < QUERIES; ++q) {
        const typename A::F weight = A::broadcast(call.scores[q * call.scores_stride + t]);
        for (int v = 0; v < kWide; ++v) sums[q][v] = A::fma(weight, value[v], sums[q][v]);
      }
    }
    for (int q = 0; q < QUERIES; ++q)
      for (int v = 0; v < kWide; ++v)
        A::store(call.out + q * width + i + 8 * v, A::mul(sums[q][v], A::broadcast(shares[q])));
  }
}

template <class A, KvFormat KV>
void attend_over(const AttendCall& call) {
  static_assert(kQueriesAtOnce == 4, "one case for each count");
  switch (call.queries) {
    case 1: return attend_together<A, KV, 1>(call);
    case 2: return attend_together<A, KV, 2>(call);
    case 3: return attend_together<A, KV, 3>(call);
    default: return attend_together<A, KV, 4>(call);
  }
}

template <class A>
void attend(const AttendCall& call) {
  switch (call.format) {
    case KvFormat::Float32: return attend_over<A, KvFormat::Float32>(call);
    case KvFormat::Float16: return attend_over<A, KvFormat::Float16>(call);
    case KvFormat::BFloat16: return attend_over<A, KvFormat::BFloat16>(call);
    case KvFormat::Int8: return attend_over<A, KvFormat::Int8>(call);
  }
}

template <class A>
constexpr TileSet make_tiles(const char* name) {
  return {name, find_multiply<A>, quantize<A>, sum_groups<A>, apply_gate<A>, accumulate<A>, attend<A>, normalize<A>};
}

}  // namespace
}  // namespace dynaexq
