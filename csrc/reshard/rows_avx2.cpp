// Rows by AVX2, eight units at a time.
//
// Rows whose target is whole lines take a short way: everything goes around the cache. Of others
// only whole lines of the target do, as a part of one would be merged by memory. What such a row
// has before and after them goes through the cache, and so does what the next row has of the same
// line:
//
//   lines:   |        |        |        |        |        |
//   target:      row ================== next row ==================
//                cache|    around       |cache   |  around|cache
//
// Where nothing goes around, the last vector may overlap the one before: moving bytes twice is
// harmless, and lanes that count elsewhere are cleared before the digest.
#include "reshard/rows.h"

#ifdef __AVX2__
#include "reshard/ahead.h"
#include "reshard/row_moves.h"
#include "reshard/vectors_avx2.h"

namespace asyncrl::reshard {
namespace {

// Of a unit at the source and at the target, in bytes; and how many there are in a line of each.
template <RowMove kMove>
struct Units {
  static constexpr int64_t kPerUnit = kUnitBytes / Move<kMove>::kWire;
  static constexpr int64_t kSource = kPerUnit * Move<kMove>::kSource;
  static constexpr int64_t kTarget = kPerUnit * Move<kMove>::kTarget;
  static constexpr int64_t kSourceLine = kLine / kSource, kTargetLine = kLine / kTarget;
  static constexpr bool kCanGoAround = kTarget * kLanes >= 32;
};

// What all rows of a move share.
template <RowMove kMove>
struct Moved {
  explicit Moved(const Rows& rows)
      : ahead(rows, rows.elements * Move<kMove>::kSource, rows.elements * Move<kMove>::kTarget) {}

  Sums sums;
  Ahead<> ahead;
};

// Where the copy of a row is.
template <RowMove kMove>
struct Place {
  const std::byte* source;
  std::byte* target;
  __m256i seeds;  // of the next units

  template <bool kAround>
  ASYNCRL_INLINED void move_vector_to(Sums& sums) {
    sums.add(move_vector<kMove, kAround>(source, target), seeds);
    seeds = next_seeds(seeds);
    source += kLanes * Units<kMove>::kSource, target += kLanes * Units<kMove>::kTarget;
  }
};

// Moves so many lines of the source. Works on copies that nothing else can reach, so that they stay
// in registers: for all the compiler knows, every store to the target could change the originals.
template <RowMove kMove, bool kAround, typename Lines>
ASYNCRL_INLINED void move_lines(Moved<kMove>& moved, Place<kMove>& place, int64_t lines,
                                const Lines ahead) {
  using U = Units<kMove>;
  if constexpr (kAround)
    moved.ahead.target.goes_on(place.target, lines * U::kSourceLine * U::kTarget);
  Sums sums = moved.sums;
  Place<kMove> at = place;
  for (int64_t line = 0; line < lines; ++line) {
    ahead.ask(at.source);
    for (int64_t vector = 0; vector < U::kSourceLine / kLanes; ++vector)
      at.template move_vector_to<kAround>(sums);
  }
  moved.sums = sums, place = at;
}

template <RowMove kMove, bool kAround, bool kHasGaps>
ASYNCRL_INLINED void move_straight(Moved<kMove>& moved, Place<kMove>& place, int64_t lines) {
  constexpr int64_t kAtOnce = 64;
  const StraightLine<>::Lines<kHasGaps> ahead = {place.source};
  for (; lines > 0; lines -= kAtOnce)
    move_lines<kMove, kAround>(moved, place, std::min(lines, kAtOnce), ahead);
}

template <RowMove kMove, bool kAround, bool kShort>
ASYNCRL_INLINED void move_pieces(Moved<kMove>& moved, Place<kMove>& place, int64_t lines) {
  Pieces<>& pieces = moved.ahead.pieces;
  for (int64_t piece = 0; lines > 0; ++piece, lines -= pieces.lines())
    move_lines<kMove, kAround>(moved, place, std::min(lines, pieces.lines()),
                               pieces.piece<kShort>(piece));
}

// Moves a row's lines of the source.
template <RowMove kMove, bool kAround>
ASYNCRL_INLINED void move_row(Moved<kMove>& moved, Place<kMove>& place, int64_t lines) {
  if (moved.ahead.line.holds()) {
    if (moved.ahead.line.has_gaps()) {
      move_straight<kMove, kAround, true>(moved, place, lines);
    } else {
      move_straight<kMove, kAround, false>(moved, place, lines);
    }
  } else if (moved.ahead.pieces.is_short()) {
    move_pieces<kMove, kAround, true>(moved, place, lines);
  } else {
    move_pieces<kMove, kAround, false>(moved, place, lines);
  }
}

// Any row of at least kLanes units, all of them below the same multiple of 2^32.
template <RowMove kMove, bool kAround>
class Row {
 public:
  Row(Moved<kMove>& moved, const std::byte* source, std::byte* target, int64_t count, uint64_t unit)
      : moved_(moved), place_{source, target, {}}, left_(count), end_(unit + uint64_t(count)) {}

