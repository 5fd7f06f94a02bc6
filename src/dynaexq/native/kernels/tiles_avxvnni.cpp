#include "instruction_sets.hpp"
#include "isa_avx2.hpp"
#include "tiles_body.hpp"

namespace dynaexq {
namespace {

// The extension of processors without AVX-512.
struct AvxVnni {
  static __m256i bytes(__m256i sums, __m256i a, __m256i b) { return _mm256_dpbusd_avx_epi32(sums, a, b); }
  static __m256i words(__m256i sums, __m256i a, __m256i b) { return _mm256_dpwssd_avx_epi32(sums, a, b); }
};

}  // namespace

extern const TileSet kAvxVnniTiles = make_tiles<Vnni<AvxVnni>>("avx-vnni");

}  // namespace dynaexq
