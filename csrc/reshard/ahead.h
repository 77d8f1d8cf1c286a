// Asks for the source of a copy, and for the pages of its target, before they are needed.
//
// Of the source one line whenever a line is copied, where rows have no gaps: they are a straight
// line, which memory foresees. Asked for a page and three quarters ahead, so that reading and
// writing do not keep meeting in one bank. So are short rows with gaps no longer than themselves,
// gaps and all: a straight line is worth more than the bytes saved.
//
// Other rows: the line at the same place of the pieces that come next, four of them.
//
//   source, as it is copied:   | is copied |    4    |    3    |    2    |    1    |
//                                 pieces of 1 to 4 KiB, and how often asked for by then
//
// Four times, as a core drops requests that it cannot take at once. Into the second cache, which
// can wait for more lines than the first; but those of short rows, of which memory foresees
// nothing, into the first.
//
// Pages must be found before their lines can come: of each one line is asked for long before the
// others. In the source of such rows when a row begins, for the first and the last page of one that
// is 8 pieces away.
//
// A target that is written around the cache is not to be loaded; but a store waits for its page,
// and all that follow wait for the store. So pages are asked for: the first two of the next row
// when a row begins, the others two pages ahead. And where rows end within a line, which goes
// through the cache, the ends of a row that is 2 KiB away.
//
// Internal linkage: files that include this are built for different processors.
#ifndef ASYNCRL_RESHARD_AHEAD_H_
#define ASYNCRL_RESHARD_AHEAD_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "reshard/rows.h"

namespace asyncrl::reshard {
namespace {

constexpr int64_t kLine = 64;

// Inlined always, also by files that include this: GCC drops calls of a function that does nothing
// but prefetch.
#define ASYNCRL_INLINED [[gnu::always_inline]] inline

struct Prefetch {
  ASYNCRL_INLINED static void line(const std::byte* address) { __builtin_prefetch(address, 0, 0); }
  ASYNCRL_INLINED static void line_to_second(const std::byte* address) {
    __builtin_prefetch(address, 0, 2);
  }
  ASYNCRL_INLINED static void line_to_write(const std::byte* address) {
    __builtin_prefetch(address, 1, 3);
  }
};

// The pages that rows come to, one after the other.
template <typename Memory>
class Pages {
 public:
  static constexpr int64_t kPage = 4096;

  // Asks for a line there if its page is new.
  ASYNCRL_INLINED void find(const std::byte* address) {
    if (address < found_) return;
    Memory::line(address);
    found_ = address + kPage - reinterpret_cast<uintptr_t>(address) % kPage;
  }

 private:
  const std::byte* found_ = nullptr;  // the end of the last one
};

template <typename Memory = Prefetch>
class StraightLine {
 public:
  StraightLine(int64_t row_bytes, int64_t gap)
      : holds_(gap == 0 || (row_bytes < kShortRow && gap > 0 && gap <= row_bytes)),
        has_gaps_(gap != 0) {}

  bool holds() const { return holds_; }
  bool has_gaps() const { return has_gaps_; }

  // What to ask for while the lines of a row are copied.
  template <bool kHasGaps>
  struct Lines {
    const std::byte* row;

    ASYNCRL_INLINED void ask(const std::byte* line) const {
      if constexpr (kHasGaps) {
        Memory::line(line + (line - row) + kDistance);
        Memory::line(line + (line - row) + kDistance + kLine);
      } else {
        Memory::line(line + kDistance);
      }
    }
  };

 private:
  static constexpr int64_t kShortRow = 2048, kDistance = 7168;
  bool holds_, has_gaps_;
};

template <typename Memory = Prefetch>
class Pieces {
 public:
  Pieces(const Rows& rows, int64_t row_bytes)
      : stride_(rows.source_stride), row_bytes_(row_bytes), rows_left_(rows.rows) {
    const int64_t lines = (row_bytes + kLine - 1) / kLine;
    per_row_ = std::max<int64_t>(row_bytes / kPiece, 1);
    lines_ = (lines + per_row_ - 1) / per_row_;
    step_ = std::max<int64_t>(kPiece / std::max(row_bytes, kLine), 1);
    early_ = std::max<int64_t>(kEarly * step_ / per_row_, 1);
    is_short_ = row_bytes < kShortRow;
    ends_within_lines_ =
        (reinterpret_cast<uintptr_t>(rows.source) | stride_ | row_bytes) % kLine != 0;
  }
  Pieces() = default;

  bool is_short() const { return is_short_; }  // the row
  int64_t lines() const { return lines_; }     // of a piece, at most

  // What to ask for while the lines of a piece are copied.
  template <bool kShort>
  struct Lines {
    std::array<int64_t, 4> distances;

    ASYNCRL_INLINED void ask(const std::byte* line) const {
      for (const int64_t distance : distances)
        kShort ? Memory::line(line + distance) : Memory::line_to_second(line + distance);
    }
  };

