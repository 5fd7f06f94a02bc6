// Random matrices in the layout r8.1, packed in the order of the bytes; and a decoder that goes the other way, from row
// and column to the byte, as docs/format.md has it.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "support.hpp"
#include "tiles.hpp"

namespace dynaexq::test {

inline const std::vector<WeightFormat>& every_format() {
  static const std::vector<WeightFormat> formats{{1, 32}, {1, 64}, {1, 128}, {2, 32}, {2, 64}, {2, 128}, {4, 32},
                                                 {4, 64}, {4, 128}, {8, 32}, {8, 64}, {8, 128}, {16, 0}};
  return formats;
}

inline std::uint16_t read_u16(const std::uint8_t* at) { return static_cast<std::uint16_t>(at[0] | at[1] << 8); }

inline double half_value(std::uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const double magnitude = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return half & 0x8000 ? -magnitude : magnitude;
}

// The weight of a row and column.
inline double decode(const std::uint8_t* matrix, WeightFormat format, int columns, int row, int column) {
  if (format.bits == 16) {
    const std::size_t at = (static_cast<std::size_t>(row / 8) * columns + column) * 8 + row % 8;
    return static_cast<double>(from_bfloat16(read_u16(matrix + 2 * at)));
  }
  const int bits = format.bits, group = format.group, planes = 8 / bits, k = column % group;
  const std::size_t record_bytes = group * bits + 16 + (bits == 8 ? 0 : 16);
  const std::size_t index = static_cast<std::size_t>(row / 8) * (columns / group) + column / group;
  const std::uint8_t* record = matrix + index * record_bytes;
  const std::uint8_t byte = record[k / (4 * planes) * 32 + 4 * (row % 8) + k % 4];
  const int plane = k % (4 * planes) / 4;
  const double scale = half_value(read_u16(record + group * bits + 2 * (row % 8)));
  if (bits == 8) return scale * static_cast<std::int8_t>(byte);
  const double offset = half_value(read_u16(record + group * bits + 16 + 2 * (row % 8)));
  return scale * (byte >> (plane * bits) & ((1 << bits) - 1)) + offset;
}

enum class Codes { Random, Largest };

struct Packed {
  WeightFormat format;
  int rows, columns;  // rows: whole tiles
  std::vector<std::uint8_t> bytes;
  std::vector<double> values;  // [rows, columns]
};

class Packer {
 public:
  Packer(WeightFormat format, int rows, int columns, Random& random, Codes codes)
      : codes_(codes), random_(random), packed_{format, rows, columns, {}, {}} {
    packed_.values.resize(static_cast<std::size_t>(rows) * columns);
    for (int tile = 0; tile < rows / 8; ++tile) {
      if (format.bits == 16)
        pack_bfloat16(tile);
      else
        for (int first = 0; first < columns; first += format.group) pack_record(tile, first);
    }
  }
  Packed take() { return std::move(packed_); }

 private:
  double& value(int row, int column) {
    return packed_.values[static_cast<std::size_t>(row) * packed_.columns + column];
  }
  void push_u16(std::uint16_t x) {
    packed_.bytes.push_back(static_cast<std::uint8_t>(x & 255));
    packed_.bytes.push_back(static_cast<std::uint8_t>(x >> 8));
  }

  void pack_bfloat16(int tile) {
    for (int column = 0; column < packed_.columns; ++column)
      for (int row = 0; row < 8; ++row) {
        const std::uint16_t half = to_bfloat16(static_cast<float>(0.2 * random_.normal()));
        push_u16(half);
        value(8 * tile + row, column) = static_cast<double>(from_bfloat16(half));
      }
  }

  // A float16 in [2^-exponent, 2^(1 - exponent)), now and then zero, or too small to be normal.
  std::uint16_t random_half(int exponent, bool negative) {
    const int kind = random_.below(64);
    const int fraction = random_.below(1024), sign = negative ? 0x8000 : 0;
    if (kind == 0) return static_cast<std::uint16_t>(sign);
    return static_cast<std::uint16_t>(sign | (kind == 1 ? 0 : (15 - exponent) << 10) | fraction);
  }

  void pack_record(int tile, int first) {
    const int bits = packed_.format.bits, planes = 8 / bits, most = bits == 8 ? 127 : (1 << bits) - 1;
    for (int column = first; column < first + packed_.format.group; column += 4 * planes)
      for (int row = 8 * tile; row < 8 * tile + 8; ++row)
        for (int byte = 0; byte < 4; ++byte) {
          int packed = 0;
          for (int plane = 0; plane < planes; ++plane) {
            int code = bits == 8 ? random_.below(255) - 127 : random_.below(most + 1);
            if (codes_ == Codes::Largest) code = bits == 8 && row % 2 ? -most : most;
            value(row, column + 4 * plane + byte) = code;
            packed |= (code & (bits == 8 ? 255 : most)) << (plane * bits);
          }
          packed_.bytes.push_back(static_cast<std::uint8_t>(packed));
        }
    std::uint16_t halves[16];
    for (int i = 0; i < 16; ++i) {
      halves[i] = i < 8 ? random_half(bits + 2, random_.below(8) == 0) : random_half(3, random_.below(8) != 0);
      if (i < 8 || bits < 8) push_u16(halves[i]);
    }
    for (int row = 0; row < 8; ++row)
      for (int column = first; column < first + packed_.format.group; ++column) {
        double& code = value(8 * tile + row, column);
        code = half_value(halves[row]) * code + (bits < 8 ? half_value(halves[8 + row]) : 0);
      }
  }

  Codes codes_;
  Random& random_;
  Packed packed_;
};

inline Packed pack(WeightFormat format, int rows, int columns, Random& random, Codes codes = Codes::Random) {
  return Packer(format, rows, columns, random, codes).take();
}

}  // namespace dynaexq::test
