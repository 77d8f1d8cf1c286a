// Device code of copies and casts: a tile is a run of a segment's elements, in the order of the
// wire; every thread moves chunks of it, the widest that the segment's addresses and rows allow
// (16, 8, 4, 2 or 1 bytes on the narrower side), several in flight at once.
#ifndef ASYNCRL_RESHARD_CHUNK_KERNEL_H_
#define ASYNCRL_RESHARD_CHUNK_KERNEL_H_

#include <cstddef>
#include <type_traits>

#include "reshard/casts.h"
#include "reshard/device.h"
#include "reshard/digest.h"
#include "reshard/index.h"

namespace asyncrl::reshard {

constexpr int64_t kTileBytes = 65536;  // on the wire; four 16-byte chunks per thread
constexpr int kBytesInFlight = 64;     // that a thread loads before it stores the first

template <int kBytes>
struct alignas(kBytes < 16 ? kBytes : 16) Chunk {
  static constexpr int kWords = kBytes >= 4 ? kBytes / 4 : 1;
  using Word = std::conditional_t<(kBytes >= 4), uint32_t,
                                  std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;
  Word words[kWords];
};

// bfloat16 to float32.
template <int kBytes>
__device__ Chunk<2 * kBytes> widened(const Chunk<kBytes>& narrow) {
  Chunk<2 * kBytes> wide;
  if constexpr (kBytes == 2) {
    wide.words[0] = f32_from_bf16(narrow.words[0]);
  } else {
#pragma unroll
    for (int idx = 0; idx < Chunk<kBytes>::kWords; ++idx) {
      wide.words[2 * idx] = narrow.words[idx] << 16;
      wide.words[2 * idx + 1] = narrow.words[idx] & 0xFFFF0000u;
    }
  }
  return wide;
}

// float32 to bfloat16.
template <int kBytes>
__device__ Chunk<kBytes / 2> narrowed(const Chunk<kBytes>& wide) {
  Chunk<kBytes / 2> narrow;
  if constexpr (kBytes == 4) {
    narrow.words[0] = bf16_from_f32(wide.words[0]);
  } else {
#pragma unroll
    for (int idx = 0; idx < Chunk<kBytes / 2>::kWords; ++idx) {
      narrow.words[idx] = bf16_from_f32(wide.words[2 * idx]) |
                          static_cast<uint32_t>(bf16_from_f32(wide.words[2 * idx + 1])) << 16;
    }
  }
  return narrow;
}

template <int kTo, int kFrom>
__device__ Chunk<kTo> converted(const Chunk<kFrom>& chunk) {
  if constexpr (kTo == kFrom) {
    return chunk;
  } else if constexpr (kTo > kFrom) {
    return widened(chunk);
  } else {
    return narrowed(chunk);
  }
}

// The digest of a chunk that starts at any byte: its words are shifted across the units.
template <int kBytes>
__device__ uint64_t digest_chunk(const Chunk<kBytes>& chunk, uint64_t position) {
  if constexpr (kBytes == 1) {
    return digest_element(chunk.words[0], position);
  } else {
    const auto shift = static_cast<uint32_t>(position % kUnitBytes) * 8;
    uint32_t seed = key_seed(position / kUnitBytes), carried = 0;
    uint64_t sum = 0;
#pragma unroll
    for (int idx = 0; idx < Chunk<kBytes>::kWords; ++idx) {
      if (idx > 0) seed = key_seed(position / kUnitBytes + static_cast<uint64_t>(idx));
      const uint64_t shifted = static_cast<uint64_t>(chunk.words[idx]) << shift;
      sum += digest_unit(static_cast<uint32_t>(shifted) | carried, mix_key(seed));
      carried = static_cast<uint32_t>(shifted >> 32);
    }
    if (shift > 0) {
      seed = key_seed(position / kUnitBytes + Chunk<kBytes>::kWords);
      sum += digest_unit(carried, mix_key(seed));
    }
    return sum;
  }
}

// Where a thread is in a segment, moved on without divisions.
struct Walk {
  uint32_t row, col;
  uint32_t row_step, col_step, cols;

