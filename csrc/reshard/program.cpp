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
  return op == Op::kCopy1 || op == Op::kCopy2 || op == Op::kCopy4 || op == Op::kF32AsBf16;
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
  if (!fits(segment.offset, segment.stride, segment.rows, segment.cols, elements))
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

}  // namespace

CopyProgram::CopyProgram(std::vector<Segment> segments, const std::vector<int64_t>& parameter_bytes,
                         int64_t wire_bytes, int64_t num_digests)
    : segments_(std::move(segments)),
      num_parameters_(static_cast<int64_t>(parameter_bytes.size())),
      wire_bytes_(wire_bytes),
      num_digests_(num_digests) {
  for (size_t idx = 0; idx < segments_.size(); ++idx) {
    const char* problem = problem_of(segments_[idx], parameter_bytes, wire_bytes, num_digests);
    if (problem) {
      throw std::invalid_argument("segment " + std::to_string(idx) +
                                  " of a copy program: " + problem);
    }
  }
}

void CopyProgram::check_parameters(size_t num_parameters) const {
  if (static_cast<int64_t>(num_parameters) != num_parameters_)
    throw std::invalid_argument("a copy program got " + std::to_string(num_parameters) +
                                " parameters, it was built for " + std::to_string(num_parameters_));
}

}  // namespace asyncrl::reshard
