// Which kernel sets this processor can run.
#include "instruction_sets.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace dynaexq {
namespace {

constexpr int kMostSets = 4;

#if defined(DYNAEXQ_AVXVNNI)
// CPUID leaf 7, subleaf 1, EAX bit 4; older compilers have no name for it.
bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
#endif

// Fills `sets` up to a null pointer; the sets need what they were compiled for, see CMakeLists.txt.
void list_sets(const TileSet** sets) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
#if defined(DYNAEXQ_AVX512)
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni"))
      *sets++ = &kAvx512Tiles;
#endif
#if defined(DYNAEXQ_AVXVNNI)
    if (has_avx_vnni()) *sets++ = &kAvxVnniTiles;
#endif
    *sets++ = &kAvx2Tiles;
  }
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) *sets++ = &kNeonTiles;
#endif
  *sets = &kScalarTiles;
}

}  // namespace

const TileSet* const* available_tiles() {
  static const struct List {
    const TileSet* sets[kMostSets + 1] = {};
    List() { list_sets(sets); }
  } list;
  return list.sets;
}

}  // namespace dynaexq
