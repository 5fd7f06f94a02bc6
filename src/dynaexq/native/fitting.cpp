#include "fitting.hpp"

#include <algorithm>

#include "team.hpp"

namespace dynaexq {
namespace {

constexpr int kRows = 256;             // at a time: their part of a group stays in the cache
constexpr float kHalfWay = 12582912;   // 1.5 * 2^23: adding it leaves no place for a fraction
constexpr float kMostSteps = 1 << 20;  // more steps from the offset than any code, and few enough for kHalfWay

void fit_rows(const GroupFit& group, int first, int count) {
  for (int column = 0; column < group.columns; ++column) {
    const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(column) * group.rows + first;
    const float* row = group.upper + column * group.upper_stride;
    const float inverse_diagonal = 1.0f / row[column];
    const float *left = group.left + at, *scale = group.scale + first, *offset = group.offset + first;
    const std::uint8_t* lowest = group.lowest + at;
    std::uint8_t* codes = group.codes + at;
    float* errors = group.errors + at;
    const float reach = static_cast<float>(group.reach);
    for (int i = 0; i < count; ++i) {
      const float inverse = scale[i] == 0.0f ? 0.0f : 1.0f / scale[i];
      const float least = static_cast<float>(lowest[i]);
      const float steps = std::min(std::max((left[i] - offset[i]) * inverse - least, -kMostSteps), kMostSteps);
      const float code = std::min(std::max((steps + kHalfWay) - kHalfWay, 0.0f), reach) + least;
      codes[i] = static_cast<std::uint8_t>(code);
      errors[i] = (left[i] - (offset[i] + scale[i] * code)) * inverse_diagonal;
    }
    for (int next = column + 1; next < group.columns; ++next) {
      float* other = group.left + static_cast<std::ptrdiff_t>(next) * group.rows + first;
      const float factor = row[next];
      for (int i = 0; i < count; ++i) other[i] -= factor * errors[i];
    }
  }
}

}  // namespace

void choose_codes(const GroupFit& group, int threads) {
  Phase phase;
  phase.reset((group.rows + kRows - 1) / kRows, threads);
  auto work = [&] {
    phase.work([&](int unit) { fit_rows(group, unit * kRows, std::min(kRows, group.rows - unit * kRows)); });
  };
  run_team(threads, work);
}

}  // namespace dynaexq
