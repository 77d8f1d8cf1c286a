// CUDA executor: one persistent launch moves all segments of a bucket.
//
// Segments are cut into tiles of a fixed number of elements; blocks take tiles in turn. Within a
// tile every thread moves chunks of the widest power of two (16 down to 1 bytes) that the segment's
// addresses and rows allow, and adds their digest terms; a warp adds its sum to the digest once per
// tile.
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "reshard/cuda_program.h"
#include "reshard/index.h"

#ifdef ASYNCRL_EMULATE_CUDA
#include "reshard/cuda_emulation.h"
#else
#include <cuda_runtime.h>
#define ASYNCRL_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)

__device__ inline unsigned long long warp_sum(unsigned long long sum) {
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_down_sync(0xFFFFFFFFu, sum, distance);
  }
  return sum;
}
__device__ inline bool is_warp_leader() { return threadIdx.x % 32 == 0; }
#endif

namespace asyncrl::reshard {
namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kTileElements = 16384;

// A run of bytes that one thread loads and stores at once.
template <int kBytes>
struct alignas(kBytes) Chunk {
  static constexpr int kWords = kBytes >= 4 ? kBytes / 4 : 1;
  using Word = std::conditional_t<(kBytes >= 4), uint32_t,
                                  std::conditional_t<kBytes == 2, uint16_t, uint8_t>>;
  Word words[kWords];
};

struct Tile {
  const Segment* segment;
  uint32_t first;  // element of the segment, rows back to back
  uint32_t last;
};

__device__ Tile find_tile(const Segment* segments, const int64_t* tile_ends, int num_segments,
                          int64_t tile) {
  int low = 0, high = num_segments - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (tile < tile_ends[middle]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const int64_t first_tile = low ? tile_ends[low - 1] : 0;
  const int64_t num_elements = segments[low].rows * segments[low].cols;
  const int64_t first = (tile - first_tile) * kTileElements;
  const int64_t last = first + kTileElements < num_elements ? first + kTileElements : num_elements;
  return {segments + low, static_cast<uint32_t>(first), static_cast<uint32_t>(last)};
}

// Digest terms of a chunk of wire elements, `element_bytes` each.
template <int kBytes>
__device__ uint64_t digest_chunk(const Chunk<kBytes>& chunk, int element_bytes, uint64_t position) {
  uint64_t sum = 0;
  const int word_bytes = static_cast<int>(sizeof(chunk.words[0]));
  const uint32_t mask = element_bytes == 4 ? 0xFFFFFFFFu : (1u << (8 * element_bytes)) - 1u;
  for (int word = 0; word < Chunk<kBytes>::kWords; ++word) {
    for (int byte = 0; byte < word_bytes; byte += element_bytes) {
      sum += digest_term((chunk.words[word] >> (8 * byte)) & mask, position++);
    }
  }
  return sum;
}

template <bool kPack, int kBytes>
__device__ uint64_t copy_tile(const Tile& tile, std::byte* parameter, std::byte* wire) {
  const Segment& segment = *tile.segment;
  const auto element_bytes = static_cast<int>(wire_element_bytes(segment.op));
  const auto cols = static_cast<uint32_t>(segment.cols);
  const uint32_t step = kBytes / static_cast<uint32_t>(element_bytes);
  uint64_t sum = 0;
  for (uint32_t element = tile.first + threadIdx.x * step; element < tile.last;
       element += kThreads * step) {
    const uint32_t row = element / cols, col = element - row * cols;
    auto* local = reinterpret_cast<Chunk<kBytes>*>(
        parameter + parameter_element(segment, row, col) * element_bytes);
    auto* remote = reinterpret_cast<Chunk<kBytes>*>(wire + wire_byte(segment, row, col));
    const Chunk<kBytes> chunk = kPack ? *local : *remote;
    *(kPack ? remote : local) = chunk;
    sum += digest_chunk(chunk, element_bytes, position_of(segment, row, col));
  }
  return sum;
}

template <bool kPack>
__device__ uint64_t cast_tile(const Tile& tile, std::byte* parameter, std::byte* wire) {
  const Segment& segment = *tile.segment;
  const auto cols = static_cast<uint32_t>(segment.cols);
  uint64_t sum = 0;
  for (uint32_t element = tile.first + threadIdx.x; element < tile.last; element += kThreads) {
    const uint32_t row = element / cols, col = element - row * cols;
    auto* local = reinterpret_cast<uint32_t*>(parameter) + parameter_element(segment, row, col);
    auto* remote = reinterpret_cast<uint16_t*>(wire + wire_byte(segment, row, col));
    const uint16_t value = kPack ? bf16_from_f32(*local) : *remote;
    if constexpr (kPack) {
      *remote = value;
    } else {
      *local = f32_from_bf16(value);
    }
    sum += digest_term(value, position_of(segment, row, col));
  }
  return sum;
}

// The widest chunk that divides all of these, at most 16.
__device__ int chunk_bytes(const Segment& segment, const std::byte* parameter,
                           const std::byte* wire) {
  const int64_t element_bytes = wire_element_bytes(segment.op);
  uint64_t bits = 16;
  bits |=
      reinterpret_cast<uint64_t>(parameter) + static_cast<uint64_t>(segment.offset * element_bytes);
  bits |= reinterpret_cast<uint64_t>(wire) + static_cast<uint64_t>(segment.wire);
  bits |= static_cast<uint64_t>(segment.cols * element_bytes);
  if (segment.rows > 1) bits |= static_cast<uint64_t>(segment.stride * element_bytes);
  return static_cast<int>(bits & (~bits + 1));
}

template <bool kPack>
__device__ uint64_t move_tile(const Tile& tile, std::byte* parameter, std::byte* wire) {
  if (tile.segment->op == Op::kF32AsBf16) return cast_tile<kPack>(tile, parameter, wire);
  switch (chunk_bytes(*tile.segment, parameter, wire)) {
    case 16:
      return copy_tile<kPack, 16>(tile, parameter, wire);
    case 8:
      return copy_tile<kPack, 8>(tile, parameter, wire);
    case 4:
      return copy_tile<kPack, 4>(tile, parameter, wire);
    case 2:
      return copy_tile<kPack, 2>(tile, parameter, wire);
    default:
      return copy_tile<kPack, 1>(tile, parameter, wire);
  }
}

template <bool kPack>
__global__ void move_segments(const Segment* segments, const int64_t* tile_ends, int num_segments,
                              int num_tiles, const uint64_t* parameters, std::byte* wire,
                              uint64_t* digests) {
  for (int64_t idx = blockIdx.x; idx < num_tiles; idx += gridDim.x) {
    const Tile tile = find_tile(segments, tile_ends, num_segments, idx);
    auto* parameter = reinterpret_cast<std::byte*>(parameters[tile.segment->parameter]);
    const unsigned long long sum = warp_sum(move_tile<kPack>(tile, parameter, wire));
    if (is_warp_leader()) {
      atomicAdd(reinterpret_cast<unsigned long long*>(digests + tile.segment->digest), sum);
    }
  }
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

int default_blocks() {
  int device = 0, multiprocessors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  return 2 * multiprocessors;
}

}  // namespace

CudaProgram::CudaProgram(const CopyProgram& program, int max_blocks)
    : num_segments_(static_cast<int>(program.segments().size())),
      num_parameters_(program.num_parameters()) {
  std::vector<int64_t> tile_ends;
  int64_t num_tiles = 0;
  for (const Segment& segment : program.segments()) {
    if (segment.rows * segment.cols > INT32_MAX) {
      throw std::invalid_argument("a segment of more than 2^31 elements; choose smaller buckets");
    }
    num_tiles += (segment.rows * segment.cols + kTileElements - 1) / kTileElements;
    tile_ends.push_back(num_tiles);
  }
  num_tiles_ = static_cast<int>(num_tiles);
  const int limit = max_blocks > 0 ? max_blocks : default_blocks();
  num_blocks_ = num_tiles_ < limit ? num_tiles_ : limit;
  tile_ends_offset_ = program.segments().size() * sizeof(Segment);
  parameters_offset_ = tile_ends_offset_ + tile_ends.size() * sizeof(int64_t);
  const size_t total = parameters_offset_ + static_cast<size_t>(num_parameters_) * sizeof(uint64_t);
  check(cudaMalloc(&tables_, total > 0 ? total : 1), "memory for a segment table");
  check(cudaMemcpy(tables_, program.segments().data(), tile_ends_offset_, cudaMemcpyHostToDevice),
        "copying a segment table");
  check(cudaMemcpy(tables_ + tile_ends_offset_, tile_ends.data(),
                   tile_ends.size() * sizeof(int64_t), cudaMemcpyHostToDevice),
        "copying a tile table");
}

CudaProgram::~CudaProgram() { cudaFree(tables_); }

void CudaProgram::upload_parameters(const std::vector<uint64_t>& parameters, void* stream) {
  if (static_cast<int64_t>(parameters.size()) != num_parameters_) {
    throw std::invalid_argument("a copy program got " + std::to_string(parameters.size()) +
                                " parameters, it was built for " + std::to_string(num_parameters_));
  }
  check(cudaMemcpyAsync(tables_ + parameters_offset_, parameters.data(),
                        parameters.size() * sizeof(uint64_t), cudaMemcpyHostToDevice,
                        static_cast<cudaStream_t>(stream)),
        "copying parameter addresses");
}

void CudaProgram::pack(const std::vector<uint64_t>& parameters, std::byte* wire, uint64_t* digests,
                       void* stream) {
  if (num_tiles_ == 0) return;
  upload_parameters(parameters, stream);
  ASYNCRL_LAUNCH(move_segments<true>, static_cast<unsigned>(num_blocks_), kThreads, stream,
                 reinterpret_cast<const Segment*>(tables_),
                 reinterpret_cast<const int64_t*>(tables_ + tile_ends_offset_), num_segments_,
                 num_tiles_, reinterpret_cast<const uint64_t*>(tables_ + parameters_offset_), wire,
                 digests);
  check(cudaGetLastError(), "packing a bucket");
}

void CudaProgram::unpack(const std::vector<uint64_t>& parameters, const std::byte* wire,
                         uint64_t* digests, void* stream) {
  if (num_tiles_ == 0) return;
  upload_parameters(parameters, stream);
  ASYNCRL_LAUNCH(move_segments<false>, static_cast<unsigned>(num_blocks_), kThreads, stream,
                 reinterpret_cast<const Segment*>(tables_),
                 reinterpret_cast<const int64_t*>(tables_ + tile_ends_offset_), num_segments_,
                 num_tiles_, reinterpret_cast<const uint64_t*>(tables_ + parameters_offset_),
                 const_cast<std::byte*>(wire), digests);
  check(cudaGetLastError(), "unpacking a bucket");
}

}  // namespace asyncrl::reshard
