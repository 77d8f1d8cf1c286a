// The CPU executor:
//
//   segments, cut into one share of the bytes per thread -- rows.h or blocks.h --> copies, digests
//
// A share may end anywhere between rows, or between blocks where they share a scale; digests are
// sums, so they do not depend on the cut.
#include <algorithm>
#include <atomic>

#include "reshard/blocks.h"
#include "reshard/program.h"
#include "reshard/rows.h"
#include "reshard/workers.h"

namespace asyncrl::reshard {
namespace {

// Buckets of at least this size go around the cache, which would not hold them anyway.
constexpr int64_t kPastCacheBytes = int64_t{8} << 20;

struct Part {
  Segment segment;
  BlockScales scales;  // of a quantising segment
};

// A segment whose rows follow each other on all three sides is a single row.
Segment flattened(Segment segment) {
  const bool moves_rows = !is_transposed(segment.op) && !is_quantised(segment.op);
  if (moves_rows && segment.stride == segment.cols && segment.position_stride == segment.cols) {
    segment.cols *= segment.rows;
    segment.rows = 1;
  }
  return segment;
}

// The rows, or the columns of a single row, from `first` up to `last`.
Part cut(Part part, int64_t first, int64_t last) {
  Segment& segment = part.segment;
  const bool by_row = segment.rows > 1 || is_quantised(segment.op) || is_transposed(segment.op);
  const int64_t row = by_row ? first : 0, col = by_row ? 0 : first;
  const Segment whole = segment;
  segment.offset = parameter_element(whole, row, col);
  segment.wire = wire_byte(whole, row, col);
  segment.position += row * whole.position_stride + col;
  (by_row ? segment.rows : segment.cols) = last - first;
  if (is_quantised(whole.op)) {
    const int64_t block = row / kBlock;
    part.scales.wire = scale_wire_byte(part.scales, whole, block, 0);
    part.scales.position += block * part.scales.position_stride;
  }
  return part;
}

// Calls visit(part) for this share's parts of all segments.
template <typename Visit>
void for_each_part(const CopyProgram& program, int share, int num_shares, Visit visit) {
  int64_t total = 0;
  for (const Segment& segment : program.segments())
    total += segment.rows * segment.cols * wire_element_bytes(segment.op);
  const int64_t begin = total / num_shares * share;
  const int64_t end = share + 1 == num_shares ? total : total / num_shares * (share + 1);
  int64_t done = 0;
  size_t next_scales = 0;
  for (const Segment& original : program.segments()) {
    Part part = {flattened(original), {}};
    if (is_quantised(original.op)) part.scales = program.scales()[next_scales++];
    const Segment& segment = part.segment;
    const bool by_row = segment.rows > 1 || is_quantised(segment.op) || is_transposed(segment.op);
    const int64_t lines = by_row ? segment.rows : segment.cols;
    const int64_t line_bytes = (by_row ? segment.cols : 1) * wire_element_bytes(segment.op);
    const int64_t step = is_quantised(segment.op) ? kBlock : by_row ? 1 : 64;
    const auto line_at = [&](int64_t byte) {
      const int64_t inside = std::clamp(byte - done, int64_t{0}, lines * line_bytes);
      return inside == lines * line_bytes ? lines : inside / line_bytes / step * step;
    };
    const int64_t first = line_at(begin), last = line_at(end);
    if (first < last) visit(first == 0 && last == lines ? part : cut(part, first, last));
    done += lines * line_bytes;
  }
}

RowMove row_move(Op op, bool pack) {
  if (op == Op::kF32AsBf16) return pack ? RowMove::kRoundToWire : RowMove::kWidenOffWire;
  if (op == Op::kBf16AsF32) return pack ? RowMove::kWidenToWire : RowMove::kRoundOffWire;
  return RowMove::kCopy;
}

// The segment's rows, as they lie on the two sides.
Rows rows_of(const Segment& segment, const std::byte* source, std::byte* target, bool pack,
             bool past_cache) {
  const int64_t local_bytes = parameter_element_bytes(segment.op);
  const int64_t wire_bytes = wire_element_bytes(segment.op);
  const int64_t local_at = segment.offset * local_bytes;
  const int64_t local_stride = segment.stride * local_bytes;
  const int64_t wire_stride = segment.cols * wire_bytes;
  const bool counts_bytes = row_move(segment.op, pack) == RowMove::kCopy;
  return {source + (pack ? local_at : segment.wire),
          target + (pack ? segment.wire : local_at),
          pack ? local_stride : wire_stride,
          pack ? wire_stride : local_stride,
          segment.rows,
          segment.cols * (counts_bytes ? wire_bytes : 1),
          position_byte(segment, 0, 0),
          static_cast<uint64_t>(segment.position_stride * wire_bytes),
          past_cache};
}

// Adds to digests that other threads may add to at the same time, or not.
class Digests {
 public:
  Digests(uint64_t* digests, bool shared) : digests_(digests), shared_(shared) {}
  void add(int64_t digest, uint64_t sum) const {
    if (shared_) {
      std::atomic_ref(digests_[digest]).fetch_add(sum, std::memory_order_relaxed);
    } else {
      digests_[digest] += sum;
    }
  }

