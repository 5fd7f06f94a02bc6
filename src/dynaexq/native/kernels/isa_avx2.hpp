// Vector operations of AVX2, FMA and F16C; the sets with VNNI differ in the dot products alone.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace dynaexq {
namespace {

struct Avx2 {
  using F = __m256;   // 8 floats: one for each row of a tile
  using I = __m256i;  // 8 int32
  using B = __m256i;  // 32 bytes: 8 rows x 4 inputs
  using P = __m256i;  // partial sums of a dot product: 16 x int16
  struct W {          // partial sums of the 16-bit dot product: rows 0-3 and 4-7, two int32 a row
    __m256i low, high;
  };
  static constexpr bool kNarrowPartials = true;
  static constexpr int kTokensInt8 = 8, kTokensOther = 4;

  static F zero() { return _mm256_setzero_ps(); }
  static F broadcast(float x) { return _mm256_set1_ps(x); }
  static F load(const float* x) { return _mm256_loadu_ps(x); }
  static void store(float* out, F x) { _mm256_storeu_ps(out, x); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F addf(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  static F scale_exponent(F x, F exponent) {
    const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
  }
  static F load_half(const std::uint8_t* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  static F load_bf16(const std::uint8_t* x) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static F load_int8(const std::uint8_t* x) {
    return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))));
  }
  static float sum(F x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
  }

  static B load_bytes(const std::uint8_t* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
  template <int BITS>
  static B plane(B packed, int p) {
    const __m256i shifted = p ? _mm256_srli_epi16(packed, p * BITS) : packed;
    return _mm256_and_si256(shifted, _mm256_set1_epi8((1 << BITS) - 1));
  }
  template <int BITS>
  static B raise(B small) {  // bytes times 2^BITS, which no byte outgrows
    return _mm256_slli_epi16(small, BITS);
  }
  static B plus(B a, B b) { return _mm256_add_epi8(a, b); }
  static B broadcast4(const std::int8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
  }
  static P zero_partial() { return _mm256_setzero_si256(); }
  static P product(B codes, B values) { return _mm256_maddubs_epi16(codes, values); }
  static P add_partials(P a, P b) { return _mm256_add_epi16(a, b); }
  static I widen(P sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
  static I add(I a, I b) { return _mm256_add_epi32(a, b); }
  // Without it the compiler keeps every product of a group alive and spills them.
  static void keep(P& x) { __asm__("" : "+x"(x)); }

  static W zero_wide() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static W load_wide(const std::uint8_t* x) {
    const auto* halves = reinterpret_cast<const __m128i*>(x);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)), _mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))};
  }
  static W spread(B codes) {  // less 128
    const __m256i centred = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
    return {_mm256_cvtepi8_epi16(_mm256_castsi256_si128(centred)),
            _mm256_cvtepi8_epi16(_mm256_extracti128_si256(centred, 1))};
  }
  static W dot_wide(W sums, W codes, const std::int16_t* values) {
    long long four;
    std::memcpy(&four, values, 8);
    const __m256i x = _mm256_set1_epi64x(four);
    return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(codes.low, x)),
            _mm256_add_epi32(sums.high, _mm256_madd_epi16(codes.high, x))};
  }
  static I fold(W sums) { return _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums.low, sums.high), 0xD8); }
  static void keep_wide(W& x) { __asm__("" : "+x"(x.low), "+x"(x.high)); }

  static __m256i load_lanes(const std::uint8_t* x) { return load_bytes(x); }
  // Code j of each row's 4 bytes, counted from the lowest bits up, as a float.
  template <int BITS>
  static F code(__m256i lanes, int j) {
    if (BITS == 8) return to_float(_mm256_srai_epi32(_mm256_slli_epi32(lanes, 24 - 8 * j), 24));
    return to_float(_mm256_and_si256(_mm256_srli_epi32(lanes, BITS * j), _mm256_set1_epi32((1 << BITS) - 1)));
  }

  // The largest magnitude as an integer comparison of bit patterns, which orders inf and NaN above all numbers.
  static float largest_magnitude(const float* x, int count) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < count; i += 8)
      largest = _mm256_max_epi32(largest, _mm256_and_si256(mask, load_bytes(reinterpret_cast<const std::uint8_t*>(x + i))));
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xB1));
    return _mm_cvtss_f32(_mm_castsi128_ps(half));
  }
  static std::int32_t round_int8(const float* x, int count, float inverse, std::int8_t* out) {
    const F factor = broadcast(inverse);
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < count; i += 8) {
      const __m256i whole = round_lanes(x + i, factor, inverse);
      total = _mm256_add_epi32(total, whole);
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), _mm_packs_epi16(words, words));
    }
    return sum_lanes(total);
  }
  static std::int32_t round_int16(const float* x, int count, float inverse, std::int16_t* out) {
    const F factor = broadcast(inverse);
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < count; i += 8) {
      const __m256i whole = round_lanes(x + i, factor, inverse);
      total = _mm256_add_epi32(total, whole);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
    }
    return sum_lanes(total);
  }

 private:
  static __m256i round_lanes(const float* x, F factor, float inverse) {
    if (inverse == 0.0f) return _mm256_setzero_si256();  // also where x is not finite
    return _mm256_cvtps_epi32(_mm256_mul_ps(load(x), factor));
  }
  static std::int32_t sum_lanes(__m256i x) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1));
    return _mm_cvtsi128_si32(half);
  }
};

// AVX2 with 32-bit sums at once by the dot products of a VNNI extension: D::bytes adds four products of unsigned and
// signed bytes to each int32, D::words two of signed 16-bit numbers.
template <class D>
struct Vnni : Avx2 {
  static constexpr bool kNarrowPartials = false;
  static P dot(P sums, B codes, B values) { return D::bytes(sums, codes, values); }
  static I widen(P sums) { return sums; }
  static W dot_wide(W sums, W codes, const std::int16_t* values) {
    long long four;
    std::memcpy(&four, values, 8);
    const __m256i x = _mm256_set1_epi64x(four);
    return {D::words(sums.low, codes.low, x), D::words(sums.high, codes.high, x)};
  }
};

}  // namespace
}  // namespace dynaexq
