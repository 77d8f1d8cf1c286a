// Segments that are not moved row by row, on the CPU: transposed and quantised ones. Both go
// through a small block in the cache, whose rows are then moved and digested like any others.
#ifndef ASYNCRL_RESHARD_BLOCKS_H_
#define ASYNCRL_RESHARD_BLOCKS_H_

#include <cstddef>
#include <cstdint>

#include "reshard/index.h"
#include "reshard/rows.h"

namespace asyncrl::reshard {

// Each returns the digest of the segment's elements.
uint64_t pack_transposed(const Segment& segment, const std::byte* parameter, std::byte* wire,
                         MoveRows move_rows);
uint64_t unpack_transposed(const Segment& segment, std::byte* parameter, const std::byte* wire,
                           MoveRows move_rows);

struct QuantisedDigests {
  uint64_t elements = 0;
  uint64_t scales = 0;
};

QuantisedDigests pack_quantised(const Segment& segment, const BlockScales& scales,
                                const std::byte* parameter, std::byte* wire, MoveRows move_rows);

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_BLOCKS_H_
