// Device memory, times and errors for the check on a GPU. Compiled by nvcc, or as C++ with the
// emulation.
#ifndef ASYNCRL_TESTS_CPP_GPU_DEVICE_H_
#define ASYNCRL_TESTS_CPP_GPU_DEVICE_H_

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef ASYNCRL_EMULATE_CUDA
#include "reshard/cuda_emulation.h"
#else
#include <cuda_runtime.h>
#endif

#include "reshard/cuda_program.h"
#include "reshard_reference.h"

namespace asyncrl::reshard::testing {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t num_bytes) : num_bytes_(num_bytes) {
    check_cuda(cudaMalloc(&address_, std::max<size_t>(num_bytes, 1)), "device memory");
  }
  explicit DeviceBuffer(const Bytes& bytes) : DeviceBuffer(bytes.size()) {
    check_cuda(cudaMemcpy(address_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "upload");
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), num_bytes_(other.num_bytes_) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
    if (address_) cudaFree(address_);
  }

  std::byte* data() const { return address_; }
  Bytes read() const {
    Bytes bytes(num_bytes_);
    check_cuda(cudaMemcpy(bytes.data(), address_, num_bytes_, cudaMemcpyDeviceToHost), "download");
    return bytes;
  }

 private:
  std::byte* address_ = nullptr;
  size_t num_bytes_ = 0;
};

// A scenario's memory on the device, and its program.
class OnDevice {
 public:
  OnDevice(const Scenario& scenario, int max_blocks)
      : wire_(scenario.wire),
        digests_(static_cast<size_t>(scenario.num_digests) * 8),
        program_(CopyProgram(scenario.segments, scenario.sizes(),
                             static_cast<int64_t>(scenario.wire.size()), scenario.num_digests,
                             scenario.scales),
                 max_blocks) {
    for (const Bytes& parameter : scenario.parameters) {
      parameters_.emplace_back(parameter);
      addresses_.push_back(reinterpret_cast<uint64_t>(parameters_.back().data()));
    }
    clear_digests();
  }

  void run(bool pack) {
    auto* digests = reinterpret_cast<uint64_t*>(digests_.data());
    pack ? program_.pack(addresses_, wire_.data(), digests, nullptr)
         : program_.unpack(addresses_, wire_.data(), digests, nullptr);
  }
  void clear_digests() {
    check_cuda(cudaMemset(digests_.data(), 0, digests_.read().size()), "clearing digests");
  }
  std::vector<uint64_t> digests() const {
    const Bytes bytes = digests_.read();
    std::vector<uint64_t> values(bytes.size() / 8);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  const DeviceBuffer& wire() const { return wire_; }
  const std::vector<DeviceBuffer>& parameters() const { return parameters_; }

 private:
  DeviceBuffer wire_, digests_;
  CudaProgram program_;
  std::vector<DeviceBuffer> parameters_;
  std::vector<uint64_t> addresses_;
};

class Stopwatch {
 public:
  Stopwatch() {
    check_cuda(cudaEventCreate(&start_), "an event");
    check_cuda(cudaEventCreate(&end_), "an event");
  }
  Stopwatch(const Stopwatch&) = delete;
  ~Stopwatch() {
    cudaEventDestroy(start_);
    cudaEventDestroy(end_);
  }

  template <typename Action>
  double seconds(Action action) {
    check_cuda(cudaEventRecord(start_), "starting the clock");
    action();
    check_cuda(cudaEventRecord(end_), "stopping the clock");
    check_cuda(cudaEventSynchronize(end_), "a kernel");
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, start_, end_), "reading the clock");
    return milliseconds / 1e3;
  }

 private:
  cudaEvent_t start_{}, end_{};
};

}  // namespace asyncrl::reshard::testing

#endif  // ASYNCRL_TESTS_CPP_GPU_DEVICE_H_
