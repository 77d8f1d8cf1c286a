// Eight units at a time, by AVX2: how they are moved, and their share of the digest. Per vector the
// keys of its units (even and odd lanes), two 32 x 32 -> 64 bit products, and a sum for the 2^32
// part of every factor.
//
// Internal linkage: for files that are built for processors with AVX2.
#ifndef ASYNCRL_RESHARD_VECTORS_AVX2_H_
#define ASYNCRL_RESHARD_VECTORS_AVX2_H_

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "reshard/digest.h"
#include "reshard/row_moves.h"
#include "reshard/rows.h"

namespace asyncrl::reshard {
namespace {

constexpr int64_t kLanes = 8;

inline __m256i load_vector(const std::byte* address) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(address));
}

// Around the cache only where aligned.
template <bool kAround>
inline void store_vector(std::byte* address, __m256i value) {
  if constexpr (kAround) {
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
template <RowMove kMove, bool kAround>
inline __m256i move_vector(const std::byte* source, std::byte* target) {
  if constexpr (kMove == RowMove::kCopy) {
    const __m256i units = load_vector(source);
    store_vector<kAround>(target, units);
    return units;
  } else if constexpr (kMove == RowMove::kRoundToWire) {
    const __m256i units =
        narrow(round_lanes(load_vector(source)), round_lanes(load_vector(source + 32)));
    store_vector<kAround>(target, units);
    return units;
  } else if constexpr (kMove == RowMove::kWidenOffWire) {
    const __m256i units = load_vector(source);
    store_vector<kAround>(target, widen(_mm256_castsi256_si128(units)));
    store_vector<kAround>(target + 32, widen(_mm256_extracti128_si256(units, 1)));
    return units;
  } else if constexpr (kMove == RowMove::kWidenToWire) {
    const __m256i units = widen(load_half(source));
    store_vector<kAround>(target, units);
    return units;
  } else {
    static_assert(kMove == RowMove::kRoundOffWire && !kAround);
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

// Of the eight that come after them.
inline __m256i next_seeds(__m256i seeds) {
  return _mm256_add_epi32(seeds, _mm256_set1_epi32(int(kKeyStep * kLanes)));
}

// The digest of what was moved.
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

}  // namespace
}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_VECTORS_AVX2_H_
