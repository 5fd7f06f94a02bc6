// Proves the CPU kernels against plain arithmetic, set by set: kernel_tests [--quick] [PART...]. Exit code 1: a check
// failed. Parts: tiles, experts, linear; without any, all. --quick is for sanitizers and emulators: tiles of every set,
// but layers over the first alone, since layers are the same code and reach a set through its table only.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "check.hpp"
#include "support.hpp"
#include "team.hpp"

namespace {

using namespace dynaexq;
using namespace dynaexq::test;

struct Part {
  const char* name;
  void (*test)(const TileSet& set);
  bool layers;
};

constexpr Part kParts[] = {{"tiles", test_tiles, false}, {"experts", test_experts, true}, {"linear", test_linear, true}};

void run_part(const Part& part, const TileSet& set) {
  const auto start = std::chrono::steady_clock::now();
  const long before = checks;
  part.test(set);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf(" %s %ld checks %.1f s;", part.name, checks - before, took.count());
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
  bool quick = false;
  std::vector<Part> parts;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const auto named = [&](const Part& part) { return argument == part.name; };
    const Part* found = std::find_if(std::begin(kParts), std::end(kParts), named);
    if (argument == "--quick") {
      quick = true;
    } else if (found != std::end(kParts)) {
      parts.push_back(*found);
    } else {
      std::printf("no part %s\n", arguments[i]);
      return 2;
    }
  }
  if (parts.empty()) parts.assign(std::begin(kParts), std::end(kParts));
  std::vector<const TileSet*> sets;
  for (const TileSet* const* set = available_tiles(); *set; ++set) sets.push_back(*set);
  add_emulated_sets(sets);
  std::printf("threads: %s\n", team_kind());
  test_layout();
  for (const TileSet* set : sets) {
    std::printf("%s:", set->name);
    for (const Part& part : parts)
      if (!part.layers || !quick || set == sets.front()) run_part(part, *set);
    std::printf("\n");
  }
  std::printf("%ld checks, %ld failures\n", checks.load(), failures.load());
  return failures ? 1 : 0;
}
