// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), eight bytes at a time from tables.
// Portable on purpose: it is off on the hot path and runs on headers, spill files and in debugging.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace asyncrl {

namespace internal {

consteval std::array<std::array<uint32_t, 256>, 8> MakeCrc32cTables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
    tables[0][byte] = crc;
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (int k = 1; k < 8; ++k) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

inline constexpr auto kCrc32cTables = MakeCrc32cTables();

}  // namespace internal

// The checksum of `size` bytes at `data`.
inline uint32_t Crc32c(const void* data, size_t size) {
  const auto& tables = internal::kCrc32cTables;
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t crc = ~0u;
  for (; size >= 8; size -= 8, bytes += 8) {
    uint32_t mixed[2];
    std::memcpy(mixed, bytes, 8);  // little-endian hosts only, which layout.h asserts
    mixed[0] ^= crc;
    crc = 0;
    for (int half = 0; half < 2; ++half) {
      for (int byte = 0; byte < 4; ++byte) {
        crc ^= tables[7 - 4 * half - byte][(mixed[half] >> (8 * byte)) & 0xFF];
      }
    }
  }
  for (; size > 0; --size, ++bytes) crc = (crc >> 8) ^ tables[0][(crc ^ *bytes) & 0xFF];
  return ~crc;
}

}  // namespace asyncrl
