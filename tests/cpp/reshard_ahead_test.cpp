// What copies of rows ask for ahead (reshard/ahead.h), followed line by line for many shapes.
// Prints the first shape that is not served.
#include <algorithm>
#include <cstdio>
#include <unordered_map>

#include "require.h"
#include "reshard/ahead.h"

namespace asyncrl::reshard::testing {
namespace {

// Writes down when and how often each line was asked for.
struct AskedLines {
  struct Asked {
    int64_t first, last;  // bytes copied by then
    int64_t times = 0;
  };
  static inline std::unordered_map<int64_t, Asked> at;       // by line
  static inline std::unordered_map<int64_t, int64_t> pages;  // when first a line of the page
  static inline std::unordered_map<int64_t, int64_t> to_write;
  static inline int64_t copied = 0;
  static void line(const std::byte* address) {
    const auto place = reinterpret_cast<intptr_t>(address);
    Asked& asked = at.try_emplace(place / kLine, Asked{copied, copied}).first->second;
    asked.times += 1, asked.last = copied;
    pages.try_emplace(place / kPage, copied);
  }
  static void line_to_second(const std::byte* address) { line(address); }
  static void line_to_write(const std::byte* address) {
    to_write.try_emplace(reinterpret_cast<intptr_t>(address) / kLine, copied);
  }
  static void clear() { at.clear(), pages.clear(), to_write.clear(); }
  // How many bytes before it is copied; 0 if never.
  static int64_t page_lead(intptr_t address, int64_t position) {
    const auto asked = pages.find(address / kPage);
    return asked == pages.end() ? 0 : position - asked->second;
  }
  static constexpr intptr_t kPage = 4096;
};

// The copy of one row's whole lines from `shift` on, as the executor does it; `position` is of the
// row.
void copy_row(Ahead<AskedLines>& ahead, const std::byte* row, int64_t row_bytes, int64_t position,
              int64_t shift) {
  const int64_t lines = (row_bytes - shift) / kLine;
  const auto copy = [&](int64_t first, int64_t count, const auto& asking) {
    for (int64_t line = first; line < first + count; ++line) {
      AskedLines::copied = position + shift + line * kLine;
      asking.ask(row + shift + line * kLine);
    }
  };
  AskedLines::copied = position;
  ahead.row_begins<false>(row, nullptr);
  if (ahead.line.holds() && ahead.line.has_gaps()) {
    copy(0, lines, StraightLine<AskedLines>::Lines<true>{row + shift});
  } else if (ahead.line.holds()) {
    copy(0, lines, StraightLine<AskedLines>::Lines<false>{row + shift});
  } else {
    const int64_t at_once = ahead.pieces.lines();
    for (int64_t piece = 0; piece * at_once < lines; ++piece) {
      const int64_t first = piece * at_once, count = std::min(at_once, lines - first);
      if (ahead.pieces.is_short()) {
        copy(first, count, ahead.pieces.piece<true>(piece));
      } else {
        copy(first, count, ahead.pieces.piece<false>(piece));
      }
    }
  }
}

// Follows the copy of `rows` rows from `start`: but for the first ones, every line must have been
// asked for (of a straight line nearly every one) long enough before it is copied, and not so long
// that the cache has dropped it, most of them three times and late as well; none after the last
// row, hardly any in gaps; and one of a page that the row before did not come to much earlier.
void ask_for_what_follows(int64_t rows, int64_t row_bytes, int64_t stride, int64_t start,
                          int64_t shift) {
  constexpr intptr_t kSource = intptr_t{1} << 40;
  Rows moved = {};
  moved.source = reinterpret_cast<const std::byte*>(kSource + start);
  moved.source_stride = stride, moved.rows = rows;
  AskedLines::clear();
  Ahead<AskedLines> ahead(moved, row_bytes, row_bytes);
  const bool is_straight = ahead.line.holds();
  const int64_t settled = is_straight ? 40000 : std::max<int64_t>(5 * row_bytes, 40000);
  const int64_t soonest = is_straight ? 1024 : 4096,
                longest = std::max<int64_t>(8 * 4096, 5 * row_bytes);
  const int64_t times = is_straight ? 1 : 3;
  for (int64_t row = 0; row < rows; ++row)
    copy_row(ahead, moved.source + row * stride, row_bytes, row * row_bytes,
             is_straight ? 0 : shift);
  int64_t lines = 0, in_time = 0, often = 0, late = 0, rows_seen = 0, found_early = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const intptr_t begin = kSource + start + row * stride, end = begin + row_bytes;
    for (intptr_t line = begin / kLine; line * kLine < end; ++line) {
      const int64_t position = row * row_bytes + std::max<int64_t>(line * kLine - begin, 0);
      if (position < settled) continue;
      const auto asked = AskedLines::at.find(line);
      const bool is_known = asked != AskedLines::at.end();
      const int64_t lead = is_known ? position - asked->second.first : 0;
      lines += 1, in_time += is_known && lead >= soonest && lead <= longest;
      often += is_known && asked->second.times >= times;
      late += is_known && position - asked->second.last <= 4096 + kLine;
    }
    if (row * row_bytes < settled) continue;
    const int64_t lead = AskedLines::page_lead(begin, row * row_bytes);
    rows_seen += 1, found_early += lead >= 8000;
  }
  // Of a straight line memory foresees the rest.
  const int64_t percent = !is_straight ? 100 : row_bytes < 256 ? 50 : 90;
  require(lines > 0 && in_time >= lines * percent / 100,
          "%ld rows of %ld, stride %ld, from %ld: %ld of %ld lines were asked for in time", rows,
          row_bytes, stride, start, in_time, lines);
  require(often >= lines * std::min<int64_t>(percent, 95) / 100,
          "%ld rows of %ld, stride %ld, from %ld: %ld of %ld lines were asked for often enough",
          rows, row_bytes, stride, start, often, lines);
  require(is_straight || late >= lines * 8 / 10,
          "%ld rows of %ld, stride %ld, from %ld: %ld of %ld lines were asked for late", rows,
          row_bytes, stride, start, late, lines);
  require(is_straight || found_early >= rows_seen * 9 / 10,
          "%ld rows of %ld, stride %ld, from %ld: %ld of %ld were found early", rows, row_bytes,
          stride, start, found_early, rows_seen);
  const intptr_t end = kSource + start + (rows - 1) * stride + row_bytes;
  const auto beyond = std::count_if(AskedLines::at.begin(), AskedLines::at.end(),
                                    [end](const auto& line) { return line.first * kLine >= end; });
  require(is_straight || beyond <= row_bytes / 2048,
          "%ld rows of %ld, stride %ld, from %ld: %ld lines after the last row were asked for",
          rows, row_bytes, stride, start, beyond);
  const auto asked = static_cast<int64_t>(AskedLines::at.size());
  const int64_t reached = rows * (is_straight ? stride : row_bytes + row_bytes / 32 + 2 * kLine);
  require(asked * kLine <= reached + settled,
          "%ld rows of %ld, stride %ld, from %ld: %ld lines asked for", rows, row_bytes, stride,
          start, asked);
}

// Follows the writing of `rows` rows: but for those of the first row, every page must have been
// asked for before it is written, at most two pages and a row ahead; by one or two lines. So must
// every line that a row fills in part, but for those of the first 2 KiB.
void ask_for_the_target(int64_t rows, int64_t row_bytes, int64_t stride, int64_t start,
                        int64_t at_once) {
  constexpr intptr_t kTarget = intptr_t{1} << 40;
  constexpr int64_t kPage = Target<AskedLines>::kPage;
  Rows moved = {};
  moved.target = reinterpret_cast<std::byte*>(kTarget + start);
  moved.target_stride = stride, moved.rows = rows;
  AskedLines::clear();
  Target<AskedLines> target(moved, row_bytes);
  std::unordered_map<int64_t, int64_t> written;  // page: bytes written before it
  for (int64_t row = 0; row < rows; ++row) {
    const std::byte* begin = moved.target + row * stride;
    AskedLines::copied = row * row_bytes;
    target.row_begins(begin);
    for (int64_t done = 0; done < row_bytes; done += kLine) {
      AskedLines::copied = row * row_bytes + done;
      if (done % at_once == 0) target.goes_on(begin + done, std::min(at_once, row_bytes - done));
      const intptr_t address = reinterpret_cast<intptr_t>(begin) + done;
      const intptr_t last = address + std::min(kLine, row_bytes - done) - 1;
      for (const intptr_t byte : {address, last})
        written.try_emplace(byte / kPage, AskedLines::copied);
    }
  }
  for (const auto& [page, position] : written) {
    if (position < std::min(row_bytes, 2 * kPage)) continue;
    const int64_t lead = AskedLines::page_lead(page * kPage, position);
    require(lead > 0 && lead <= 2 * kPage + row_bytes,
            "%ld rows of %ld, stride %ld, from %ld: page %ld was asked for %ld bytes ahead", rows,
            row_bytes, stride, start, page - kTarget / kPage, lead);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const intptr_t begin = kTarget + start + row * stride, end = begin + row_bytes;
    if (row * row_bytes < std::max<int64_t>(row_bytes, 2048)) continue;
    for (const intptr_t edge : {begin, end}) {
      if (edge % kLine == 0) continue;
      const auto asked = AskedLines::to_write.find(edge / kLine);
      const int64_t lead =
          asked == AskedLines::to_write.end() ? 0 : row * row_bytes - asked->second;
      require(lead >= 1024 && lead <= 2048 + 2 * row_bytes,
              "%ld rows of %ld, stride %ld, from %ld: an end of row %ld was asked for %ld ahead",
              rows, row_bytes, stride, start, row, lead);
    }
  }
  require(AskedLines::at.size() <= 2 * written.size(),
          "%ld rows of %ld, stride %ld, from %ld: %zu lines for %zu pages", rows, row_bytes, stride,
          start, AskedLines::at.size(), written.size());
}

void ask_ahead() {
  for (const int64_t row_bytes :
       {100, 256, 512, 516, 1000, 2048, 2500, 4096, 4100, 12345, 20000, 100000})
    for (const int64_t gap : {0, 64, 1000, 4096, 50000})
      for (const int64_t start : {0, 1032})
        ask_for_what_follows((4 << 20) / row_bytes, row_bytes, row_bytes + gap, start, start / 32);
  ask_for_what_follows(1, 4 << 20, 4 << 20, 0, 0);
  for (const int64_t row_bytes : {128, 1000, 4096, 4100, 5000, 8192, 12345, 20000, 100000})
    for (const int64_t gap : {0, 64, 1000, 4096, 50000})
      for (const int64_t start : {0, 64, 1032, 4095})
        for (const int64_t at_once : {2048, 8192})
          ask_for_the_target((1 << 20) / row_bytes, row_bytes, row_bytes + gap, start, at_once);
  ask_for_the_target(1, 4 << 20, 4 << 20, 64, 4096);
}

}  // namespace
}  // namespace asyncrl::reshard::testing

int main() {
  asyncrl::reshard::testing::ask_ahead();
  std::printf("lines and pages are asked for in time\n");
  return 0;
}
