// What kernels.cu needs of CUDA, on the CPU: the same source is compiled as C++ and its blocks and
// threads run one after the other, under a sanitizer if wanted. Device memory is heap memory.
#ifndef ASYNCRL_RESHARD_CUDA_EMULATION_H_
#define ASYNCRL_RESHARD_CUDA_EMULATION_H_

#include <cstdlib>
#include <cstring>

#define __global__
#define __device__

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

struct EmulatedIndex {
  unsigned x = 0;
};
inline thread_local EmulatedIndex blockIdx, threadIdx, blockDim, gridDim;

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "out of memory";
}
template <typename Type>
cudaError_t cudaMalloc(Type** address, size_t num_bytes) {
  *address = static_cast<Type*>(std::malloc(num_bytes));
  return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFree(void* address) {
  std::free(address);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* target, const void* source, size_t num_bytes, cudaMemcpyKind) {
  std::memcpy(target, source, num_bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t num_bytes,
                                   cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(target, source, num_bytes, kind);
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;
  return cudaSuccess;
}
inline void atomicAdd(unsigned long long* sum, unsigned long long term) { *sum += term; }

// Every lane stands alone: its sum is the warp's, and it is the leader.
inline unsigned long long warp_sum(unsigned long long sum) { return sum; }
inline bool is_warp_leader() { return true; }

template <typename Body>
void emulate_launch(unsigned grid, unsigned block, Body body) {
  gridDim.x = grid;
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) body();
  }
}

#define ASYNCRL_LAUNCH(kernel, grid, block, stream, ...) \
  (static_cast<void>(stream), emulate_launch(grid, block, [&] { kernel(__VA_ARGS__); }))

#endif  // ASYNCRL_RESHARD_CUDA_EMULATION_H_
