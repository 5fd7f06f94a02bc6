// Checks that count and print failures; the program goes on, so that one run shows all of them.
#pragma once
#include <atomic>
#include <cstdarg>
#include <cstdio>

namespace dynaexq::test {

constexpr int kMostPrinted = 60;

inline std::atomic<long> checks{0}, failures{0};

__attribute__((format(printf, 5, 6))) inline bool check(bool good, const char* file, int line, const char* condition,
                                                        const char* format, ...) {
  ++checks;
  if (good) return true;
  if (++failures > kMostPrinted) return false;
  char text[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::printf("%s:%d: failed: %s (%s)\n", file, line, condition, text);
  return false;
}

}  // namespace dynaexq::test

// CHECK(condition, "what it was about %d", ...)
#define CHECK(condition, ...) \
  ::dynaexq::test::check(static_cast<bool>(condition), __FILE__, __LINE__, #condition, __VA_ARGS__)
