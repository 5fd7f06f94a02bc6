#include "instruction_sets.hpp"
#include "isa_avx2.hpp"
#include "tiles_body.hpp"

namespace dynaexq {
namespace {

// AVX2 with the 4-way dot product that processors without AVX-512 have.
struct AvxVnni : Avx2 {
  static constexpr bool kNarrowPartials = false;
  static P dot(P sums, B codes, B values) { return _mm256_dpbusd_avx_epi32(sums, codes, values); }
  static I widen(P sums) { return sums; }
};

}  // namespace

extern const TileSet kAvxVnniTiles = make_tiles<AvxVnni>("avx-vnni");

}  // namespace dynaexq