  __device__ Walk(uint32_t element, uint32_t step, uint32_t num_cols)
      : row(element / num_cols),
        col(element % num_cols),
        row_step(step / num_cols),
        col_step(step % num_cols),
        cols(num_cols) {}
  __device__ void advance() {
    row += row_step;
    col += col_step;
    if (col >= cols) {
      col -= cols;
      ++row;
    }
  }
};

struct Span {
  uint32_t first, last;  // elements of a segment, rows back to back
};

// kLocal and kWire bytes of the same elements.
template <bool kPack, int kLocal, int kWire>
__device__ uint64_t move_chunks(const Segment& segment, const Span& span, std::byte* parameter,
                                std::byte* wire, unsigned thread) {
  constexpr int kFrom = kPack ? kLocal : kWire, kTo = kPack ? kWire : kLocal;
  constexpr int kInFlight = kFrom > 16 ? kBytesInFlight / kFrom : 4;
  const int64_t local_bytes = parameter_element_bytes(segment.op);
  const uint32_t per_chunk = kWire / static_cast<uint32_t>(wire_element_bytes(segment.op));
  const uint32_t step = kThreads * per_chunk;
  uint32_t element = span.first + thread * per_chunk;
  Walk walk(element, step, static_cast<uint32_t>(segment.cols));
  const auto local_at = [&](const Walk& at) {  // never transposed
    return parameter + (segment.offset + at.row * segment.stride + at.col) * local_bytes;
  };
  const auto wire_at = [&](const Walk& at) { return wire + wire_byte(segment, at.row, at.col); };
  uint64_t sum = 0;
  while (element < span.last) {
    Chunk<kFrom> chunks[kInFlight];
    Walk stores = walk;
    const uint32_t start = element;
#pragma unroll
    for (int idx = 0; idx < kInFlight; ++idx, element += step, walk.advance()) {
      if (element >= span.last) continue;
      chunks[idx] = *reinterpret_cast<const Chunk<kFrom>*>(kPack ? local_at(walk) : wire_at(walk));
    }
#pragma unroll
    for (int idx = 0; idx < kInFlight; ++idx, stores.advance()) {
      if (start + static_cast<uint32_t>(idx) * step >= span.last) continue;
      const Chunk<kTo> moved = converted<kTo>(chunks[idx]);
      *reinterpret_cast<Chunk<kTo>*>(kPack ? wire_at(stores) : local_at(stores)) = moved;
      const uint64_t position = position_byte(segment, stores.row, stores.col);
      if constexpr (kPack) {
        sum += digest_chunk(moved, position);
      } else {
        sum += digest_chunk(chunks[idx], position);
      }
    }
  }
  return sum;
}

// Most elements, a power of two, that can be moved at once with both sides aligned. All sizes here
// are powers of two, so that masks do.
__device__ inline unsigned elements_per_chunk(const Segment& segment, const std::byte* parameter,
                                              const std::byte* wire) {
  const auto local_bytes = static_cast<unsigned>(parameter_element_bytes(segment.op));
  const auto wire_bytes = static_cast<unsigned>(wire_element_bytes(segment.op));
  // Only the last four bits of an address matter.
  unsigned local_bits = static_cast<unsigned>(reinterpret_cast<uint64_t>(parameter)) +
                        static_cast<unsigned>(segment.offset) * local_bytes;
  if (segment.rows > 1) local_bits |= static_cast<unsigned>(segment.stride) * local_bytes;
  const unsigned wire_bits =
      static_cast<unsigned>(reinterpret_cast<uint64_t>(wire)) + static_cast<unsigned>(segment.wire);
  const auto cols = static_cast<unsigned>(segment.cols);
  unsigned count = 16;
  for (; count > 1; count /= 2) {
    const unsigned local_chunk = count * local_bytes, wire_chunk = count * wire_bytes;
    if ((local_chunk < wire_chunk ? local_chunk : wire_chunk) > 16) continue;
    const unsigned local_mask = (local_chunk < 16 ? local_chunk : 16) - 1;
    const unsigned wire_mask = (wire_chunk < 16 ? wire_chunk : 16) - 1;
    if ((local_bits & local_mask) == 0 && (wire_bits & wire_mask) == 0 && (cols & (count - 1)) == 0)
      break;
  }
  return count;
}

template <bool kPack>
__device__ uint64_t copy_chunks(unsigned bytes, const Segment& segment, const Span& span,
                                std::byte* parameter, std::byte* wire, unsigned thread) {
  switch (bytes) {
    case 16:
      return move_chunks<kPack, 16, 16>(segment, span, parameter, wire, thread);
    case 8:
      return move_chunks<kPack, 8, 8>(segment, span, parameter, wire, thread);
    case 4:
      return move_chunks<kPack, 4, 4>(segment, span, parameter, wire, thread);
    case 2:
      return move_chunks<kPack, 2, 2>(segment, span, parameter, wire, thread);
    default:
      return move_chunks<kPack, 1, 1>(segment, span, parameter, wire, thread);
  }
}

// kWideLocal: float32 is in the parameter and bfloat16 on the wire, or the other way round.
template <bool kPack, bool kWideLocal>
__device__ uint64_t cast_chunks(unsigned elements, const Segment& segment, const Span& span,
                                std::byte* parameter, std::byte* wire, unsigned thread) {
  constexpr int kLocal = kWideLocal ? 4 : 2, kWire = kWideLocal ? 2 : 4;
  switch (elements) {
    case 8:
      return move_chunks<kPack, 8 * kLocal, 8 * kWire>(segment, span, parameter, wire, thread);
    case 4:
      return move_chunks<kPack, 4 * kLocal, 4 * kWire>(segment, span, parameter, wire, thread);
    case 2:
      return move_chunks<kPack, 2 * kLocal, 2 * kWire>(segment, span, parameter, wire, thread);
    default:
      return move_chunks<kPack, kLocal, kWire>(segment, span, parameter, wire, thread);
  }
}

template <bool kPack>
__device__ void move_span(const Segment& segment, uint32_t tile, std::byte* parameter,
                          std::byte* wire, uint64_t* digests) {
  const auto width = static_cast<uint32_t>(wire_element_bytes(segment.op));
  const uint32_t per_tile = static_cast<uint32_t>(kTileBytes) / width;
  const auto total = static_cast<uint32_t>(segment.rows * segment.cols);
  const uint32_t first = tile * per_tile;
  const Span span = {first, total - first < per_tile ? total : first + per_tile};
  const unsigned elements = elements_per_chunk(segment, parameter, wire);
  each_thread([&](unsigned thread) {
    uint64_t sum;
    if (segment.op == Op::kF32AsBf16) {
      sum = cast_chunks<kPack, true>(elements, segment, span, parameter, wire, thread);
    } else if (segment.op == Op::kBf16AsF32) {
      sum = cast_chunks<kPack, false>(elements, segment, span, parameter, wire, thread);
    } else {
      const unsigned bytes = elements * width;
      sum = copy_chunks<kPack>(bytes, segment, span, parameter, wire, thread);
    }
    add_to_digest(digests + segment.digest, sum);
  });
}

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_CHUNK_KERNEL_H_
