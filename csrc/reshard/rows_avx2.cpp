// Rows by AVX2, eight units at a time. Per vector: the keys of its units (even and odd lanes), two
// 32 x 32 -> 64 bit products, and a sum for the 2^32 part of every factor; the three accumulators
// stay in registers over a row.
//
// Only whole lines of the target go around the cache, as a part of one would be merged by memory.
// What a row has before and after them goes through the cache, and so does what the next row has of
// the same line:
//
//   lines:   |        |        |        |        |        |
//   target:      row ================== next row ==================
//                cache|    around       |cache   |  around|cache
//
// Where nothing goes around, the last vector may overlap the one before: moving bytes twice is
// harmless, and lanes that count elsewhere are cleared before the digest.
#include "reshard/rows.h"

#ifdef __AVX2__
#include <immintrin.h>

#include "reshard/ahead.h"
#include "reshard/row_moves.h"

namespace asyncrl::reshard {
namespace {

constexpr int64_t kLanes = 8;

inline __m256i load_vector(const std::byte* address) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address));
}

template <bool kStream>
inline void store_vector(std::byte* address, __m256i value) {
  if constexpr (kStream) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(address), value);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(address), value);
  }
}

// bfloat16 of eight float32, in the low halves of the lanes.
inline __m256i round_lanes(__m256i bits) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
  const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), is_nan);
}

// Sixteen 16-bit values from the low halves of two vectors, in order.
inline __m256i narrow(__m256i first, __m256i second) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
}

// Eight 16-bit values to the high halves of the lanes: bfloat16 to float32.
inline __m256i widen(__m128i values) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16);
}

inline __m128i load_half(const std::byte* address) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(address));
}

// Moves eight units; returns them.
template <RowMove kMove, bool kStream>
inline __m256i move_vector(const std::byte* source, std::byte* target) {
  if constexpr (kMove == RowMove::kCopy) {
    const __m256i units = load_vector(source);
    store_vector<kStream>(target, units);
    return units;
  } else if constexpr (kMove == RowMove::kRoundToWire) {
    const __m256i units =
        narrow(round_lanes(load_vector(source)), round_lanes(load_vector(source + 32)));
    store_vector<kStream>(target, units);
    return units;
  } else if constexpr (kMove == RowMove::kWidenOffWire) {
    const __m256i units = load_vector(source);
    store_vector<kStream>(target, widen(_mm256_castsi256_si128(units)));
    store_vector<kStream>(target + 32, widen(_mm256_extracti128_si256(units, 1)));
    return units;
  } else if constexpr (kMove == RowMove::kWidenToWire) {
    const __m256i units = widen(load_half(source));
    store_vector<kStream>(target, units);
    return units;
  } else {
    static_assert(kMove == RowMove::kRoundOffWire && !kStream);
    const __m256i units = load_vector(source);
    const __m256i values = narrow(round_lanes(units), _mm256_setzero_si256());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(values));
    return units;
  }
}

inline __m256i lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

// Seeds of eight units that follow each other.
inline __m256i seeds_from(uint64_t unit) {
  const __m256i steps = _mm256_mullo_epi32(lane_numbers(), _mm256_set1_epi32(int(kKeyStep)));
  return _mm256_add_epi32(_mm256_set1_epi32(int(key_seed(unit))), steps);
}

struct Sums {
  __m256i even = _mm256_setzero_si256(), odd = even, plain = even;
  uint64_t singles = 0;  // of units that are moved one by one

  void add(__m256i units, __m256i seeds) {
    const __m256i folded = _mm256_xor_si256(seeds, _mm256_srli_epi32(seeds, 16));
    const __m256i twice = _mm256_add_epi32(folded, folded);
    const __m256i square =
        _mm256_mullo_epi32(folded, _mm256_sub_epi32(twice, _mm256_set1_epi32(-1)));
    const __m256i keys = _mm256_xor_si256(square, _mm256_srli_epi32(square, 15));
    even = _mm256_add_epi64(even, _mm256_mul_epu32(units, keys));
    odd = _mm256_add_epi64(
        odd, _mm256_mul_epu32(_mm256_srli_epi64(units, 32), _mm256_srli_epi64(keys, 32)));
    plain = _mm256_add_epi32(plain, units);
  }

  uint64_t total() const {
    alignas(32) uint64_t products[4];
    alignas(32) uint32_t values[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(products), _mm256_add_epi64(even, odd));
    _mm256_store_si256(reinterpret_cast<__m256i*>(values), plain);
    uint64_t sum = singles;
    for (const uint64_t product : products) sum += product;
    for (const uint32_t value : values) sum += static_cast<uint64_t>(value) << 32;
    return sum;
  }
};

// What all rows of a move share.
template <RowMove kMove>
struct Moved {
  explicit Moved(const Rows& rows)
      : ahead(rows, rows.elements * Move<kMove>::kSource),
        target(rows, rows.elements * Move<kMove>::kTarget) {}

  Sums sums;
  Ahead<> ahead;
  Target<> target;
};

// At least kLanes units, all of them below the same multiple of 2^32.
template <RowMove kMove, bool kStream>
class Run {
 public:
  static constexpr int64_t kPerUnit = kUnitBytes / Move<kMove>::kWire;
  static constexpr int64_t kSource = kPerUnit * Move<kMove>::kSource;  // bytes per unit
  static constexpr int64_t kTarget = kPerUnit * Move<kMove>::kTarget;
  static constexpr bool kCanStream = kTarget * kLanes >= 32;

  Run(const Moved<kMove>& moved, const std::byte* source, std::byte* target, int64_t count,
      uint64_t unit)
      : sums_(moved.sums), source_(source), target_(target), count_(count), unit_(unit) {}

