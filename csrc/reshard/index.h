// Index arithmetic of weight copies, the same for the CPU executor, the CUDA kernels and their
// emulation. A segment is one rectangle of a parameter and the contiguous run of wire bytes that
// carries it; a bucket is the wire bytes of many segments.
//
//   parameter (strided rows)  -- pack -->  bucket (rows back to back)  -- unpack -->  parameter
//
// While copying, every wire element adds a term keyed by its position in the receiver's parameter
// to a 64-bit digest (digest.h).
#ifndef ASYNCRL_RESHARD_INDEX_H_
#define ASYNCRL_RESHARD_INDEX_H_

#include <cstdint>

#include "reshard/host_device.h"

namespace asyncrl::reshard {

// How an element of the parameter becomes an element of the wire, and back.
enum class Op : int64_t {
  kCopy1 = 1,  // the number is the element's size in bytes, the same on both sides
  kCopy2 = 2,
  kCopy4 = 4,
  kF32AsBf16 = 5,  // float32 in the parameter, bfloat16 on the wire
  kBf16AsF32 = 6,  // bfloat16 in the parameter, float32 on the wire
  kCopy8 = 8,
  // Pack only: float8 e4m3fn on the wire, one float32 scale per block of 128 x 128 elements,
  // counted from the segment's first element. The receiver copies bytes and scales.
  kF32AsFp8 = 9,
  kBf16AsFp8 = 10,
  // The parameter holds the transposed rectangle: element (row, col) at offset + col * stride +
  // row.
  kTranspose1 = 17,  // 16 + the element's size
  kTranspose2 = 18,
  kTranspose4 = 20
};

struct Segment {
  int64_t parameter;  // index of the local parameter
  int64_t offset;     // of the rectangle's first element in it, in elements
  int64_t stride;     // between rows of the parameter as it is stored, in elements
  int64_t rows;
  int64_t cols;
  int64_t wire;             // offset of the first element in the bucket, in bytes
  int64_t position;         // of the first element in the receiver's parameter, in elements
  int64_t position_stride;  // between rows there, in elements
  int64_t digest;           // index of the digest that the elements add to
  Op op;
};
inline constexpr int kSegmentFields = 10;
static_assert(sizeof(Segment) == kSegmentFields * sizeof(int64_t));

// Where the scales of a quantising segment go: a rectangle of one float32 per block.
struct BlockScales {
  int64_t segment;          // index of the segment that is quantised
  int64_t wire;             // offset of the first scale in the bucket, in bytes
  int64_t position;         // of the first scale in the receiver's parameter of scales, in elements
  int64_t position_stride;  // between rows of blocks there, in elements
  int64_t digest;           // index of the digest that the scales add to
};
inline constexpr int kBlockScalesFields = 5;
static_assert(sizeof(BlockScales) == kBlockScalesFields * sizeof(int64_t));
inline constexpr int64_t kBlock = 128;  // rows and columns that share a scale

ASYNCRL_HOST_DEVICE constexpr bool is_transposed(Op op) { return static_cast<int64_t>(op) > 16; }

ASYNCRL_HOST_DEVICE constexpr bool is_quantised(Op op) {
  return op == Op::kF32AsFp8 || op == Op::kBf16AsFp8;
}

ASYNCRL_HOST_DEVICE constexpr int64_t parameter_element_bytes(Op op) {
  if (op == Op::kF32AsBf16 || op == Op::kF32AsFp8) return 4;
  if (op == Op::kBf16AsF32 || op == Op::kBf16AsFp8) return 2;
  return static_cast<int64_t>(op) & 15;
}

ASYNCRL_HOST_DEVICE constexpr int64_t wire_element_bytes(Op op) {
  if (op == Op::kF32AsBf16) return 2;
  if (op == Op::kBf16AsF32) return 4;
  if (is_quantised(op)) return 1;
  return static_cast<int64_t>(op) & 15;
}

ASYNCRL_HOST_DEVICE int64_t parameter_element(const Segment& segment, int64_t row, int64_t col) {
  return is_transposed(segment.op) ? segment.offset + col * segment.stride + row
                                   : segment.offset + row * segment.stride + col;
}

ASYNCRL_HOST_DEVICE int64_t wire_byte(const Segment& segment, int64_t row, int64_t col) {
  return segment.wire + (row * segment.cols + col) * wire_element_bytes(segment.op);
}

// Byte of the receiver's parameter, in wire elements: what keys the digest.
ASYNCRL_HOST_DEVICE uint64_t position_byte(const Segment& segment, int64_t row, int64_t col) {
  return static_cast<uint64_t>((segment.position + row * segment.position_stride + col) *
                               wire_element_bytes(segment.op));
}

ASYNCRL_HOST_DEVICE constexpr int64_t num_blocks(int64_t elements) {
  return (elements + kBlock - 1) / kBlock;
}

// Scales are numbered by row and column of their block.
ASYNCRL_HOST_DEVICE int64_t scale_wire_byte(const BlockScales& scales, const Segment& segment,
                                            int64_t row, int64_t col) {
  return scales.wire + (row * num_blocks(segment.cols) + col) * 4;
}

ASYNCRL_HOST_DEVICE uint64_t scale_position_byte(const BlockScales& scales, int64_t row,
                                                 int64_t col) {
  return static_cast<uint64_t>(scales.position + row * scales.position_stride + col) * 4;
}

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_INDEX_H_
