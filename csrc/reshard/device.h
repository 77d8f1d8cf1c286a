// The part of CUDA that the kernels use. A kernel is a function of one block: it is written as
// phases, each of which every thread runs (`each_thread`), with `block_barrier` between them;
// what lives across phases is in shared memory. Under a CUDA compiler a phase is the calling
// thread's part; in the emulation it is a loop over the threads.
#ifndef ASYNCRL_RESHARD_DEVICE_H_
#define ASYNCRL_RESHARD_DEVICE_H_

#include <cstdint>

#ifdef ASYNCRL_EMULATE_CUDA
#include "reshard/cuda_emulation.h"
#else
#include <cuda_runtime.h>
#define ASYNCRL_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<grid, block, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)

namespace asyncrl::reshard {

template <typename Phase>
__device__ __forceinline__ void each_thread(Phase phase) {
  phase(threadIdx.x);
}
__device__ __forceinline__ void block_barrier() { __syncthreads(); }

// Over the 32 threads of a warp, which all call them together; the leader gets the result.
__device__ __forceinline__ unsigned long long warp_sum(unsigned long long sum) {
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_down_sync(0xFFFFFFFFu, sum, distance);
  }
  return sum;
}
__device__ __forceinline__ unsigned warp_max(unsigned value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const unsigned other = __shfl_down_sync(0xFFFFFFFFu, value, distance);
    value = other > value ? other : value;
  }
  return value;
}
__device__ __forceinline__ bool is_warp_leader() { return threadIdx.x % 32 == 0; }

}  // namespace asyncrl::reshard
#endif

namespace asyncrl::reshard {

// Per block. One block fills a multiprocessor: where few of them may be taken, each must keep
// enough bytes in flight.
constexpr unsigned kThreads = 1024;

// Every thread of a warp adds its sum to one digest.
__device__ inline void add_to_digest(uint64_t* digest, uint64_t sum) {
  const unsigned long long total = warp_sum(sum);
  if (is_warp_leader()) atomicAdd(reinterpret_cast<unsigned long long*>(digest), total);
}

}  // namespace asyncrl::reshard

#endif  // ASYNCRL_RESHARD_DEVICE_H_
