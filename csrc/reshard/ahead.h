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
//                                                      0  1  2  3  4  5   pieces of 4 to 16 KiB
//
// Memory answers for six pages side by side faster than for one after the other; lines at the same
// place of every page would meet in one bank.
//
// Pages must be found before their lines can come: one line of each is asked for long before the
// others. In the source of such rows when a row begins, for the first and the last page of one that
// is 18 pieces away. In a target that is written around the cache, which is not to be loaded, but
// where a store waits for its page, and all that follow wait for the store: for the first two pages
// of the next row when a row begins, for the others two pages ahead.
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
      : source_(source), row_bytes_(row_bytes), gap_(gap) {
    rows_per_piece_ = std::max<int64_t>(kShortPiece / row_bytes, 1);
    pieces_per_row_ = std::max<int64_t>(row_bytes / kLongPiece, 1);
    piece_bytes_ = (row_bytes * rows_per_piece_ + pieces_per_row_ - 1) / pieces_per_row_;
    left_ = (rows * pieces_per_row_ + rows_per_piece_ - 1) / rows_per_piece_ - kPieces;
    if (!is_live()) return;
    rounds_ = (piece_bytes_ + kLine - 1) / kLine;
    int64_t offset = 0, in_row = 0;
    for (int64_t round = 0; round < rounds_; ++round) {
      offsets_[round] = offset;
      offset += kLine;
      for (in_row += kLine; in_row >= row_bytes; in_row -= row_bytes) offset += gap;
    }
    for (int64_t round = rounds_; round < rounds_ + kPieces * kStagger; ++round)
      offsets_[round] = offsets_[round - rounds_];
    const int64_t rows_early = std::max<int64_t>(kEarly * rows_per_piece_ / pieces_per_row_, 1);
    early_ = rows_early * (row_bytes + gap);
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

  // The end of a row, of which so many bytes were asked for. The rest counts too: the pieces must
  // not drift away from the copy.
  void row_moved(int64_t asked_bytes) {
    behind_ += row_bytes_ - asked_bytes;
    for (; behind_ >= kLine && is_live(); behind_ -= kLine) {
      ask(0);
      asked(1);
    }
  }

 private:
  static constexpr int64_t kPieces = 6, kShortPiece = 4096;
  static constexpr int64_t kLongPiece = 8192;  // at most: pieces are shorter than two of these
  static constexpr int64_t kMostRounds = 2 * kLongPiece / kLine;
  static constexpr int64_t kStagger = 8;  // rounds
  static constexpr int64_t kEarly = 3 * kPieces;

  void next_block() {
    // A piece that does not end with a line is asked for a little slower than it is copied.
    surplus_ += rounds_ * kLine - piece_bytes_;
    round_ = surplus_ / kLine;
    surplus_ %= kLine;
    left_ -= kPieces;
    if (is_live()) start_block();
  }

  void start_block() {
    first_ += kPieces;
    for (int64_t turn = 0; turn < kPieces; ++turn) {
      const int64_t piece = first_ + std::min(turn, left_ - 1);
      const int64_t row = piece / pieces_per_row_ * rows_per_piece_;
      pieces_[turn] = source_ + row * (row_bytes_ + gap_) + piece % pieces_per_row_ * piece_bytes_;
    }
  }

  const std::byte* source_ = nullptr;
  int64_t row_bytes_ = 0, gap_ = 0, early_ = 0;
  Pages<Memory> pages_;
  int64_t rows_per_piece_ = 1, pieces_per_row_ = 1, piece_bytes_ = 0;
  int64_t left_ = 0;                  // pieces that are to be asked for
  int64_t first_ = 0, turn_ = 0;      // the first piece of the block, the one that is next
  int64_t round_ = 0, rounds_ = 0;    // over all six
  int64_t surplus_ = 0, behind_ = 0;  // bytes
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
class TargetPages {
 public:
  static constexpr int64_t kPage = Pages<Memory>::kPage;

  TargetPages(const Rows& rows, int64_t row_bytes)
      : stride_(rows.target_stride),
        row_bytes_(row_bytes),
        second_(std::min(kPage, row_bytes - 1)) {}

  // The start of a row.
  ASYNCRL_INLINED void row_begins(const std::byte* row) {
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
  int64_t stride_, row_bytes_;
  int64_t second_;  // a byte of a row's second page
  Pages<Memory> pages_;
};

#undef ASYNCRL_INLINED

}  // namespace
}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_AHEAD_H_