  void move(Moved<kMove>& moved) {
    if constexpr (kStream) {
      moved.target.row_begins(target_);
      const int64_t before = units_before_line(target_);
      move_singly(before % kLanes);
      seeds_ = seeds_from(unit_ + static_cast<uint64_t>(done_));
      if (done_ < before) move_next<false>();
      end_ = done_ + (count_ - done_) / kTargetLine * kTargetLine;
    } else {
      seeds_ = seeds_from(unit_);
      end_ = count_;
    }
    int64_t asked = 0;
    if (!moved.ahead.line.holds()) {
      asked = move_asking_pieces(moved.ahead.pieces, moved.target);
    } else if (moved.ahead.line.has_gaps()) {
      move_asking_line<true>(moved.ahead.line, moved.target);
    } else {
      move_asking_line<false>(moved.ahead.line, moved.target);
    }
    move_rest();
    moved.ahead.pieces.row_moved(asked);
    moved.sums = sums_;
  }

  static bool can_align(const std::byte* target) {
    return kCanStream && reinterpret_cast<uintptr_t>(target) % kTarget == 0;
  }

 private:
  static constexpr int64_t kPerLine = kLine / kSource, kTargetLine = kLine / kTarget;  // units
  static constexpr int64_t kLinesPerPage = Target<>::kPage / (kPerLine * kTarget);

  template <bool kHasGaps>
  void move_asking_line(const StraightLine<>& line, const Target<>& target) {
    while (lines_left() > 0) {
      ask_for_page(target);
      const int64_t end = done_ + std::min(lines_left(), kLinesPerPage) * kPerLine;
      while (done_ < end) {
        line.template ask<kHasGaps>(source_, done_ * kSource);
        move_line();
      }
    }
  }

  // Returns for how many lines it asked.
  int64_t move_asking_pieces(Pieces<>& pieces, const Target<>& target) {
    const int64_t first = done_;
    pieces.row_begins(source_);
    while (pieces.is_live() && lines_left() > 0) {
      ask_for_page(target);
      const int64_t lines = std::min(lines_left(), pieces.lines_left());
      for (int64_t line = 0; line < lines; ++line) {
        pieces.ask(line);
        move_line();
      }
      pieces.asked(lines);
    }
    return (done_ - first) / kPerLine;
  }

  void move_rest() {
    while (done_ + kLanes <= end_) move_next<kStream>();
    if constexpr (kStream) {
      while (done_ + kLanes <= count_) move_next<false>();
      move_singly(count_ - done_);
    } else if (done_ < count_) {
      move_last_vector();
    }
  }

  int64_t lines_left() const { return (end_ - done_) / kPerLine; }

  void ask_for_page(const Target<>& target) {
    if (!kStream || done_ * kTarget < page_at_) return;
    target.ask(target_, page_at_);
    page_at_ += Target<>::kPage;
  }

  void move_line() {
    for (int64_t vector = 0; vector < kPerLine / kLanes; ++vector) move_next<kStream>();
  }

  template <bool kAround>
  void move_next() {
    sums_.add(move_vector<kMove, kAround>(source_ + done_ * kSource, target_ + done_ * kTarget),
              seeds_);
    seeds_ = _mm256_add_epi32(seeds_, _mm256_set1_epi32(int(kKeyStep * kLanes)));
    done_ += kLanes;
  }

  void move_singly(int64_t count) {
    sums_.singles += move_units<kMove>(source_ + done_ * kSource, target_ + done_ * kTarget, count,
                                       unit_ + static_cast<uint64_t>(done_));
    done_ += count;
  }

  // The last eight units, of which some were moved before; they do not count again.
  void move_last_vector() {
    const int64_t first = count_ - kLanes;
    const __m256i units =
        move_vector<kMove, false>(source_ + first * kSource, target_ + first * kTarget);
    const __m256i counted =
        _mm256_cmpgt_epi32(lane_numbers(), _mm256_set1_epi32(int(done_ - first - 1)));
    sums_.add(_mm256_and_si256(units, counted), seeds_from(unit_ + static_cast<uint64_t>(first)));
  }

  static int64_t units_before_line(const std::byte* target) {
    return static_cast<int64_t>((0 - reinterpret_cast<uintptr_t>(target)) % kLine) / kTarget;
  }

  Sums sums_;  // a copy that nothing else can reach: stays in registers
  const std::byte* source_;
  std::byte* target_;
  int64_t count_;
  uint64_t unit_;
  int64_t done_ = 0;     // units
  int64_t end_ = 0;      // of the vectors; of those that go around the cache where some do
  int64_t page_at_ = 0;  // byte of the target before which to ask for a page again
  __m256i seeds_;
};

template <RowMove kMove>
uint64_t move_rows(const Rows& rows) {
  using Around = Run<kMove, Run<kMove, false>::kCanStream>;  // the cache
  Moved<kMove> moved(rows);
  const bool past_cache = rows.past_cache;
  const uint64_t ends = for_each_row<kMove>(
      rows, [&](const std::byte* source, std::byte* target, int64_t count, uint64_t unit) {
        const bool crosses = (unit >> 32) != ((unit + static_cast<uint64_t>(count) - 1) >> 32);
        if (count < kLanes || crosses) {
          moved.sums.singles += move_units<kMove>(source, target, count, unit);
          moved.ahead.pieces.row_moved(0);
        } else if (past_cache && count >= 3 * kLanes && Around::can_align(target)) {
          Around(moved, source, target, count, unit).move(moved);
        } else {
          Run<kMove, false>(moved, source, target, count, unit).move(moved);
        }
      });
  if (past_cache) _mm_sfence();
  return ends + moved.sums.total();
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
