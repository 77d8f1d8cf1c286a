// The CPU executor: one pass per segment row that copies, casts and digests. The loops are written
// for the compiler's vectoriser and cloned for AVX2, chosen when the library is loaded.
#include <cstring>
#include <type_traits>

#include "reshard/program.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ASYNCRL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ASYNCRL_CLONES
#endif

namespace asyncrl::reshard {
namespace {

// Rows of `count` elements: source and target never overlap.
template <typename Element>
inline uint64_t copy_row(const Element* __restrict source, Element* __restrict target,
                         int64_t count, uint64_t position) {
  uint64_t sum = 0;
  for (int64_t idx = 0; idx < count; ++idx) {
    const Element value = source[idx];
    target[idx] = value;
    sum += digest_term(value, position + static_cast<uint64_t>(idx));
  }
  return sum;
}

ASYNCRL_CLONES uint64_t copy_row1(const uint8_t* source, uint8_t* target, int64_t count,
                                  uint64_t position) {
  return copy_row(source, target, count, position);
}
ASYNCRL_CLONES uint64_t copy_row2(const uint16_t* source, uint16_t* target, int64_t count,
                                  uint64_t position) {
  return copy_row(source, target, count, position);
}
ASYNCRL_CLONES uint64_t copy_row4(const uint32_t* source, uint32_t* target, int64_t count,
                                  uint64_t position) {
  return copy_row(source, target, count, position);
}

ASYNCRL_CLONES uint64_t round_row(const uint32_t* __restrict source, uint16_t* __restrict target,
                                  int64_t count, uint64_t position) {
  uint64_t sum = 0;
  for (int64_t idx = 0; idx < count; ++idx) {
    const uint16_t value = bf16_from_f32(source[idx]);
    target[idx] = value;
    sum += digest_term(value, position + static_cast<uint64_t>(idx));
  }
  return sum;
}

ASYNCRL_CLONES uint64_t widen_row(const uint16_t* __restrict source, uint32_t* __restrict target,
                                  int64_t count, uint64_t position) {
  uint64_t sum = 0;
  for (int64_t idx = 0; idx < count; ++idx) {
    const uint16_t value = source[idx];
    target[idx] = f32_from_bf16(value);
    sum += digest_term(value, position + static_cast<uint64_t>(idx));
  }
  return sum;
}

// Calls row_copy(parameter row, wire row, element count, position) for every row of a segment.
template <typename ParameterElement, typename WireElement, typename Parameter, typename Wire,
          typename RowCopy>
uint64_t for_each_row(const Segment& segment, Parameter* parameter, Wire* wire, RowCopy row_copy) {
  using Local =
      std::conditional_t<std::is_const_v<Parameter>, const ParameterElement, ParameterElement>;
  using Remote = std::conditional_t<std::is_const_v<Wire>, const WireElement, WireElement>;
  auto* local = reinterpret_cast<Local*>(parameter);
  uint64_t sum = 0;
  for (int64_t row = 0; row < segment.rows; ++row) {
    auto* remote = reinterpret_cast<Remote*>(wire + wire_byte(segment, row, 0));
    sum += row_copy(local + parameter_element(segment, row, 0), remote, segment.cols,
                    position_of(segment, row, 0));
  }
  return sum;
}

// A segment whose rows follow each other on all three sides is copied as a single row.
Segment flattened(Segment segment) {
  if (segment.stride == segment.cols && segment.position_stride == segment.cols) {
    segment.cols *= segment.rows;
    segment.rows = 1;
  }
  return segment;
}

uint64_t pack_segment(const Segment& segment, const std::byte* parameter, std::byte* wire) {
  switch (segment.op) {
    case Op::kCopy1:
      return for_each_row<uint8_t, uint8_t>(segment, parameter, wire, copy_row1);
    case Op::kCopy2:
      return for_each_row<uint16_t, uint16_t>(segment, parameter, wire, copy_row2);
    case Op::kCopy4:
      return for_each_row<uint32_t, uint32_t>(segment, parameter, wire, copy_row4);
    case Op::kF32AsBf16:
      return for_each_row<uint32_t, uint16_t>(segment, parameter, wire, round_row);
  }
  return 0;
}

// Turns a row copy from the wire into the (parameter, wire) order of for_each_row.
template <auto kCopy>
constexpr auto reversed = [](auto* local, auto* remote, int64_t count, uint64_t position) {
  return kCopy(remote, local, count, position);
};

uint64_t unpack_segment(const Segment& segment, std::byte* parameter, const std::byte* wire) {
  switch (segment.op) {
    case Op::kCopy1:
      return for_each_row<uint8_t, uint8_t>(segment, parameter, wire, reversed<copy_row1>);
    case Op::kCopy2:
      return for_each_row<uint16_t, uint16_t>(segment, parameter, wire, reversed<copy_row2>);
    case Op::kCopy4:
      return for_each_row<uint32_t, uint32_t>(segment, parameter, wire, reversed<copy_row4>);
    case Op::kF32AsBf16:
      return for_each_row<uint32_t, uint16_t>(segment, parameter, wire, reversed<widen_row>);
  }
  return 0;
}

}  // namespace

void CopyProgram::pack(const std::vector<uint64_t>& parameters, std::byte* wire,
                       uint64_t* digests) const {
  check_parameters(parameters.size());
  for (const Segment& segment : segments_) {
    const auto* parameter = reinterpret_cast<const std::byte*>(parameters[segment.parameter]);
    digests[segment.digest] += pack_segment(flattened(segment), parameter, wire);
  }
}

void CopyProgram::unpack(const std::vector<uint64_t>& parameters, const std::byte* wire,
                         uint64_t* digests) const {
  check_parameters(parameters.size());
  for (const Segment& segment : segments_) {
    auto* parameter = reinterpret_cast<std::byte*>(parameters[segment.parameter]);
    digests[segment.digest] += unpack_segment(flattened(segment), parameter, wire);
  }
}

}  // namespace asyncrl::reshard
