// The executor of a copy program on a CUDA device; one launch per bucket. Free of CUDA headers, so
// that callers need no CUDA compiler.
#ifndef ASYNCRL_RESHARD_CUDA_PROGRAM_H_
#define ASYNCRL_RESHARD_CUDA_PROGRAM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reshard/program.h"

namespace asyncrl::reshard {

// Holds the segment table of a `CopyProgram` on the current device. All addresses are on that
// device. `stream` is a cudaStream_t; work is ordered on it and the calls return before it is done.
// Not safe for concurrent calls on one object. Throws std::runtime_error with CUDA's message.
class CudaProgram {
 public:
  // `max_blocks` bounds the grid, so that few multiprocessors are taken; 0 takes all.
  explicit CudaProgram(const CopyProgram& program, int max_blocks = 0);
  ~CudaProgram();
  CudaProgram(const CudaProgram&) = delete;
  CudaProgram& operator=(const CudaProgram&) = delete;

  // Throw std::invalid_argument where `wire` is not aligned to the widest element of the bucket.
  void pack(const std::vector<uint64_t>& parameters, std::byte* wire, uint64_t* digests,
            void* stream);
  void unpack(const std::vector<uint64_t>& parameters, const std::byte* wire, uint64_t* digests,
              void* stream);

 private:
  template <bool kPack>
  void launch(const std::vector<uint64_t>& parameters, std::byte* wire, uint64_t* digests,
              void* stream);

  void upload_parameters(const std::vector<uint64_t>& parameters, void* stream);

  CopyProgram program_;
  std::vector<uint64_t> uploaded_;
  void* uploaded_on_ = nullptr;
  std::byte* tables_ = nullptr;  // tiles, segments, scales, addresses of the parameters
  size_t segments_offset_ = 0;
  size_t scales_offset_ = 0;
  size_t parameters_offset_ = 0;
  int64_t num_tiles_ = 0;
  int64_t wire_alignment_ = 1;
  unsigned num_blocks_ = 0;
};

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_CUDA_PROGRAM_H_
