// The sets with VNNI on a processor without it: their dot products written out as the manual defines them.
#include "support.hpp"

#if defined(__AVX2__)
#include <string>

#include "isa_avx2.hpp"
#include "tiles_body.hpp"

namespace dynaexq {
namespace {

struct Emulated {  // not in line: all the copies take three times as long to compile
  // _mm256_dpbusd_epi32: four products of unsigned and signed bytes, added to each int32, nothing saturated.
  [[gnu::noinline]] static __m256i bytes(__m256i sums, __m256i a, __m256i b) {
    std::int32_t total[8];
    std::uint8_t left[32];
    std::int8_t right[32];
    std::memcpy(total, &sums, 32);
    std::memcpy(left, &a, 32);
    std::memcpy(right, &b, 32);
    for (int i = 0; i < 32; ++i) total[i / 4] += left[i] * right[i];
    std::memcpy(&sums, total, 32);
    return sums;
  }
  // _mm256_dpwssd_epi32: two products of signed 16-bit numbers, added to each int32, nothing saturated.
  [[gnu::noinline]] static __m256i words(__m256i sums, __m256i a, __m256i b) {
    std::int32_t total[8];
    std::int16_t left[16], right[16];
    std::memcpy(total, &sums, 32);
    std::memcpy(left, &a, 32);
    std::memcpy(right, &b, 32);
    for (int i = 0; i < 16; ++i) total[i / 2] += left[i] * right[i];
    std::memcpy(&sums, total, 32);
    return sums;
  }
};

const TileSet kEmulatedVnni = make_tiles<Vnni<Emulated>>("vnni, emulated");

}  // namespace

namespace test {

void add_emulated_sets(std::vector<const TileSet*>& sets) {
  for (const TileSet* set : sets)
    if (std::string(set->name) == "avx2") {
      sets.push_back(&kEmulatedVnni);
      return;
    }
}

}  // namespace test
}  // namespace dynaexq

#else

namespace dynaexq::test {

void add_emulated_sets(std::vector<const TileSet*>&) {}

}  // namespace dynaexq::test

#endif
