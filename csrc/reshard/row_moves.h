// How one unit (4 wire bytes) or one element is moved, for each RowMove. Memory may be unaligned.
// Everything has internal linkage: files that include this are built for different processors.
#ifndef ASYNCRL_RESHARD_ROW_MOVES_H_
#define ASYNCRL_RESHARD_ROW_MOVES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "reshard/casts.h"
#include "reshard/digest.h"
#include "reshard/rows.h"

namespace asyncrl::reshard {
namespace {

template <typename Value>
inline Value load(const std::byte* address) {
  Value value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}

template <typename Value>
inline void store(std::byte* address, Value value) {
  std::memcpy(address, &value, sizeof(value));
}

// Every Move has: bytes of an element at the source, at the target and on the wire, and `move`,
// which moves one element and returns its wire bits.
template <RowMove kMove>
struct Move;

template <>
struct Move<RowMove::kCopy> {
  static constexpr int64_t kSource = 1, kTarget = 1, kWire = 1;
  static uint32_t move(const std::byte* source, std::byte* target) {
    *target = *source;
    return static_cast<uint32_t>(*source);
  }
};

template <>
struct Move<RowMove::kRoundToWire> {
  static constexpr int64_t kSource = 4, kTarget = 2, kWire = 2;
  static uint32_t move(const std::byte* source, std::byte* target) {
    const uint16_t value = bf16_from_f32(load<uint32_t>(source));
    store(target, value);
    return value;
  }
};

template <>
struct Move<RowMove::kWidenOffWire> {
  static constexpr int64_t kSource = 2, kTarget = 4, kWire = 2;
  static uint32_t move(const std::byte* source, std::byte* target) {
    const auto value = load<uint16_t>(source);
    store(target, f32_from_bf16(value));
    return value;
  }
};

template <>
struct Move<RowMove::kWidenToWire> {
  static constexpr int64_t kSource = 2, kTarget = 4, kWire = 4;
  static uint32_t move(const std::byte* source, std::byte* target) {
    const uint32_t value = f32_from_bf16(load<uint16_t>(source));
    store(target, value);
    return value;
  }
};

template <>
struct Move<RowMove::kRoundOffWire> {
  static constexpr int64_t kSource = 4, kTarget = 2, kWire = 4;
  static uint32_t move(const std::byte* source, std::byte* target) {
    const auto value = load<uint32_t>(source);
    store(target, bf16_from_f32(value));
    return value;
  }
};

// Moves a whole unit; returns its value.
template <RowMove kMove>
inline uint32_t move_unit(const std::byte* source, std::byte* target) {
  if constexpr (kMove == RowMove::kCopy) {
    const auto value = load<uint32_t>(source);
    store(target, value);
    return value;
  }
  uint32_t unit = 0;
  for (int64_t idx = 0; idx < kUnitBytes / Move<kMove>::kWire; ++idx) {
    unit |=
        Move<kMove>::move(source + idx * Move<kMove>::kSource, target + idx * Move<kMove>::kTarget)
        << (8 * Move<kMove>::kWire * idx);
  }
  return unit;
}

// Moves elements one by one: the ends of a row that fill no unit.
template <RowMove kMove>
inline uint64_t move_elements(const std::byte* source, std::byte* target, int64_t count,
                              uint64_t position) {
  uint64_t sum = 0;
  for (int64_t idx = 0; idx < count; ++idx) {
    const uint32_t bits =
        Move<kMove>::move(source + idx * Move<kMove>::kSource, target + idx * Move<kMove>::kTarget);
    sum += digest_element(bits, position + static_cast<uint64_t>(idx * Move<kMove>::kWire));
  }
  return sum;
}

template <RowMove kMove>
inline uint64_t move_units(const std::byte* source, std::byte* target, int64_t count,
                           uint64_t unit) {
  constexpr int64_t kPerUnit = kUnitBytes / Move<kMove>::kWire;
  uint64_t sum = 0;
  for (int64_t idx = 0; idx < count; ++idx) {
    const uint32_t value = move_unit<kMove>(source + idx * kPerUnit * Move<kMove>::kSource,
                                            target + idx * kPerUnit * Move<kMove>::kTarget);
    sum += digest_unit(value, mix_key(key_seed(unit + static_cast<uint64_t>(idx))));
  }
  return sum;
}

// Calls units(source, target, number of units, first unit) for the whole units of every row, and
// moves what is before and after them. Returns the digest of the latter.
template <RowMove kMove, typename Units>
inline uint64_t for_each_row(const Rows& rows, Units units) {
  using M = Move<kMove>;
  constexpr int64_t kPerUnit = kUnitBytes / M::kWire;
  uint64_t sum = 0;
  for (int64_t row = 0; row < rows.rows; ++row) {
    const std::byte* source = rows.source + row * rows.source_stride;
    std::byte* target = rows.target + row * rows.target_stride;
    const uint64_t position = rows.position + static_cast<uint64_t>(row) * rows.position_stride;
    const auto before = static_cast<int64_t>((0 - position) % kUnitBytes) / M::kWire;
    const int64_t head = before < rows.elements ? before : rows.elements;
    const int64_t whole = (rows.elements - head) / kPerUnit;
    const int64_t tail = rows.elements - head - whole * kPerUnit, last = rows.elements - tail;
    if (head) sum += move_elements<kMove>(source, target, head, position);
    if (whole) {
      units(source + head * M::kSource, target + head * M::kTarget, whole,
            (position + static_cast<uint64_t>(head * M::kWire)) / kUnitBytes);
    }
    if (tail) {
      sum += move_elements<kMove>(source + last * M::kSource, target + last * M::kTarget, tail,
                                  position + static_cast<uint64_t>(last * M::kWire));
    }
  }
  return sum;
}

}  // namespace
}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_ROW_MOVES_H_
