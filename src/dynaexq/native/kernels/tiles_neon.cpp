// 64-bit ARM with the dot product extension (ARMv8.2 and later).
#include <arm_neon.h>

#include "instruction_sets.hpp"
#include "tiles_body.hpp"

namespace dynaexq {
namespace {

struct Neon {
  using F = float32x4x2_t;  // rows 0-3 and 4-7 of a tile, here and below
  using I = int32x4x2_t;
  using B = uint8x16x2_t;
  using P = I;
  struct W {  // partial sums of the 16-bit dot product: the four inputs of a vector, row by row
    int32x4_t row[8];
  };
  struct Codes {
    int16x4_t row[8];
  };
  static constexpr bool kNarrowPartials = false;
  static constexpr int kTokensInt8 = 8, kTokensOther = 2;

  static F zero() { return broadcast(0.0f); }
  static F broadcast(float x) { return {{vdupq_n_f32(x), vdupq_n_f32(x)}}; }
  static F load(const float* x) { return {{vld1q_f32(x), vld1q_f32(x + 4)}}; }
  static void store(float* out, F x) {
    vst1q_f32(out, x.val[0]);
    vst1q_f32(out + 4, x.val[1]);
  }
  static F fma(F a, F b, F c) {
    return {{vfmaq_f32(c.val[0], a.val[0], b.val[0]), vfmaq_f32(c.val[1], a.val[1], b.val[1])}};
  }
  static F mul(F a, F b) { return {{vmulq_f32(a.val[0], b.val[0]), vmulq_f32(a.val[1], b.val[1])}}; }
  static F addf(F a, F b) { return {{vaddq_f32(a.val[0], b.val[0]), vaddq_f32(a.val[1], b.val[1])}}; }
  static F sub(F a, F b) { return {{vsubq_f32(a.val[0], b.val[0]), vsubq_f32(a.val[1], b.val[1])}}; }
  static F div(F a, F b) { return {{vdivq_f32(a.val[0], b.val[0]), vdivq_f32(a.val[1], b.val[1])}}; }
  // NaN in either operand gives NaN
  static F min(F a, F b) { return {{vminq_f32(a.val[0], b.val[0]), vminq_f32(a.val[1], b.val[1])}}; }
  static F max(F a, F b) { return {{vmaxq_f32(a.val[0], b.val[0]), vmaxq_f32(a.val[1], b.val[1])}}; }
  static F round(F x) { return {{vrndnq_f32(x.val[0]), vrndnq_f32(x.val[1])}}; }
  static F to_float(I x) { return {{vcvtq_f32_s32(x.val[0]), vcvtq_f32_s32(x.val[1])}}; }
  static F scale_exponent(F x, F exponent) {
    F result;
    for (int half = 0; half < 2; ++half) {
      const int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(exponent.val[half]), vdupq_n_s32(127)), 23);
      result.val[half] = vmulq_f32(x.val[half], vreinterpretq_f32_s32(bits));
    }
    return result;
  }
  static F load_half(const std::uint8_t* x) {
    const uint16x8_t halves = vreinterpretq_u16_u8(vld1q_u8(x));
    return {{vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(halves))),
             vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(halves)))}};
  }
  static F load_bf16(const std::uint8_t* x) {
    const uint16x8_t halves = vreinterpretq_u16_u8(vld1q_u8(x));
    return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
             vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(halves), 16))}};
  }
  static F load_int8(const std::uint8_t* x) {
    const int16x8_t words = vmovl_s8(vreinterpret_s8_u8(vld1_u8(x)));
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(words)))}};
  }
  static float sum(F x) { return vaddvq_f32(vaddq_f32(x.val[0], x.val[1])); }

  static B load_bytes(const std::uint8_t* x) { return {{vld1q_u8(x), vld1q_u8(x + 16)}}; }
  template <int BITS>
  static B plane(B packed, int p) {
    const uint8x16_t mask = vdupq_n_u8((1 << BITS) - 1);
    const int8x16_t right = vdupq_n_s8(static_cast<std::int8_t>(-p * BITS));
    return {{vandq_u8(vshlq_u8(packed.val[0], right), mask), vandq_u8(vshlq_u8(packed.val[1], right), mask)}};
  }
  template <int BITS>
  static B raise(B small) {
    return {{vshlq_n_u8(small.val[0], BITS), vshlq_n_u8(small.val[1], BITS)}};
  }
  static B plus(B a, B b) { return {{vaddq_u8(a.val[0], b.val[0]), vaddq_u8(a.val[1], b.val[1])}}; }
  static int8x16_t broadcast4(const std::int8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  static P zero_partial() { return {{vdupq_n_s32(0), vdupq_n_s32(0)}}; }
  static P dot(P sums, B codes, int8x16_t values) {  // codes have at most 4 bits, so they are signed bytes too
    return {{vdotq_s32(sums.val[0], vreinterpretq_s8_u8(codes.val[0]), values),
             vdotq_s32(sums.val[1], vreinterpretq_s8_u8(codes.val[1]), values)}};
  }
  static I widen(P sums) { return sums; }
  static I add(I a, I b) { return {{vaddq_s32(a.val[0], b.val[0]), vaddq_s32(a.val[1], b.val[1])}}; }
  static void keep(P&) {}

  static W zero_wide() {
    W result;
    for (int32x4_t& row : result.row) row = vdupq_n_s32(0);
    return result;
  }
  static Codes load_wide(const std::uint8_t* x) {
    return widen_bytes({{vreinterpretq_s8_u8(vld1q_u8(x)), vreinterpretq_s8_u8(vld1q_u8(x + 16))}});
  }
  static Codes spread(B codes) {  // less 128
    const uint8x16_t half = vdupq_n_u8(128);
    return widen_bytes({{vreinterpretq_s8_u8(veorq_u8(codes.val[0], half)), vreinterpretq_s8_u8(veorq_u8(codes.val[1], half))}});
  }
  static W dot_wide(W sums, const Codes& codes, const std::int16_t* values) {
    const int16x4_t x = vld1_s16(values);
    for (int row = 0; row < 8; ++row) sums.row[row] = vmlal_s16(sums.row[row], codes.row[row], x);
    return sums;
  }
  static I fold(const W& sums) {
    const auto four = [&](int row) {
      return vpaddq_s32(vpaddq_s32(sums.row[row], sums.row[row + 1]), vpaddq_s32(sums.row[row + 2], sums.row[row + 3]));
    };
    return {{four(0), four(4)}};
  }
  static void keep_wide(W&) {}

  static B load_lanes(const std::uint8_t* x) { return load_bytes(x); }
  template <int BITS>
  static F code(B lanes, int j) {
    F result;
    for (int half = 0; half < 2; ++half) {
      const int32x4_t row = vreinterpretq_s32_u8(lanes.val[half]);
      const int32x4_t up = vshlq_s32(row, vdupq_n_s32(32 - BITS * (j + 1)));
      const int32x4_t down = vdupq_n_s32(BITS - 32);
      result.val[half] = BITS == 8 ? vcvtq_f32_s32(vshlq_s32(up, down))
                                   : vcvtq_f32_u32(vshlq_u32(vreinterpretq_u32_s32(up), down));
    }
    return result;
  }

  // The largest magnitude as an integer comparison of bit patterns, which orders inf and NaN above all numbers.
  static float largest_magnitude(const float* x, int count) {
    const int32x4_t mask = vdupq_n_s32(0x7fffffff);
    int32x4_t largest = vdupq_n_s32(0);
    for (int i = 0; i < count; i += 4)
      largest = vmaxq_s32(largest, vandq_s32(mask, vreinterpretq_s32_f32(vld1q_f32(x + i))));
    const std::int32_t bits = vmaxvq_s32(largest);
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
  }
  static std::int32_t round_int8(const float* x, int count, float inverse, std::int8_t* out) {
    std::int32_t total = 0;
    for (int i = 0; i < count; i += 8) {
      const int16x8_t words = round_lanes(x + i, inverse);
      total += vaddlvq_s16(words);
      vst1_s8(out + i, vqmovn_s16(words));
    }
    return total;
  }
  static std::int32_t round_int16(const float* x, int count, float inverse, std::int16_t* out) {
    std::int32_t total = 0;
    for (int i = 0; i < count; i += 8) {
      const int16x8_t words = round_lanes(x + i, inverse);
      total += vaddlvq_s16(words);
      vst1q_s16(out + i, words);
    }
    return total;
  }

 private:
  static Codes widen_bytes(int8x16x2_t bytes) {
    Codes result;
    for (int half = 0; half < 2; ++half)
      for (int pair = 0; pair < 2; ++pair) {
        const int16x8_t wide = vmovl_s8(pair ? vget_high_s8(bytes.val[half]) : vget_low_s8(bytes.val[half]));
        result.row[4 * half + 2 * pair] = vget_low_s16(wide);
        result.row[4 * half + 2 * pair + 1] = vget_high_s16(wide);
      }
    return result;
  }
  static int16x8_t round_lanes(const float* x, float inverse) {
    if (inverse == 0.0f) return vdupq_n_s16(0);  // also where x is not finite
    return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x), inverse))),
                        vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + 4), inverse))));
  }
};

}  // namespace

extern const TileSet kNeonTiles = make_tiles<Neon>("neon-dotprod");

}  // namespace dynaexq
