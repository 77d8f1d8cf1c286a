// CUDA executor: one persistent launch moves all segments of a bucket.
//
//   segments -- host --> tiles, each of one segment -- blocks take them in turn --> copies, digests
//
// A tile is a run of elements (chunk_kernel.h) or a square (block_kernel.h). Blocks never meet each
// other: the digests, summed atomically once per warp and tile, are all that they share.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "reshard/block_kernel.h"
#include "reshard/chunk_kernel.h"
#include "reshard/cuda_program.h"
#include "reshard/device.h"
#include "reshard/index.h"

namespace asyncrl::reshard {

struct Tile {
  int32_t segment;
  int32_t scales;   // of a quantising segment
  uint32_t number;  // within the segment
  uint32_t unused = 0;
};

struct Tables {
  const Segment* segments;
  const BlockScales* scales;
  const Tile* tiles;
  const uint64_t* parameters;
  int64_t num_tiles;
};

namespace {

template <bool kPack>
__global__ void __launch_bounds__(kThreads, 1)
    move_segments(Tables tables, std::byte* wire, uint64_t* digests) {
  __shared__ TurnedTile turned;
  __shared__ unsigned largest;
  Tile next = tables.tiles[blockIdx.x];  // the grid has no more blocks than there are tiles
  for (int64_t idx = blockIdx.x; idx < tables.num_tiles; idx += gridDim.x) {
    const Tile tile = next;
    if (idx + gridDim.x < tables.num_tiles) next = tables.tiles[idx + gridDim.x];
    const Segment segment = tables.segments[tile.segment];
    auto* parameter = reinterpret_cast<std::byte*>(tables.parameters[segment.parameter]);
    if (is_quantised(segment.op)) {
      if constexpr (kPack) {
        quantise_block(segment, tables.scales[tile.scales], tile.number, parameter, wire, digests,
                       largest);
      }
    } else if (is_transposed(segment.op)) {
      move_turned<kPack>(segment, tile.number, parameter, wire, digests, turned);
    } else {
      move_span<kPack>(segment, tile.number, parameter, wire, digests);
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
  return multiprocessors;
}

int64_t num_tiles_of(const Segment& segment) {
  const auto squares = [&](int64_t side) {
    return (segment.rows + side - 1) / side * ((segment.cols + side - 1) / side);
  };
  if (is_quantised(segment.op)) return squares(kBlock);
  if (is_transposed(segment.op)) return squares(kTurnedTile);
  const int64_t bytes = segment.rows * segment.cols * wire_element_bytes(segment.op);
  return (bytes + kTileBytes - 1) / kTileBytes;
}

std::vector<Tile> cut_into_tiles(const CopyProgram& program) {
  std::vector<Tile> tiles;
  int32_t segment_idx = 0, scales_idx = -1;
  for (const Segment& segment : program.segments()) {
    if (segment.rows * segment.cols > INT32_MAX) {
      throw std::invalid_argument("a segment of more than 2^31 elements; choose smaller buckets");
    }
    if (is_quantised(segment.op)) ++scales_idx;
    const int64_t num_tiles = num_tiles_of(segment);
    for (int64_t number = 0; number < num_tiles; ++number)
      tiles.push_back({segment_idx, scales_idx, static_cast<uint32_t>(number)});
    ++segment_idx;
  }
  return tiles;
}

// Lays tables one after the other in one allocation.
class TableWriter {
 public:
  template <typename Row>
  size_t add(const std::vector<Row>& rows) {
    const size_t offset = bytes_.size();
    const auto* first = reinterpret_cast<const std::byte*>(rows.data());
    bytes_.insert(bytes_.end(), first, first + rows.size() * sizeof(Row));
    return offset;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace

CudaProgram::CudaProgram(const CopyProgram& program, int max_blocks) : program_(program) {
  const std::vector<Tile> tiles = cut_into_tiles(program);
  num_tiles_ = static_cast<int64_t>(tiles.size());
  const int64_t limit = max_blocks > 0 ? max_blocks : default_blocks();
  num_blocks_ = static_cast<unsigned>(num_tiles_ < limit ? num_tiles_ : limit);
  for (const Segment& segment : program.segments())
    wire_alignment_ = std::max(wire_alignment_, wire_element_bytes(segment.op));
  if (!program.scales().empty()) wire_alignment_ = std::max(wire_alignment_, int64_t{4});
  TableWriter writer;
  writer.add(tiles);
  segments_offset_ = writer.add(program.segments());
  scales_offset_ = writer.add(program.scales());
  parameters_offset_ =
      writer.add(std::vector<uint64_t>(static_cast<size_t>(program.num_parameters())));
  const size_t num_bytes = writer.bytes().size();
  check(cudaMalloc(&tables_, num_bytes > 0 ? num_bytes : 1), "memory for a segment table");
  check(cudaMemcpy(tables_, writer.bytes().data(), num_bytes, cudaMemcpyHostToDevice),
        "copying a segment table");
}

CudaProgram::~CudaProgram() { cudaFree(tables_); }

// Addresses seldom change; what an earlier call on this stream wrote is there.
void CudaProgram::upload_parameters(const std::vector<uint64_t>& parameters, void* stream) {
  if (parameters == uploaded_ && stream == uploaded_on_) return;
  check(cudaMemcpyAsync(tables_ + parameters_offset_, parameters.data(),
                        parameters.size() * sizeof(uint64_t), cudaMemcpyHostToDevice,
                        static_cast<cudaStream_t>(stream)),
        "copying parameter addresses");
  uploaded_ = parameters;
  uploaded_on_ = stream;
}

template <bool kPack>
void CudaProgram::launch(const std::vector<uint64_t>& parameters, std::byte* wire,
                         uint64_t* digests, void* stream) {
  program_.check_parameters(parameters.size());
  if (num_tiles_ == 0) return;
  if (reinterpret_cast<uint64_t>(wire) % static_cast<uint64_t>(wire_alignment_) != 0) {
    throw std::invalid_argument("a bucket on the device must start at a multiple of " +
                                std::to_string(wire_alignment_) + " bytes (of 16 to be fast)");
  }
  upload_parameters(parameters, stream);
  const Tables tables = {reinterpret_cast<const Segment*>(tables_ + segments_offset_),
                         reinterpret_cast<const BlockScales*>(tables_ + scales_offset_),
                         reinterpret_cast<const Tile*>(tables_),
                         reinterpret_cast<const uint64_t*>(tables_ + parameters_offset_),
                         num_tiles_};
  ASYNCRL_LAUNCH(move_segments<kPack>, num_blocks_, kThreads, stream, tables, wire, digests);
  check(cudaGetLastError(), kPack ? "packing a bucket" : "unpacking a bucket");
}

void CudaProgram::pack(const std::vector<uint64_t>& parameters, std::byte* wire, uint64_t* digests,
                       void* stream) {
  launch<true>(parameters, wire, digests, stream);
}

void CudaProgram::unpack(const std::vector<uint64_t>& parameters, const std::byte* wire,
                         uint64_t* digests, void* stream) {
  program_.check_unpacks();
  launch<false>(parameters, const_cast<std::byte*>(wire), digests, stream);
}

}  // namespace asyncrl::reshard
