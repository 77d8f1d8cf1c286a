// Rows on any processor: the loop over units is plain, for the compiler's vectoriser.
#include "reshard/row_moves.h"
#include "reshard/rows.h"

namespace asyncrl::reshard {
namespace {

template <RowMove kMove>
uint64_t move_rows(const Rows& rows) {
  uint64_t inner = 0;
  const uint64_t ends = for_each_row<kMove>(
      rows, [&inner](const std::byte* source, std::byte* target, int64_t count, uint64_t unit) {
        inner += move_units<kMove>(source, target, count, unit);
      });
  return inner + ends;
}

}  // namespace

uint64_t move_rows_portable(RowMove move, const Rows& rows) {
  switch (move) {
    case RowMove::kCopy:
      return move_rows<RowMove::kCopy>(rows);
    case RowMove::kRoundToWire:
      return move_rows<RowMove::kRoundToWire>(rows);
    case RowMove::kWidenOffWire:
      return move_rows<RowMove::kWidenOffWire>(rows);
    case RowMove::kWidenToWire:
      return move_rows<RowMove::kWidenToWire>(rows);
    case RowMove::kRoundOffWire:
      return move_rows<RowMove::kRoundOffWire>(rows);
  }
  return 0;
}

MoveRows best_move_rows() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && avx2_move_rows()) return avx2_move_rows();
#endif
  return move_rows_portable;
}

}  // namespace asyncrl::reshard
