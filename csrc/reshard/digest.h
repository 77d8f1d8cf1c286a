// The digest of a parameter: a 64-bit sum over its bytes, each keyed by where it lies there.
//
// Take the receiver's parameter as it travels (wire element type, rows back to back) for a string
// of little-endian 32-bit units. With u the value of unit i,
//
//   digest = sum over i of u * (2^32 + key(i))  mod 2^64,   key(i) a fixed mixing of i to 32 bits.
//
// Additive: the term is linear in u, so an element adds its bits, shifted to its place in the unit,
// times the unit's factor. Any cut into pieces, even within a unit, summed in any order, by any
// executor, gives the same digest.
//
// A single changed element always shows: the unit changes by d with 0 < |d| < 2^32, and
// d * (2^32 + key) is 0 mod 2^64 for no key, because d has at most 31 factors of two and
// 2^32 + key, which is below 2^33, at most 32.
// Two exchanged units always show below 2^32 units: `unit_key` is a bijection of the lower half
// of i (a product with an odd number, an xor of a shift, y -> y (2y + 1), an xor of a shift), so
// the digest changes by d * (key(i) - key(j)), a product of two numbers other than 0 and below 2^32
// in size.
// Any other change, of units i, j, ...: all but one of the keys given, the last one must take one
// value of 2^32 for the sums to agree (d * key = c mod 2^64 has at most one solution below 2^32).
// The square keeps regular patterns, such as the corners of a rectangle, from cancelling.
#ifndef ASYNCRL_RESHARD_DIGEST_H_
#define ASYNCRL_RESHARD_DIGEST_H_

#include <cstdint>

#include "reshard/host_device.h"

namespace asyncrl::reshard {

inline constexpr int64_t kUnitBytes = 4;
inline constexpr uint32_t kKeyStep = 0x9E3779B1u;  // odd; from one unit to the next
inline constexpr uint32_t kKeyHigh = 0x85EBCA77u;  // per 2^32 units
inline constexpr uint32_t kKeyStart = 0x27D4EB2Fu;

// Where the mixing of unit i starts; vector code adds kKeyStep per unit instead.
ASYNCRL_HOST_DEVICE uint32_t key_seed(uint64_t unit) {
  return static_cast<uint32_t>(unit) * kKeyStep + static_cast<uint32_t>(unit >> 32) * kKeyHigh +
         kKeyStart;
}

ASYNCRL_HOST_DEVICE uint32_t mix_key(uint32_t seed) {
  const uint32_t folded = seed ^ (seed >> 16);
  const uint32_t square = folded * (2 * folded + 1);
  return square ^ (square >> 15);
}

ASYNCRL_HOST_DEVICE uint64_t digest_unit(uint32_t value, uint32_t key) {
  return static_cast<uint64_t>(value) * key + (static_cast<uint64_t>(value) << 32);
}

// The term of an element of 1, 2 or 4 bytes that starts at this byte of the parameter.
ASYNCRL_HOST_DEVICE uint64_t digest_element(uint32_t bits, uint64_t byte) {
  const auto shift = static_cast<uint32_t>(byte % kUnitBytes) * 8;
  return digest_unit(bits << shift, mix_key(key_seed(byte / kUnitBytes)));
}

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_DIGEST_H_
