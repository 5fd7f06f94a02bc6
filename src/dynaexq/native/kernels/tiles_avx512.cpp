#include "instruction_sets.hpp"
#include "isa_avx2.hpp"
#include "tiles_body.hpp"

namespace dynaexq {
namespace {

// On 256-bit vectors, with twice the registers of AVX2.
struct Avx512Vnni {
  static __m256i bytes(__m256i sums, __m256i a, __m256i b) { return _mm256_dpbusd_epi32(sums, a, b); }
  static __m256i words(__m256i sums, __m256i a, __m256i b) { return _mm256_dpwssd_epi32(sums, a, b); }
};

}  // namespace

extern const TileSet kAvx512Tiles = make_tiles<Vnni<Avx512Vnni>>("avx512-vnni");

}  // namespace dynaexq