  void move() {
    int64_t vectors = left_;  // units that go the same way
    moved_.ahead.template row_begins<kAround>(place_.source, place_.target);
    if constexpr (kAround) {
      move_up_to_line();
      vectors = left_ / U::kTargetLine * U::kTargetLine;
    } else {
      place_.seeds = seeds_from(next_unit());
    }
    const int64_t lines = vectors / U::kSourceLine;
    move_row<kMove, kAround>(moved_, place_, lines);
    left_ -= lines * U::kSourceLine, vectors -= lines * U::kSourceLine;
    for (; vectors >= kLanes; vectors -= kLanes) move_next<kAround>();
    if constexpr (kAround) {
      while (left_ >= kLanes) move_next<false>();
      move_singly(left_);
    } else if (left_ > 0) {
      move_last_vector();
    }
  }

  static bool can_go_around(const std::byte* target, int64_t count) {
    return U::kCanGoAround && count >= 3 * kLanes &&
           reinterpret_cast<uintptr_t>(target) % U::kTarget == 0;
  }

 private:
  using U = Units<kMove>;

  uint64_t next_unit() const { return end_ - static_cast<uint64_t>(left_); }

  void move_up_to_line() {
    const int64_t units =
        static_cast<int64_t>((0 - reinterpret_cast<uintptr_t>(place_.target)) % kLine) / U::kTarget;
    move_singly(units % kLanes);
    place_.seeds = seeds_from(next_unit());
    if (units >= kLanes) move_next<false>();
  }

  template <bool kThisAround>
  void move_next() {
    place_.template move_vector_to<kThisAround>(moved_.sums);
    left_ -= kLanes;
  }

  void move_singly(int64_t count) {
    moved_.sums.singles += move_units<kMove>(place_.source, place_.target, count, next_unit());
    place_.source += count * U::kSource, place_.target += count * U::kTarget;
    left_ -= count;
  }

  // The last eight units, of which some were moved before; they do not count again.
  void move_last_vector() {
    const int64_t again = kLanes - left_;
    const __m256i units = move_vector<kMove, false>(place_.source - again * U::kSource,
                                                    place_.target - again * U::kTarget);
    const __m256i counted = _mm256_cmpgt_epi32(lane_numbers(), _mm256_set1_epi32(int(again - 1)));
    moved_.sums.add(_mm256_and_si256(units, counted), seeds_from(end_ - kLanes));
  }

  Moved<kMove>& moved_;
  Place<kMove> place_;
  int64_t left_;  // units
  uint64_t end_;  // the unit after the last
};

// Whether the target of every row is whole lines, and the source as many or half of them.
template <RowMove kMove>
bool are_whole_lines(const Rows& rows) {
  using M = Move<kMove>;
  const int64_t source_bytes = rows.elements * M::kSource,
                target_bytes = rows.elements * M::kTarget;
  const uint64_t last = rows.position + uint64_t(rows.rows - 1) * rows.position_stride +
                        uint64_t(rows.elements * M::kWire - 1);
  const auto target = static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows.target));
  return ((target | rows.target_stride | target_bytes | source_bytes) % kLine == 0) &&
         ((rows.position | rows.position_stride) % kUnitBytes == 0) &&
         rows.position / kUnitBytes >> 32 == last / kUnitBytes >> 32;
}

// The short way.
template <RowMove kMove>
uint64_t move_whole_lines(const Rows& rows) {
  Moved<kMove> moved(rows);
  const int64_t lines = rows.elements * Move<kMove>::kSource / kLine;
  const std::byte* source = rows.source;
  std::byte* target = rows.target;
  uint64_t unit = rows.position / kUnitBytes;
  for (int64_t row = 0; row < rows.rows; ++row) {
    Place<kMove> place = {source, target, seeds_from(unit)};
    moved.ahead.template row_begins<true>(source, target);
    move_row<kMove, true>(moved, place, lines);
    source += rows.source_stride, target += rows.target_stride;
    unit += rows.position_stride / kUnitBytes;
  }
  return moved.sums.total();
}

template <RowMove kMove>
uint64_t move_each_row(const Rows& rows) {
  constexpr bool kCanGoAround = Units<kMove>::kCanGoAround;
  Moved<kMove> moved(rows);
  const bool past_cache = rows.past_cache;
  const uint64_t ends = for_each_row<kMove>(
      rows, [&](const std::byte* source, std::byte* target, int64_t count, uint64_t unit) {
        const bool crosses = (unit >> 32) != ((unit + static_cast<uint64_t>(count) - 1) >> 32);
        if (count < kLanes || crosses) {
          moved.sums.singles += move_units<kMove>(source, target, count, unit);
        } else if (past_cache && Row<kMove, kCanGoAround>::can_go_around(target, count)) {
          Row<kMove, kCanGoAround>(moved, source, target, count, unit).move();
        } else {
          Row<kMove, false>(moved, source, target, count, unit).move();
        }
      });
  return ends + moved.sums.total();
}

template <RowMove kMove>
uint64_t move_rows(const Rows& rows) {
  if constexpr (Units<kMove>::kCanGoAround) {
    if (rows.past_cache) {
      const uint64_t digest =
          are_whole_lines<kMove>(rows) ? move_whole_lines<kMove>(rows) : move_each_row<kMove>(rows);
      _mm_sfence();
      return digest;
    }
  }
  return move_each_row<kMove>(rows);
}

uint64_t move_any_rows(RowMove move, const Rows& rows) {
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

}  // namespace

MoveRows avx2_move_rows() { return move_any_rows; }

}  // namespace asyncrl::reshard
#else

namespace asyncrl::reshard {

MoveRows avx2_move_rows() { return nullptr; }

}  // namespace asyncrl::reshard
#endif
