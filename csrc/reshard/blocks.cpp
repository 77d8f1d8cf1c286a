#include "reshard/blocks.h"

#include <algorithm>
#include <cstring>

#include "reshard/casts.h"
#include "reshard/digest.h"

namespace asyncrl::reshard {
namespace {

constexpr int64_t kTile = 64;  // rows and columns of a transposed tile

struct Rectangle {
  int64_t row, col, rows, cols;
};

template <typename Visit>
void for_each_tile(const Segment& segment, int64_t side, Visit visit) {
  for (int64_t row = 0; row < segment.rows; row += side) {
    for (int64_t col = 0; col < segment.cols; col += side) {
      visit(Rectangle{row, col, std::min(side, segment.rows - row),
                      std::min(side, segment.cols - col)});
    }
  }
}

// Rows of a tile at `local`, `local_stride` bytes apart, to or from their place on the wire.
Rows tile_rows(const Segment& segment, const Rectangle& tile, const std::byte* source,
               std::byte* target, int64_t source_stride, int64_t target_stride) {
  const int64_t width = wire_element_bytes(segment.op);
  return {source,
          target,
          source_stride,
          target_stride,
          tile.rows,
          tile.cols * width,
          position_byte(segment, tile.row, tile.col),
          static_cast<uint64_t>(segment.position_stride * width),
          false};
}

template <typename Element>
uint64_t pack_turned(const Segment& segment, const std::byte* parameter, std::byte* wire,
                     MoveRows move_rows) {
  const auto* local = reinterpret_cast<const Element*>(parameter);
  Element block[kTile * kTile];
  uint64_t sum = 0;
  for_each_tile(segment, kTile, [&](const Rectangle& tile) {
    for (int64_t col = 0; col < tile.cols; ++col) {
      const Element* stored = local + parameter_element(segment, tile.row, tile.col + col);
      for (int64_t row = 0; row < tile.rows; ++row) block[row * kTile + col] = stored[row];
    }
    sum += move_rows(
        RowMove::kCopy,
        tile_rows(segment, tile, reinterpret_cast<const std::byte*>(block),
                  wire + wire_byte(segment, tile.row, tile.col), kTile * int64_t{sizeof(Element)},
                  segment.cols * int64_t{sizeof(Element)}));
  });
  return sum;
}

template <typename Element>
uint64_t unpack_turned(const Segment& segment, std::byte* parameter, const std::byte* wire,
                       MoveRows move_rows) {
  auto* local = reinterpret_cast<Element*>(parameter);
  Element block[kTile * kTile];
  uint64_t sum = 0;
  for_each_tile(segment, kTile, [&](const Rectangle& tile) {
    sum += move_rows(
        RowMove::kCopy,
        tile_rows(segment, tile, wire + wire_byte(segment, tile.row, tile.col),
                  reinterpret_cast<std::byte*>(block), segment.cols * int64_t{sizeof(Element)},
                  kTile * int64_t{sizeof(Element)}));
    for (int64_t col = 0; col < tile.cols; ++col) {
      Element* stored = local + parameter_element(segment, tile.row, tile.col + col);
      for (int64_t row = 0; row < tile.rows; ++row) stored[row] = block[row * kTile + col];
    }
  });
  return sum;
}

inline float value_of(uint32_t bits) { return float_of(bits); }
inline float value_of(uint16_t bits) { return float_of(f32_from_bf16(bits)); }

// Largest magnitude of a block as bits: NaN above infinity above numbers.
template <typename Element>
uint32_t largest_magnitude(const Element* first, int64_t stride, const Rectangle& block) {
  uint32_t largest = 0;
  for (int64_t row = 0; row < block.rows; ++row) {
    const Element* values = first + row * stride;
    for (int64_t col = 0; col < block.cols; ++col)
      largest = std::max(largest, bits_of(value_of(values[col])) & kF32Magnitude);
  }
  return largest;
}

template <typename Element>
QuantisedDigests quantise(const Segment& segment, const BlockScales& scales,
                          const std::byte* parameter, std::byte* wire, MoveRows move_rows) {
  const auto* local = reinterpret_cast<const Element*>(parameter);
  uint8_t bytes[kBlock * kBlock];
  QuantisedDigests digests;
  for_each_tile(segment, kBlock, [&](const Rectangle& block) {
    const Element* first = local + parameter_element(segment, block.row, block.col);
    const float scale = fp8_scale(largest_magnitude(first, segment.stride, block));
    for (int64_t row = 0; row < block.rows; ++row) {
      const Element* values = first + row * segment.stride;
      for (int64_t col = 0; col < block.cols; ++col)
        bytes[row * kBlock + col] = quantised(value_of(values[col]), scale);
    }
    digests.elements +=
        move_rows(RowMove::kCopy,
                  tile_rows(segment, block, reinterpret_cast<std::byte*>(bytes),
                            wire + wire_byte(segment, block.row, block.col), kBlock, segment.cols));
    const int64_t row = block.row / kBlock, col = block.col / kBlock;
    std::memcpy(wire + scale_wire_byte(scales, segment, row, col), &scale, sizeof(scale));
    digests.scales += digest_element(bits_of(scale), scale_position_byte(scales, row, col));
  });
  return digests;
}

}  // namespace

uint64_t pack_transposed(const Segment& segment, const std::byte* parameter, std::byte* wire,
                         MoveRows move_rows) {
  switch (wire_element_bytes(segment.op)) {
    case 1:
      return pack_turned<uint8_t>(segment, parameter, wire, move_rows);
    case 2:
      return pack_turned<uint16_t>(segment, parameter, wire, move_rows);
    default:
      return pack_turned<uint32_t>(segment, parameter, wire, move_rows);
  }
}

uint64_t unpack_transposed(const Segment& segment, std::byte* parameter, const std::byte* wire,
                           MoveRows move_rows) {
  switch (wire_element_bytes(segment.op)) {
    case 1:
      return unpack_turned<uint8_t>(segment, parameter, wire, move_rows);
    case 2:
      return unpack_turned<uint16_t>(segment, parameter, wire, move_rows);
    default:
      return unpack_turned<uint32_t>(segment, parameter, wire, move_rows);
  }
}

QuantisedDigests pack_quantised(const Segment& segment, const BlockScales& scales,
                                const std::byte* parameter, std::byte* wire, MoveRows move_rows) {
  return segment.op == Op::kF32AsFp8
             ? quantise<uint32_t>(segment, scales, parameter, wire, move_rows)
             : quantise<uint16_t>(segment, scales, parameter, wire, move_rows);
}

}  // namespace asyncrl::reshard
