// Proves the CPU kernels against plain arithmetic, set by set: kernel_tests [--quick]. Exit code 1: a check failed.
#include <chrono>
#include <cstdio>
#include <string>

#include "check.hpp"
#include "support.hpp"
#include "team.hpp"

int main(int count, char** arguments) {
  using namespace dynaexq;
  using namespace dynaexq::test;
  quick = count > 1 && std::string(arguments[1]) == "--quick";
  std::vector<const TileSet*> sets;
  for (const TileSet* const* set = available_tiles(); *set; ++set) sets.push_back(*set);
  add_emulated_sets(sets);
  std::printf("threads: %s\n", team_kind());
  test_layout();
  for (const TileSet* set : sets) {
    std::printf("%s:", set->name);
    const auto part = [&](const char* name, void (*test)(const TileSet&)) {
      const auto start = std::chrono::steady_clock::now();
      const long before = checks;
      test(*set);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      std::printf(" %s %ld checks %.1f s;", name, checks - before, took.count());
      std::fflush(stdout);
    };
    part("tiles", test_tiles);
    part("experts", test_experts);
    part("linear", test_linear);
    std::printf("\n");
  }
  std::printf("%ld checks, %ld failures\n", checks.load(), failures.load());
  return failures ? 1 : 0;
}