  // The start of a row.
  ASYNCRL_INLINED void row_begins(const std::byte* row) {
    --rows_left_;
    const std::byte* early = row + to_row(early_);
    pages_.find(early);
    pages_.find(early + row_bytes_ - 1);
    if (!ends_within_lines_) return;
    is_short_ ? ask_for_ends<true>(row) : ask_for_ends<false>(row);
  }

  // A row's piece 0, 1, ...
  template <bool kShort>
  ASYNCRL_INLINED Lines<kShort> piece(int64_t piece) const {
    return {{to_piece(piece, 4 * step_), to_piece(piece, 3 * step_), to_piece(piece, 2 * step_),
             to_piece(piece, step_)}};
  }

 private:
  static constexpr int64_t kPiece = 2048;  // longer rows are cut in pieces that are not shorter
  static constexpr int64_t kEarly = 8, kShortRow = 512;

  // What other rows touch besides the lines that are asked for while this one is copied, wherever
  // those begin: the line of the first byte, and the lines of the last 64.
  template <bool kShort>
  ASYNCRL_INLINED void ask_for_ends(const std::byte* row) const {
    const Lines<kShort> rows = {
        {to_row(4 * step_), to_row(3 * step_), to_row(2 * step_), to_row(step_)}};
    rows.ask(row);
    if (row_bytes_ > kLine) rows.ask(row + row_bytes_ - kLine);
    rows.ask(row + row_bytes_ - 1);
  }

  // Distances to what comes so many rows or pieces later; after the last row, to a place in this
  // one.
  ASYNCRL_INLINED int64_t to_row(int64_t further) const {
    return further > rows_left_ ? 0 : further * stride_;
  }
  ASYNCRL_INLINED int64_t to_piece(int64_t piece, int64_t further) const {
    if (per_row_ == 1) return to_row(further);
    const int64_t at = piece + further;
    return to_row(at / per_row_) + (at % per_row_ - piece) * lines_ * kLine;
  }

  int64_t stride_ = 0, row_bytes_ = 0;
  int64_t per_row_ = 1, lines_ = 0;
  int64_t step_ = 1;       // pieces, or rows, to what is asked for
  int64_t early_ = 0;      // rows to the one whose pages are asked for
  int64_t rows_left_ = 0;  // after the current one
  bool is_short_ = false, ends_within_lines_ = false;
  Pages<Memory> pages_;
};

template <typename Memory = Prefetch>
class Target {
 public:
  static constexpr int64_t kPage = Pages<Memory>::kPage;

  Target(const Rows& rows, int64_t row_bytes)
      : stride_(rows.target_stride),
        row_bytes_(row_bytes),
        second_(std::min(kPage, row_bytes - 1)),
        ends_(std::max<int64_t>(kEndsAhead / std::max<int64_t>(row_bytes, 1), 1) * stride_),
        ends_within_lines_(
            (reinterpret_cast<uintptr_t>(rows.target) | stride_ | row_bytes) % kLine != 0) {}

  // The start of a row.
  ASYNCRL_INLINED void row_begins(const std::byte* row) {
    if (ends_within_lines_) {
      Memory::line_to_write(row + ends_);
      Memory::line_to_write(row + ends_ + row_bytes_ - 1);
    }
    const std::byte* next = row + stride_;
    pages_.find(next);
    pages_.find(next + second_);
    page_ = row, end_ = row + row_bytes_;
  }

  // Before the next bytes of the row are written.
  ASYNCRL_INLINED void goes_on(const std::byte* address, int64_t bytes) {
    for (; page_ < address + bytes; page_ += kPage)
      if (page_ + kPage < end_) Memory::line(std::min(page_ + 2 * kPage, end_ - 1));
  }

 private:
  static constexpr int64_t kEndsAhead = 2048;

  int64_t stride_, row_bytes_;
  int64_t second_;  // a byte of a row's second page
  int64_t ends_;    // to the row whose ends are asked for
  bool ends_within_lines_;
  const std::byte *page_ = nullptr, *end_ = nullptr;  // of the row: where to ask again, its end
  Pages<Memory> pages_;
};

template <typename Memory = Prefetch>
struct Ahead {
  StraightLine<Memory> line;
  Pieces<Memory> pieces;
  Target<Memory> target;

  Ahead(const Rows& rows, int64_t source_bytes, int64_t target_bytes)  // of a row
      : line(source_bytes, rows.rows == 1 ? 0 : rows.source_stride - source_bytes),
        pieces(line.holds() ? Pieces<Memory>() : Pieces<Memory>(rows, source_bytes)),
        target(rows, target_bytes) {}

  // The start of a row, from its first byte on.
  template <bool kAround>
  ASYNCRL_INLINED void row_begins(const std::byte* source, const std::byte* begin) {
    if (!line.holds()) pieces.row_begins(source);
    if constexpr (kAround) target.row_begins(begin);
  }
};

}  // namespace
}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_AHEAD_H_
