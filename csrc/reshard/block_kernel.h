// Device code of transposed and quantised segments: a tile is a square of a segment, and the
// threads of a block meet between reading it and writing it.
#ifndef ASYNCRL_RESHARD_BLOCK_KERNEL_H_
#define ASYNCRL_RESHARD_BLOCK_KERNEL_H_

#include <cstddef>

#include "reshard/casts.h"
#include "reshard/device.h"
#include "reshard/digest.h"
#include "reshard/index.h"

namespace asyncrl::reshard {

constexpr int64_t kTurnedTile = 64;  // rows and columns

// One extra word per row, so that a column lies in as many memory banks as a row.
struct TurnedTile {
  uint32_t words[kTurnedTile][kTurnedTile + 1];
};

struct Square {
  int64_t row, col, rows, cols;
};

__device__ inline Square square_of(const Segment& segment, uint32_t tile, int64_t side) {
  const auto per_row = static_cast<uint32_t>((segment.cols + side - 1) / side);
  const int64_t row = tile / per_row * side, col = tile % per_row * side;
  return {row, col, segment.rows - row < side ? segment.rows - row : side,
          segment.cols - col < side ? segment.cols - col : side};
}

__device__ inline uint32_t load_element(const std::byte* address, int64_t bytes) {
  if (bytes == 1) return *reinterpret_cast<const uint8_t*>(address);
  if (bytes == 2) return *reinterpret_cast<const uint16_t*>(address);
  return *reinterpret_cast<const uint32_t*>(address);
}

__device__ inline void store_element(std::byte* address, int64_t bytes, uint32_t value) {
  if (bytes == 1) {
    *reinterpret_cast<uint8_t*>(address) = static_cast<uint8_t>(value);
  } else if (bytes == 2) {
    *reinterpret_cast<uint16_t*>(address) = static_cast<uint16_t>(value);
  } else {
    *reinterpret_cast<uint32_t*>(address) = value;
  }
}

// Neighbouring threads visit neighbours on the wire, or neighbours in the parameter.
template <bool kAlongWire, typename Visit>
__device__ void visit_square(const Square& square, unsigned thread, Visit visit) {
  for (unsigned idx = thread; idx < kTurnedTile * kTurnedTile; idx += kThreads) {
    const int64_t minor = idx % kTurnedTile, major = idx / kTurnedTile;
    const int64_t row = kAlongWire ? major : minor, col = kAlongWire ? minor : major;
    if (row < square.rows && col < square.cols) visit(row, col);
  }
}

template <bool kPack>
__device__ void move_turned(const Segment& segment, uint32_t tile_idx, std::byte* parameter,
                            std::byte* wire, uint64_t* digests, TurnedTile& tile) {
  const Square square = square_of(segment, tile_idx, kTurnedTile);
  const int64_t bytes = wire_element_bytes(segment.op);
  const auto local_at = [&](int64_t row, int64_t col) {
    return parameter + parameter_element(segment, square.row + row, square.col + col) * bytes;
  };
  const auto wire_at = [&](int64_t row, int64_t col) {
    return wire + wire_byte(segment, square.row + row, square.col + col);
  };
  each_thread([&](unsigned thread) {
    visit_square<!kPack>(square, thread, [&](int64_t row, int64_t col) {
      tile.words[row][col] = load_element(kPack ? local_at(row, col) : wire_at(row, col), bytes);
    });
  });
  block_barrier();
  each_thread([&](unsigned thread) {
    uint64_t sum = 0;
    visit_square<kPack>(square, thread, [&](int64_t row, int64_t col) {
      const uint32_t value = tile.words[row][col];
      store_element(kPack ? wire_at(row, col) : local_at(row, col), bytes, value);
      sum += digest_element(value, position_byte(segment, square.row + row, square.col + col));
    });
    add_to_digest(digests + segment.digest, sum);
  });
  block_barrier();  // the next tile is read into the same memory
}

template <typename Visit>
__device__ void visit_block(const Square& block, unsigned thread, Visit visit) {
  for (unsigned idx = thread; idx < kBlock * kBlock; idx += kThreads) {
    const int64_t row = idx / kBlock, col = idx % kBlock;
    if (row < block.rows && col < block.cols) visit(block.row + row, block.col + col);
  }
}

__device__ inline float float_at(const Segment& segment, const std::byte* parameter, int64_t row,
                                 int64_t col) {
  const int64_t bytes = parameter_element_bytes(segment.op);
  const uint32_t bits =
      load_element(parameter + parameter_element(segment, row, col) * bytes, bytes);
  return float_of(bytes == 2 ? f32_from_bf16(static_cast<uint16_t>(bits)) : bits);
}

// `largest` is shared by the block.
__device__ inline void quantise_block(const Segment& segment, const BlockScales& scales,
                                      uint32_t tile_idx, const std::byte* parameter,
                                      std::byte* wire, uint64_t* digests, unsigned& largest) {
  const Square block = square_of(segment, tile_idx, kBlock);
  each_thread([&](unsigned thread) {
    if (thread == 0) largest = 0;
  });
  block_barrier();
  each_thread([&](unsigned thread) {
    uint32_t magnitude = 0;
    visit_block(block, thread, [&](int64_t row, int64_t col) {
      const uint32_t bits = bits_of(float_at(segment, parameter, row, col)) & kF32Magnitude;
      magnitude = bits > magnitude ? bits : magnitude;
    });
    magnitude = warp_max(magnitude);
    if (is_warp_leader()) atomicMax(&largest, magnitude);
  });
  block_barrier();
  each_thread([&](unsigned thread) {
    const float scale = fp8_scale(largest);
    uint64_t sum = 0;
    visit_block(block, thread, [&](int64_t row, int64_t col) {
      const uint8_t value = quantised(float_at(segment, parameter, row, col), scale);
      store_element(wire + wire_byte(segment, row, col), 1, value);
      sum += digest_element(value, position_byte(segment, row, col));
    });
    add_to_digest(digests + segment.digest, sum);
    if (thread == 0) {
      const int64_t row = block.row / kBlock, col = block.col / kBlock;
      store_element(wire + scale_wire_byte(scales, segment, row, col), 4, bits_of(scale));
      const uint64_t term = digest_element(bits_of(scale), scale_position_byte(scales, row, col));
      atomicAdd(reinterpret_cast<unsigned long long*>(digests + scales.digest), term);
    }
  });
  block_barrier();  // `largest` is used again
}

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_BLOCK_KERNEL_H_
