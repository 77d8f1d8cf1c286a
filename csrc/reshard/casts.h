// Conversions of floating-point bits, the same on every executor. All round to nearest, ties to
// even; every NaN becomes one quiet NaN, because processors disagree about its bits.
#ifndef ASYNCRL_RESHARD_CASTS_H_
#define ASYNCRL_RESHARD_CASTS_H_

#include <cstdint>
#include <cstring>

#include "reshard/host_device.h"

namespace asyncrl::reshard {

inline constexpr uint32_t kF32Infinity = 0x7F800000u;
inline constexpr uint32_t kF32Nan = 0x7FC00000u;
inline constexpr uint32_t kF32Magnitude = 0x7FFFFFFFu;  // all but the sign
inline constexpr float kFp8Max = 448.0f;                // of e4m3fn

ASYNCRL_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

ASYNCRL_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

ASYNCRL_HOST_DEVICE uint16_t bf16_from_f32(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & kF32Magnitude) > kF32Infinity;
  return static_cast<uint16_t>(is_nan ? kF32Nan >> 16 : rounded);
}

ASYNCRL_HOST_DEVICE uint32_t f32_from_bf16(uint16_t bits) {
  return static_cast<uint32_t>(bits) << 16;
}

// float32 of magnitude at most kFp8Max, or NaN, to float8 e4m3fn (bias 7, no infinity).
ASYNCRL_HOST_DEVICE uint8_t fp8_from_f32(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & kF32Magnitude;
  if (magnitude > kF32Infinity) return 0x7F;
  // Normal from 2^-6 on: drop 20 bits of the mantissa. Below, a sum with 2^14 leaves the number of
  // units of 2^-9 in the last bits, rounded by the adder.
  const uint32_t normal =
      ((magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20) - ((127 - 7) << 3);
  const uint32_t tiny = bits_of(float_of(magnitude) + 16384.0f) - 0x46800000u;
  return static_cast<uint8_t>((magnitude >= 0x3C800000u ? normal : tiny) | ((bits >> 24) & 0x80u));
}

// The scale of a block whose largest magnitude has these bits: quantised values reach kFp8Max.
// A block without a scale (zero, or below what float32 can divide) gets 1.
ASYNCRL_HOST_DEVICE float fp8_scale(uint32_t largest_magnitude) {
  if (largest_magnitude > kF32Infinity) return float_of(kF32Nan);
  const float scale = float_of(largest_magnitude) / kFp8Max;
  return scale > 0.0f ? scale : 1.0f;
}

// Tiny scales are rounded themselves, so that a quotient may exceed kFp8Max: it is held there.
ASYNCRL_HOST_DEVICE uint8_t quantised(float value, float scale) {
  const float quotient = value / scale;
  const float held = quotient > kFp8Max ? kFp8Max : quotient < -kFp8Max ? -kFp8Max : quotient;
  return fp8_from_f32(held);
}

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_CASTS_H_