 private:
  uint64_t* digests_;
  bool shared_;
};

void pack_part(const Part& part, const std::byte* parameter, std::byte* wire, bool past_cache,
               const Digests& digests) {
  static const MoveRows move_rows = best_move_rows();
  const Segment& segment = part.segment;
  if (is_quantised(segment.op)) {
    const QuantisedDigests sums = pack_quantised(segment, part.scales, parameter, wire, move_rows);
    digests.add(segment.digest, sums.elements);
    digests.add(part.scales.digest, sums.scales);
  } else if (is_transposed(segment.op)) {
    digests.add(segment.digest, pack_transposed(segment, parameter, wire, move_rows));
  } else {
    digests.add(segment.digest, move_rows(row_move(segment.op, true),
                                          rows_of(segment, parameter, wire, true, past_cache)));
  }
}

void unpack_part(const Part& part, std::byte* parameter, const std::byte* wire, bool past_cache,
                 const Digests& digests) {
  static const MoveRows move_rows = best_move_rows();
  const Segment& segment = part.segment;
  const uint64_t sum = is_transposed(segment.op)
                           ? unpack_transposed(segment, parameter, wire, move_rows)
                           : move_rows(row_move(segment.op, false),
                                       rows_of(segment, wire, parameter, false, past_cache));
  digests.add(segment.digest, sum);
}

// Runs visit(part, digests) over the program, by the workers if there are any.
template <typename Visit>
void for_each_part(const CopyProgram& program, uint64_t* digests, CopyWorkers* workers,
                   Visit visit) {
  const int num_shares = workers ? workers->num_threads() : 1;
  const Digests sums(digests, num_shares > 1);
  const auto work = [&](int share) {
    for_each_part(program, share, num_shares, [&](const Part& part) { visit(part, sums); });
  };
  if (workers) {
    workers->run(work);
  } else {
    work(0);
  }
}

}  // namespace

void CopyProgram::pack(const std::vector<uint64_t>& parameters, std::byte* wire, uint64_t* digests,
                       CopyWorkers* workers) const {
  check_parameters(parameters.size());
  const bool past_cache = wire_bytes_ >= kPastCacheBytes;
  for_each_part(*this, digests, workers, [&](const Part& part, const Digests& sums) {
    const auto address = parameters[static_cast<size_t>(part.segment.parameter)];
    pack_part(part, reinterpret_cast<const std::byte*>(address), wire, past_cache, sums);
  });
}

void CopyProgram::unpack(const std::vector<uint64_t>& parameters, const std::byte* wire,
                         uint64_t* digests, CopyWorkers* workers) const {
  check_parameters(parameters.size());
  check_unpacks();
  const bool past_cache = wire_bytes_ >= kPastCacheBytes;
  for_each_part(*this, digests, workers, [&](const Part& part, const Digests& sums) {
    const auto address = parameters[static_cast<size_t>(part.segment.parameter)];
    unpack_part(part, reinterpret_cast<std::byte*>(address), wire, past_cache, sums);
  });
}

}  // namespace asyncrl::reshard
