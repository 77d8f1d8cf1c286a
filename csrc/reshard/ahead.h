// Asks for the source of a copy, and for the pages of its target, before they are needed.
//
// Of the source one line whenever a line is copied.
//
// Rows without gaps are a straight line, which memory foresees: a page and three quarters ahead, so
// that reading and writing do not keep meeting in one bank. So are short rows with gaps no longer
// than themselves, gaps and all: a straight line is worth more than the bytes saved.
//
// Other rows: from six pieces in turns, each begun at another of its lines.
//
//   source, in the order of copying:   | being copied | being asked for |
//                                                      0  1  2  3  4  5   pieces of 2 to 16 KiB
//
// Memory answers for six pages side by side faster than for one after the other; lines at the same
// place of every page would meet in one bank.
//
// Pages must be found before their lines can come: one line of each is asked for long before the
// others. In the source of such rows when a row begins, for the first and the last page of one that
// is 18 pieces away.
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
#include <cstddef>
#include <cstdint>

#include "reshard/rows.h"

namespace asyncrl::reshard {
namespace {

constexpr int64_t kLine = 64;

// Inlined always: GCC drops calls of a function that does nothing but prefetch.
#define ASYNCRL_INLINED [[gnu::always_inline]] inline

struct Prefetch {
  ASYNCRL_INLINED static void line(const std::byte* address) { __builtin_prefetch(address, 0, 0); }
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
  template <bool kHasGaps>
  ASYNCRL_INLINED void ask(const std::byte* row, int64_t offset) const {
    if constexpr (kHasGaps) {
      Memory::line(row + 2 * offset + kDistance);
      Memory::line(row + 2 * offset + kDistance + kLine);
    } else {
      Memory::line(row + offset + kDistance);
    }
  }

 private:
  static constexpr int64_t kShortRow = 2048, kDistance = 7168;
  bool holds_, has_gaps_;
};

template <typename Memory = Prefetch>
class Pieces {
 public:
  Pieces(const std::byte* source, int64_t rows, int64_t row_bytes, int64_t gap)
      : source_(source), row_bytes_(row_bytes), stride_(row_bytes + gap) {
    const int64_t lines = lines_touched();
    pieces_per_row_ = std::max<int64_t>(row_bytes / kLongPiece, 1);
    rows_per_piece_ = std::max(std::min(kShortPiece / row_bytes, kMostRounds / lines), int64_t{1});
    lines_per_row_ = (lines + pieces_per_row_ - 1) / pieces_per_row_;  // of the piece
    rounds_ = rows_per_piece_ * lines_per_row_;
    left_ = (rows * pieces_per_row_ + rows_per_piece_ - 1) / rows_per_piece_ - kPieces;
    if (!is_live()) return;
    for (int64_t round = 0; round < rounds_; ++round)
      offsets_[round] = round / lines_per_row_ * stride_ + round % lines_per_row_ * kLine;
    for (int64_t round = rounds_; round < rounds_ + kPieces * kStagger; ++round)
      offsets_[round] = offsets_[round - rounds_];
    early_ = std::max<int64_t>(kEarly * rows_per_piece_ / pieces_per_row_, 1) * stride_;
    start_block();
  }
  Pieces() = default;  // never live

  // Something is left to ask for.
  bool is_live() const { return left_ > 0; }

  // The start of a row.
  ASYNCRL_INLINED void row_begins(const std::byte* row) {
    pages_.find(row + early_);
    pages_.find(row + early_ + row_bytes_ - 1);
  }

  // Asks for a line while one is copied: 0, 1, ... below lines_left(). Then tell how many.
  int64_t lines_left() const { return kPieces - turn_; }
  ASYNCRL_INLINED void ask(int64_t line) const {
    const int64_t turn = turn_ + line;
    Memory::line(pieces_[turn] + offsets_[round_ + turn * kStagger]);
  }
  void asked(int64_t lines) {
    turn_ += lines;
    if (turn_ < kPieces) return;
    turn_ = 0;
    if (++round_ >= rounds_) next_block();
  }

  // The end of a row, in which so many lines were asked for; the others follow, so that the pieces
  // do not drift away from the copy.
  void row_moved(int64_t lines_asked) {
    for (int64_t line = lines_asked; line < lines_per_row_ * pieces_per_row_ && is_live(); ++line) {
      ask(0);
      asked(1);
    }
  }

 private:
  static constexpr int64_t kPieces = 6, kShortPiece = 4096;
  static constexpr int64_t kLongPiece = 8192;  // at most: pieces are shorter than two of these
  static constexpr int64_t kMostRounds = 2 * kLongPiece / kLine + 1;
  static constexpr int64_t kStagger = 8;  // rounds
  static constexpr int64_t kEarly = 3 * kPieces;

  // By a row, at most; very short ones are taken for a line.
  int64_t lines_touched() const {
    const bool is_aligned = (reinterpret_cast<uintptr_t>(source_) | stride_) % kLine == 0;
    const int64_t before = is_aligned || row_bytes_ < kLine ? 0 : kLine - 1;
    return (before + row_bytes_ + kLine - 1) / kLine;
  }

  void next_block() {
    round_ = 0;
    left_ -= kPieces;
    if (is_live()) start_block();
  }

  void start_block() {
    first_ += kPieces;
    for (int64_t turn = 0; turn < kPieces; ++turn) {
      const int64_t piece = first_ + std::min(turn, left_ - 1);
      const int64_t row = piece / pieces_per_row_ * rows_per_piece_;
      pieces_[turn] = source_ + row * stride_ + piece % pieces_per_row_ * lines_per_row_ * kLine;
    }
  }

  const std::byte* source_ = nullptr;
  int64_t row_bytes_ = 0, stride_ = 0, early_ = 0;
  Pages<Memory> pages_;
  int64_t rows_per_piece_ = 1, pieces_per_row_ = 1, lines_per_row_ = 0;
  int64_t left_ = 0;                // pieces that are to be asked for
  int64_t first_ = 0, turn_ = 0;    // the first piece of the block, the one that is next
  int64_t round_ = 0, rounds_ = 0;  // over all six
  const std::byte* pieces_[kPieces] = {};
  int64_t offsets_[kMostRounds + kPieces * kStagger];  // of the lines of a piece, and again
};

template <typename Memory = Prefetch>
struct Ahead {
  StraightLine<Memory> line;
  Pieces<Memory> pieces;

  Ahead(const Rows& rows, int64_t row_bytes)
      : Ahead(rows, row_bytes, rows.rows == 1 ? 0 : rows.source_stride - row_bytes) {}

 private:
  Ahead(const Rows& rows, int64_t row_bytes, int64_t gap)
      : line(row_bytes, gap),
        pieces(line.holds() || row_bytes == 0
                   ? Pieces<Memory>()
                   : Pieces<Memory>(rows.source, rows.rows, row_bytes, gap)) {}
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
  }

  // Before a row's next kPage bytes, of which `offset` are written.
  ASYNCRL_INLINED void ask(const std::byte* row, int64_t offset) const {
    if (offset + kPage < row_bytes_)
      Memory::line(row + std::min(offset + 2 * kPage, row_bytes_ - 1));
  }

 private:
  static constexpr int64_t kEndsAhead = 2048;

  int64_t stride_, row_bytes_;
  int64_t second_;  // a byte of a row's second page
  int64_t ends_;    // to the row whose ends are asked for
  bool ends_within_lines_;
  Pages<Memory> pages_;
};

#undef ASYNCRL_INLINED

}  // namespace
}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_AHEAD_H_
