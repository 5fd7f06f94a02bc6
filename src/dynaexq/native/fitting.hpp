// The inner loop of the calibrated quantiser (formats/second_order.py).
#pragma once
#include <cstddef>
#include <cstdint>

namespace dynaexq {

// A group of `columns` columns of a matrix, column by column; arrays are [columns, rows] unless said otherwise.
struct GroupFit {
  int rows, columns;
  float* left;                  // what is still to be represented; changed
  const float* upper;           // [columns, columns], `upper_stride` apart
  std::ptrdiff_t upper_stride;
  const float *scale, *offset;  // [rows]
  const std::uint8_t* lowest;   // the least code of each weight
  int reach;                    // and how far above it the highest is
  std::uint8_t* codes;          // written
  float* errors;                // written: what each column loses, over its diagonal in `upper`
};

// Chooses the nearest code for each weight, and makes what its column loses good in the columns that follow.
void choose_codes(const GroupFit& group, int threads);

}  // namespace dynaexq
