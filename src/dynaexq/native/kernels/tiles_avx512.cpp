#include "instruction_sets.hpp"
#include "isa_avx2.hpp"
#include "tiles_body.hpp"

namespace dynaexq {
namespace {

// 256-bit vectors with the 4-way dot product of AVX-512 VNNI: 32-bit sums at once, and twice the registers.
struct Avx512Vnni : Avx2 {
  static constexpr bool kNarrowPartials = false;
  static P dot(P sums, B codes, B values) { return _mm256_dpbusd_epi32(sums, codes, values); }
  static I widen(P sums) { return sums; }
  static W dot_wide(W sums, W codes, const std::int16_t* values) {
    long long four;
    std::memcpy(&four, values, 8);
    const __m256i x = _mm256_set1_epi64x(four);
    return {_mm256_dpwssd_epi32(sums.low, codes.low, x), _mm256_dpwssd_epi32(sums.high, codes.high, x)};
  }
};

}  // namespace

extern const TileSet kAvx512Tiles = make_tiles<Avx512Vnni>("avx512-vnni");

}  // namespace dynaexq
