// What the kernels need of CUDA, on the CPU: the same source is compiled as C++; blocks run one
// after the other, and the threads of a block too, phase by phase, under a sanitizer if wanted.
// Device memory is heap memory, and shared memory is static.
#ifndef ASYNCRL_RESHARD_CUDA_EMULATION_H_
#define ASYNCRL_RESHARD_CUDA_EMULATION_H_

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads, blocks)

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3
};
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

struct EmulatedIndex {
  unsigned x = 0;
};
inline EmulatedIndex blockIdx, blockDim, gridDim;

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
inline cudaError_t cudaMemset(void* target, int value, size_t num_bytes) {
  std::memset(target, value, num_bytes);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
struct cudaDeviceProp {
  char name[32] = "emulation on the CPU";
  int major = 0, minor = 0;
};
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  return cudaSuccess;
}

using EmulatedTime = std::chrono::steady_clock::time_point;
using cudaEvent_t = EmulatedTime*;
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new EmulatedTime;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t = nullptr) {
  *event = std::chrono::steady_clock::now();
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = std::chrono::duration<float, std::milli>(*end - *start).count();
  return cudaSuccess;
}

inline void atomicAdd(unsigned long long* sum, unsigned long long term) { *sum += term; }
inline void atomicMax(unsigned* largest, unsigned value) {
  if (value > *largest) *largest = value;
}

namespace asyncrl::reshard {

template <typename Phase>
void each_thread(Phase phase) {
  for (unsigned thread = 0; thread < blockDim.x; ++thread) phase(thread);
}
inline void block_barrier() {}

// Every lane stands alone: its value is the warp's, and it is the leader.
inline unsigned long long warp_sum(unsigned long long sum) { return sum; }
inline unsigned warp_max(unsigned value) { return value; }
inline bool is_warp_leader() { return true; }

}  // namespace asyncrl::reshard

template <typename Block>
void emulate_launch(unsigned grid, unsigned threads, Block block) {
  gridDim.x = grid;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) block();
}

#define ASYNCRL_LAUNCH(kernel, grid, block, stream, ...) \
  (static_cast<void>(stream), emulate_launch(grid, block, [&] { kernel(__VA_ARGS__); }))

#endif  // ASYNCRL_RESHARD_CUDA_EMULATION_H_
