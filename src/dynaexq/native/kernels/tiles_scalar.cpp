// Plain C++ for processors without a set of their own, and the yardstick of the others.
#include <cmath>
#include <cstdint>

#include "instruction_sets.hpp"
#include "rows.hpp"
#include "tiles_body.hpp"

namespace dynaexq {
namespace {

template <class T>
struct Lanes {
  T at[8];
};

template <class T, class Function>
inline Lanes<T> each(Function function) {
  Lanes<T> result;
  for (int i = 0; i < 8; ++i) result.at[i] = function(i);
  return result;
}

struct Scalar {
  using F = Lanes<float>;
  using I = Lanes<std::int32_t>;
  using P = I;
  using W = I;
  struct B {
    std::uint8_t at[32];
  };
  static constexpr bool kNarrowPartials = false;
  static constexpr int kTokensInt8 = 1, kTokensOther = 1;  // more would take a minute to compile

  static F zero() { return broadcast(0.0f); }
  static F broadcast(float x) { return each<float>([=](int) { return x; }); }
  static F load(const float* x) { return each<float>([=](int i) { return x[i]; }); }
  static void store(float* out, F x) { std::memcpy(out, x.at, sizeof x.at); }
  static F fma(const F& a, const F& b, const F& c) { return each<float>([&](int i) { return a.at[i] * b.at[i] + c.at[i]; }); }
  static F mul(const F& a, const F& b) { return each<float>([&](int i) { return a.at[i] * b.at[i]; }); }
  static F addf(const F& a, const F& b) { return each<float>([&](int i) { return a.at[i] + b.at[i]; }); }
  static F sub(const F& a, const F& b) { return each<float>([&](int i) { return a.at[i] - b.at[i]; }); }
  static F div(const F& a, const F& b) { return each<float>([&](int i) { return a.at[i] / b.at[i]; }); }
  static F min(const F& a, const F& b) { return each<float>([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; }); }
  static F max(const F& a, const F& b) { return each<float>([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; }); }
  static F round(const F& x) { return each<float>([&](int i) { return std::nearbyint(x.at[i]); }); }
  static F to_float(const I& x) { return each<float>([&](int i) { return static_cast<float>(x.at[i]); }); }
  static F scale_exponent(const F& x, const F& exponent) {
    return each<float>([&](int i) { return x.at[i] * from_bits((static_cast<std::int32_t>(exponent.at[i]) + 127) << 23); });
  }
  static F load_half(const std::uint8_t* x) { return each<float>([=](int i) {
      std::uint16_t half;
      std::memcpy(&half, x + 2 * i, 2);
      return float_of_half(half);
    }); }
  static F load_bf16(const std::uint8_t* x) {
    return each<float>([=](int i) {
      std::uint16_t half;
      std::memcpy(&half, x + 2 * i, 2);
      return from_bits(static_cast<std::int32_t>(static_cast<std::uint32_t>(half) << 16));
    });
  }
  static F load_int8(const std::uint8_t* x) {
    return each<float>([=](int i) { return static_cast<float>(static_cast<std::int8_t>(x[i])); });
  }
  static float sum(const F& x) {
    return ((x.at[0] + x.at[4]) + (x.at[2] + x.at[6])) + ((x.at[1] + x.at[5]) + (x.at[3] + x.at[7]));
  }

  static B load_bytes(const std::uint8_t* x) {
    B result;
    std::memcpy(result.at, x, 32);
    return result;
  }
  template <int BITS>
  static B plane(const B& packed, int p) {
    B result;
    for (int i = 0; i < 32; ++i) result.at[i] = packed.at[i] >> (p * BITS) & ((1 << BITS) - 1);
    return result;
  }
  template <int BITS>
  static B raise(const B& small) {
    B result;
    for (int i = 0; i < 32; ++i) result.at[i] = static_cast<std::uint8_t>(small.at[i] << BITS);
    return result;
  }
  static B plus(const B& a, const B& b) {
    B result;
    for (int i = 0; i < 32; ++i) result.at[i] = static_cast<std::uint8_t>(a.at[i] + b.at[i]);
    return result;
  }
  static const std::int8_t* broadcast4(const std::int8_t* x) { return x; }
  static P zero_partial() { return each<std::int32_t>([](int) { return 0; }); }
  static P dot(P sums, const B& codes, const std::int8_t* values) {
    for (int i = 0; i < 32; ++i) sums.at[i / 4] += codes.at[i] * values[i % 4];
    return sums;
  }
  static I widen(P sums) { return sums; }
  static I add(const I& a, const I& b) { return each<std::int32_t>([&](int i) { return a.at[i] + b.at[i]; }); }
  static void keep(P&) {}

  static W zero_wide() { return zero_partial(); }
  static B load_wide(const std::uint8_t* x) { return load_bytes(x); }
  static B spread(const B& codes) {
    B result;
    for (int i = 0; i < 32; ++i) result.at[i] = codes.at[i] ^ 0x80;
    return result;
  }
  static W dot_wide(W sums, const B& codes, const std::int16_t* values) {
    for (int i = 0; i < 32; ++i) sums.at[i / 4] += static_cast<std::int8_t>(codes.at[i]) * values[i % 4];
    return sums;
  }
  static I fold(W sums) { return sums; }
  static void keep_wide(W&) {}

  static B load_lanes(const std::uint8_t* x) { return load_bytes(x); }
  template <int BITS>
  static F code(const B& lanes, int j) {
    constexpr int kPlanes = 8 / BITS;
    return each<float>([&](int i) {
      const std::uint8_t byte = lanes.at[4 * i + j / kPlanes];
      if (BITS == 8) return static_cast<float>(static_cast<std::int8_t>(byte));
      return static_cast<float>(byte >> (j % kPlanes * BITS) & ((1 << BITS) - 1));
    });
  }

  static float largest_magnitude(const float* x, int count) {
    std::int32_t largest = 0;
    for (int i = 0; i < count; ++i) {
      std::int32_t bits;
      std::memcpy(&bits, x + i, 4);
      bits &= 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
    return from_bits(largest);
  }
  static std::int32_t round_int8(const float* x, int count, float inverse, std::int8_t* out) {
    std::int32_t total = 0;
    for (int i = 0; i < count; ++i) total += out[i] = static_cast<std::int8_t>(round_lane(x[i], inverse));
    return total;
  }
  static std::int32_t round_int16(const float* x, int count, float inverse, std::int16_t* out) {
    std::int32_t total = 0;
    for (int i = 0; i < count; ++i) total += out[i] = static_cast<std::int16_t>(round_lane(x[i], inverse));
    return total;
  }

 private:
  static std::int32_t round_lane(float x, float inverse) {
    return inverse == 0.0f ? 0 : static_cast<std::int32_t>(std::nearbyint(x * inverse));
  }
  static float from_bits(std::int32_t bits) {
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
  }
};

}  // namespace

extern const TileSet kScalarTiles = make_tiles<Scalar>("scalar");

}  // namespace dynaexq
