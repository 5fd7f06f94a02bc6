// Random matrices in the layout r8.1, packed in the order of the bytes; and a decoder that goes the other way, from row
// and column to the byte, as docs/format.md has it.
#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "support.hpp"
#include "tiles.hpp"

namespace dynaexq::test {

inline const std::vector<WeightFormat>& every_format() {
  static const std::vector<WeightFormat> formats{
      {1, 32}, {1, 64}, {1, 128}, {2, 32}, {2, 64}, {2, 128}, {3, 32}, {3, 64}, {3, 128}, {4, 32}, {4, 64}, {4, 128},
      {8, 32}, {8, 64}, {8, 128}, {16, 0}, {2, 32, 2}, {2, 64, 2}, {2, 128, 2}, {4, 32, 4}, {4, 64, 4}, {4, 128, 4}};
  return formats;
}

// By how many bits a nested format moves its base's codes up (formats/nested.py).
inline int nested_shift(WeightFormat format) { return format.bits / 2; }

inline std::string describe(WeightFormat format) {
  return (format.base_bits ? std::to_string(format.base_bits) + " + " : "") + std::to_string(format.bits) +
         " bits, group " + std::to_string(format.group);
}

inline std::uint16_t read_u16(const std::uint8_t* at) { return static_cast<std::uint16_t>(at[0] | at[1] << 8); }

inline double half_value(std::uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const double magnitude = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return half & 0x8000 ? -magnitude : magnitude;
}

// `bits` of a code from the vectors that begin at `vectors`: of a row of the tile and input k of the group.
inline int stored_bits(const std::uint8_t* vectors, int bits, int row, int k) {
  const int inputs = 4 * (8 / bits), plane = k % inputs / 4;
  return vectors[k / inputs * 32 + 4 * row + k % 4] >> (plane * bits) & ((1 << bits) - 1);
}

inline int stored_code(const std::uint8_t* record, int bits, int group, int row, int k) {
  if (bits != 3) return stored_bits(record, bits, row, k);
  return stored_bits(record, 2, row, k) | stored_bits(record + 2 * group, 1, row, k) << 2;
}

// The weight of a row and column.
inline double decode(Tiles matrix, WeightFormat format, int columns, int row, int column) {
  if (format.bits == 16) {
    const std::size_t at = (static_cast<std::size_t>(row / 8) * columns + column) * 8 + row % 8;
    return static_cast<double>(from_bfloat16(read_u16(matrix.base + 2 * at)));
  }
  const int bits = format.base_bits ? format.base_bits : format.bits, group = format.group, k = column % group;
  const std::size_t record_bytes = group * bits + 16 + (bits == 8 ? 0 : 16);
  const std::size_t index = static_cast<std::size_t>(row / 8) * (columns / group) + column / group;
  const std::uint8_t* record = matrix.base + index * record_bytes;
  int code = stored_code(record, bits, group, row % 8, k);
  double scale = half_value(read_u16(record + group * bits + 2 * (row % 8)));
  if (bits == 8) return scale * static_cast<std::int8_t>(code);
  double offset = half_value(read_u16(record + group * bits + 16 + 2 * (row % 8)));
  if (format.base_bits) {
    const std::uint8_t* rest = matrix.rest + index * group * format.bits;
    code = (code << nested_shift(format)) + stored_code(rest, format.bits, group, row % 8, k);
    scale /= 1 << nested_shift(format);
    offset -= scale * (((1 << format.bits) - 1) / 2.0);
  }
  return scale * code + offset;
}

enum class Codes { Random, Largest };  // Largest: where they meet Int16, the least in odd rows

struct Packed {
  WeightFormat format;
  int rows, columns;  // rows: whole tiles
  std::vector<std::uint8_t> bytes;
  std::vector<double> values;      // [rows, columns]
  std::vector<std::uint8_t> base;  // of a nested format: what `bytes` refine

  // For copies of `bytes` and `base`.
  Tiles tiles(const std::uint8_t* own, const std::uint8_t* below) const {
    return format.base_bits ? Tiles{below, own} : Tiles{own};
  }
};

class Packer {
 public:
  Packer(WeightFormat format, int rows, int columns, Random& random, Codes codes)
      : codes_(codes), random_(random), packed_{format, rows, columns, {}, {}, {}} {
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
  static void push_u16(std::vector<std::uint8_t>& out, std::uint16_t x) {
    out.push_back(static_cast<std::uint8_t>(x & 255));
    out.push_back(static_cast<std::uint8_t>(x >> 8));
  }

  void pack_bfloat16(int tile) {
    for (int column = 0; column < packed_.columns; ++column)
      for (int row = 0; row < 8; ++row) {
        const std::uint16_t half = to_bfloat16(static_cast<float>(0.2 * random_.normal()));
        push_u16(packed_.bytes, half);
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

  // Codes [group, 8] of one record.
  std::vector<int> random_codes(int bits) {
    const int most = bits == 8 ? 127 : (1 << bits) - 1, least = bits == 8 ? -127 : 0;
    const bool centred = packed_.format.whole_bits() == 8;
    std::vector<int> codes(packed_.format.group * 8);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      codes[i] = least + random_.below(most - least + 1);
      if (codes_ == Codes::Largest) codes[i] = centred && i % 2 ? least : most;
    }
    return codes;
  }

  // Vectors of the codes' bits from `below` on.
  static void push_vectors(std::vector<std::uint8_t>& out, const std::vector<int>& codes, int below, int bits) {
    const int planes = 8 / bits;
    for (std::size_t first = 0; first < codes.size(); first += 32 * planes)
      for (int row = 0; row < 8; ++row)
        for (int byte = 0; byte < 4; ++byte) {
          int packed = 0;
          for (int plane = 0; plane < planes; ++plane) {
            const int code = codes[first + 8 * (4 * plane + byte) + row];
            packed |= (code >> below & ((1 << bits) - 1)) << (plane * bits);
          }
          out.push_back(static_cast<std::uint8_t>(packed));
        }
  }
  static void push_codes(std::vector<std::uint8_t>& out, const std::vector<int>& codes, int bits) {
    push_vectors(out, codes, 0, bits == 3 ? 2 : bits);
    if (bits == 3) push_vectors(out, codes, 2, 1);
  }

  void pack_record(int tile, int first) {
    const bool nested = packed_.format.base_bits;
    const int bits = nested ? packed_.format.base_bits : packed_.format.bits;
    std::vector<std::uint8_t>& out = nested ? packed_.base : packed_.bytes;
    const std::vector<int> codes = random_codes(bits);
    push_codes(out, codes, bits);
    std::uint16_t halves[16];
    for (int i = 0; i < 16; ++i) {
      halves[i] = i < 8 ? random_half(bits + 2, random_.below(8) == 0) : random_half(3, random_.below(8) != 0);
      if (i < 8 || bits < 8) push_u16(out, halves[i]);
    }
    std::vector<int> rest;
    if (nested) push_codes(packed_.bytes, rest = random_codes(bits), bits);
    // what is nested moves a weight to either side of its base's
    const double middle = ((1 << bits) - 1) / 2.0, steps = 1 << nested_shift(packed_.format);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const int row = static_cast<int>(i % 8), column = first + static_cast<int>(i / 8);
      const double code = nested ? codes[i] + (rest[i] - middle) / steps : codes[i];
      value(8 * tile + row, column) = half_value(halves[row]) * code + (bits < 8 ? half_value(halves[8 + row]) : 0);
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
