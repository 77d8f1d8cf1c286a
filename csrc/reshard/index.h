// Index arithmetic of weight copies, the same for the CPU executor, the CUDA kernels and their
// emulation. A segment is one rectangle of a parameter and the contiguous run of wire bytes that
// carries it; a bucket is the wire bytes of many segments.
//
//   parameter (strided rows)  -- pack -->  bucket (rows back to back)  -- unpack -->  parameter
//
// While copying, every wire element adds a term keyed by its position in the receiver's parameter
// to a 64-bit digest, so that pieces may be summed in any order and a moved or changed element
// shows.
#ifndef ASYNCRL_RESHARD_INDEX_H_
#define ASYNCRL_RESHARD_INDEX_H_

#include <cstdint>

#ifdef __CUDACC__
#define ASYNCRL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ASYNCRL_HOST_DEVICE inline
#endif

namespace asyncrl::reshard {

// How an element of the parameter becomes an element of the wire, and back.
enum class Op : int64_t {
  kCopy1 = 1,  // the number is the element's size in bytes, the same on both sides
  kCopy2 = 2,
  kCopy4 = 4,
  kF32AsBf16 = 5  // float32 in the parameter, bfloat16 on the wire
};

struct Segment {
  int64_t parameter;  // index of the local parameter
  int64_t offset;     // of the rectangle's first element in it, in elements
  int64_t stride;     // between rows of the parameter, in elements
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

ASYNCRL_HOST_DEVICE constexpr int64_t parameter_element_bytes(Op op) {
  return op == Op::kF32AsBf16 ? 4 : static_cast<int64_t>(op);
}

ASYNCRL_HOST_DEVICE constexpr int64_t wire_element_bytes(Op op) {
  return op == Op::kF32AsBf16 ? 2 : static_cast<int64_t>(op);
}

ASYNCRL_HOST_DEVICE int64_t parameter_element(const Segment& segment, int64_t row, int64_t col) {
  return segment.offset + row * segment.stride + col;
}

ASYNCRL_HOST_DEVICE int64_t wire_byte(const Segment& segment, int64_t row, int64_t col) {
  return segment.wire + (row * segment.cols + col) * wire_element_bytes(segment.op);
}

ASYNCRL_HOST_DEVICE uint64_t position_of(const Segment& segment, int64_t row, int64_t col) {
  return static_cast<uint64_t>(segment.position + row * segment.position_stride + col);
}

// One 32 x 32 -> 64 bit product per element. With the position fixed the term is injective in the
// value, so a single changed element always changes the sum.
ASYNCRL_HOST_DEVICE uint64_t digest_term(uint32_t wire_bits, uint64_t position) {
  const uint64_t key = (position + 1) * 0x9E3779B97F4A7C15ull;
  return static_cast<uint64_t>(wire_bits ^ static_cast<uint32_t>(key)) *
         static_cast<uint64_t>(static_cast<uint32_t>(key >> 32) | 1u);
}

// Round to nearest even; every NaN becomes the quiet 0x7FC0.
ASYNCRL_HOST_DEVICE uint16_t bf16_from_f32(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded);
}

ASYNCRL_HOST_DEVICE uint32_t f32_from_bf16(uint16_t bits) {
  return static_cast<uint32_t>(bits) << 16;
}

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_INDEX_H_
