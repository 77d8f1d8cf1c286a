// Checks of a segment table; all sums are overflow-safe because every field is bounded first.
#include "reshard/program.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace asyncrl::reshard {
namespace {

constexpr int64_t kLargest = int64_t{1}
                             << 44;  // elements; products of two stay below 2^63 by the checks

bool is_known(Op op) {
  switch (op) {
    case Op::kCopy1:
    case Op::kCopy2:
    case Op::kCopy4:
    case Op::kF32AsBf16:
    case Op::kBf16AsF32:
    case Op::kCopy8:
    case Op::kF32AsFp8:
    case Op::kBf16AsFp8:
    case Op::kTranspose1:
    case Op::kTranspose2:
    case Op::kTranspose4:
      return true;
  }
  return false;
}

bool in_range(int64_t value, int64_t low, int64_t high) { return low <= value && value < high; }

// True where rows x cols elements at this stride end within `elements`.
bool fits(int64_t offset, int64_t stride, int64_t rows, int64_t cols, int64_t elements) {
  if (!in_range(offset, 0, kLargest) || !in_range(cols, 1, kLargest)) return false;
  if (!in_range(rows, 1, kLargest) || !in_range(stride, 0, kLargest)) return false;
  if (rows > 1 && (stride < cols || rows - 1 > elements / stride)) return false;
  return offset + (rows - 1) * stride + cols <= elements;
}

const char* problem_of(const Segment& segment, const std::vector<int64_t>& parameter_bytes,
                       int64_t wire_bytes, int64_t num_digests) {
  if (!is_known(segment.op)) return "unknown operation";
  const auto num_parameters = static_cast<int64_t>(parameter_bytes.size());
  if (!in_range(segment.parameter, 0, num_parameters)) return "no such parameter";
  if (!in_range(segment.digest, 0, num_digests)) return "no such digest";
  const int64_t elements =
      parameter_bytes[static_cast<size_t>(segment.parameter)] / parameter_element_bytes(segment.op);
  const bool turned = is_transposed(segment.op);
  if (!fits(segment.offset, segment.stride, turned ? segment.cols : segment.rows,
            turned ? segment.rows : segment.cols, elements))
    return "outside its parameter";
  const int64_t element_bytes = wire_element_bytes(segment.op);
  if (segment.wire < 0 || segment.wire % element_bytes) return "misaligned in the bucket";
  if (!fits(segment.wire / element_bytes, segment.cols, segment.rows, segment.cols,
            wire_bytes / element_bytes))
    return "outside the bucket";
  if (!fits(segment.position, segment.position_stride, segment.rows, segment.cols, kLargest))
    return "impossible positions";
  return nullptr;
}

const char* problem_of(const BlockScales& scales, const Segment& segment, int64_t wire_bytes,
                       int64_t num_digests) {
  const int64_t rows = num_blocks(segment.rows), cols = num_blocks(segment.cols);
  if (!in_range(scales.digest, 0, num_digests)) return "no such digest of its scales";
  if (scales.wire < 0 || scales.wire % 4) return "its scales are misaligned in the bucket";
  if (!fits(scales.wire / 4, cols, rows, cols, wire_bytes / 4))
    return "its scales are outside the bucket";
  if (!fits(scales.position, scales.position_stride, rows, cols, kLargest))
    return "impossible positions of its scales";
  return nullptr;
}

[[noreturn]] void refuse(size_t segment_idx, const char* problem) {
  throw std::invalid_argument("segment " + std::to_string(segment_idx) +
                              " of a copy program: " + problem);
}

}  // namespace

CopyProgram::CopyProgram(std::vector<Segment> segments, const std::vector<int64_t>& parameter_bytes,
                         int64_t wire_bytes, int64_t num_digests, std::vector<BlockScales> scales)
    : segments_(std::move(segments)),
      scales_(std::move(scales)),
      num_parameters_(static_cast<int64_t>(parameter_bytes.size())),
      wire_bytes_(wire_bytes),
      num_digests_(num_digests) {
  for (size_t idx = 0; idx < segments_.size(); ++idx) {
    const char* problem = problem_of(segments_[idx], parameter_bytes, wire_bytes, num_digests);
    if (problem) refuse(idx, problem);
  }
  check_scales(wire_bytes, num_digests);
}

void CopyProgram::check_scales(int64_t wire_bytes, int64_t num_digests) const {
  size_t next = 0;
  for (size_t idx = 0; idx < segments_.size(); ++idx) {
    if (!is_quantised(segments_[idx].op)) continue;
    if (next == scales_.size() || scales_[next].segment != static_cast<int64_t>(idx))
      refuse(idx, "quantises, but has no entry in the table of scales");
    const char* problem = problem_of(scales_[next++], segments_[idx], wire_bytes, num_digests);
    if (problem) refuse(idx, problem);
  }
  if (next != scales_.size())
    throw std::invalid_argument("a copy program has scales of a segment that does not quantise");
}

void CopyProgram::check_parameters(size_t num_parameters) const {
  if (static_cast<int64_t>(num_parameters) != num_parameters_)
    throw std::invalid_argument("a copy program got " + std::to_string(num_parameters) +
                                " parameters, it was built for " + std::to_string(num_parameters_));
}

void CopyProgram::check_unpacks() const {
  if (!scales_.empty())
    throw std::invalid_argument("segment " + std::to_string(scales_.front().segment) +
                                " of a copy program quantises; it can only be packed");
}

}  // namespace asyncrl::reshard
