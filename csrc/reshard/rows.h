// Moves a rectangle of rows between a parameter and a bucket on the CPU, and digests it on the way:
//
//   source rows -- copy or cast --> target rows
//                      +-- the units that are on the wire, keyed by position --> 64-bit digest
//
// One implementation for every processor, one for AVX2; both give the same bits.
#ifndef ASYNCRL_RESHARD_ROWS_H_
#define ASYNCRL_RESHARD_ROWS_H_

#include <cstddef>
#include <cstdint>

namespace asyncrl::reshard {

enum class RowMove {
  kCopy,          // bytes
  kRoundToWire,   // float32 -> bfloat16, which is on the wire
  kWidenOffWire,  // bfloat16, which is on the wire, -> float32
  kWidenToWire,   // bfloat16 -> float32, which is on the wire
  kRoundOffWire   // float32, which is on the wire, -> bfloat16
};

// Strides and positions in bytes; source and target never overlap.
struct Rows {
  const std::byte* source;
  std::byte* target;
  int64_t source_stride;
  int64_t target_stride;
  int64_t rows;
  int64_t elements;   // per row; bytes where the move is kCopy
  uint64_t position;  // of the first element in the receiver's parameter, as on the wire
  uint64_t position_stride;
  bool past_cache;  // the target is larger than the cache: do not load it there
};

// Returns the digest of the rows.
using MoveRows = uint64_t (*)(RowMove, const Rows&);
uint64_t move_rows_portable(RowMove move, const Rows& rows);

// Null where the library was built without it; to be called only on processors that have AVX2.
MoveRows avx2_move_rows();

// The best implementation for this processor.
MoveRows best_move_rows();

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_ROWS_H_
