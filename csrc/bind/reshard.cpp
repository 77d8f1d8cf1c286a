// Python face of the reshard executors: tables come as buffers of int64, memory as addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#ifdef ASYNCRL_WITH_CUDA
#include "reshard/cuda_program.h"
#endif
#include "reshard/program.h"
#include "reshard/workers.h"

namespace py = pybind11;

namespace asyncrl {
namespace {

using reshard::BlockScales;
using reshard::CopyProgram;
using reshard::CopyWorkers;
using reshard::Segment;

template <typename Value>
std::vector<Value> copy_table(const py::buffer& buffer, const char* what) {
  const py::buffer_info info = buffer.request();
  if (info.itemsize != sizeof(int64_t) || info.ndim != 1 || info.strides[0] != sizeof(int64_t))
    throw py::value_error(std::string(what) +
                          " must be a contiguous 1-D buffer of 64-bit integers");
  const size_t num_bytes = static_cast<size_t>(info.size) * sizeof(int64_t);
  if (num_bytes % sizeof(Value))
    throw py::value_error(std::string(what) + " does not hold a whole number of entries");
  std::vector<Value> table(num_bytes / sizeof(Value));
  if (num_bytes) std::memcpy(table.data(), info.ptr, num_bytes);
  return table;
}

#ifdef ASYNCRL_WITH_CUDA
void register_cuda(py::module_& module) {
  using reshard::CudaProgram;
  py::class_<CudaProgram>(module, "CudaProgram",
                          "A CopyProgram on the current CUDA device; all addresses are on it.")
      .def(py::init<const CopyProgram&, int>(), py::arg("program"), py::arg("max_blocks") = 0)
      .def(
          "pack",
          [](CudaProgram& program, const std::vector<uint64_t>& parameters, uint64_t wire_address,
             uint64_t digests_address, uint64_t stream) {
            program.pack(parameters, reinterpret_cast<std::byte*>(wire_address),
                         reinterpret_cast<uint64_t*>(digests_address),
                         reinterpret_cast<void*>(stream));
          },
          py::arg("parameters"), py::arg("wire_address"), py::arg("digests_address"),
          py::arg("stream"), "Enqueue the copies from the parameters into the bucket.")
      .def(
          "unpack",
          [](CudaProgram& program, const std::vector<uint64_t>& parameters, uint64_t wire_address,
             uint64_t digests_address, uint64_t stream) {
            program.unpack(parameters, reinterpret_cast<const std::byte*>(wire_address),
                           reinterpret_cast<uint64_t*>(digests_address),
                           reinterpret_cast<void*>(stream));
          },
          py::arg("parameters"), py::arg("wire_address"), py::arg("digests_address"),
          py::arg("stream"), "Enqueue the copies from the bucket into the parameters.");
}
#endif

}  // namespace

void register_reshard(py::module_& module) {
  module.attr("SEGMENT_FIELDS") = reshard::kSegmentFields;
  module.attr("BLOCK_SCALES_FIELDS") = reshard::kBlockScalesFields;
  py::class_<CopyWorkers>(module, "CopyWorkers",
                          "Threads that share the copies of one bucket at a time.")
      .def(py::init<int>(), py::arg("num_threads"), "The calling thread is one of them.")
      .def_property_readonly("num_threads", &CopyWorkers::num_threads);
  py::class_<CopyProgram>(
      module, "CopyProgram",
      "The copies of one bucket, checked against the sizes of all that they touch.")
      .def(py::init([](const py::buffer& segments, const std::vector<int64_t>& parameter_bytes,
                       int64_t wire_bytes, int64_t num_digests,
                       const std::optional<py::buffer>& block_scales) {
             std::vector<BlockScales> scales;
             if (block_scales) scales = copy_table<BlockScales>(*block_scales, "block scales");
             return CopyProgram(copy_table<Segment>(segments, "segments"), parameter_bytes,
                                wire_bytes, num_digests, std::move(scales));
           }),
           py::arg("segments"), py::arg("parameter_bytes"), py::arg("wire_bytes"),
           py::arg("num_digests"), py::arg("block_scales") = py::none())
      .def(
          "pack",
          [](const CopyProgram& program, const std::vector<uint64_t>& parameters,
             uint64_t wire_address, uint64_t digests_address, CopyWorkers* workers) {
            const py::gil_scoped_release release;
            program.pack(parameters, reinterpret_cast<std::byte*>(wire_address),
                         reinterpret_cast<uint64_t*>(digests_address), workers);
          },
          py::arg("parameters"), py::arg("wire_address"), py::arg("digests_address"),
          py::arg("workers") = nullptr,
          "Copy parameters (addresses) into the bucket and add to num_digests 64-bit digests.")
      .def(
          "unpack",
          [](const CopyProgram& program, const std::vector<uint64_t>& parameters,
             uint64_t wire_address, uint64_t digests_address, CopyWorkers* workers) {
            const py::gil_scoped_release release;
            program.unpack(parameters, reinterpret_cast<const std::byte*>(wire_address),
                           reinterpret_cast<uint64_t*>(digests_address), workers);
          },
          py::arg("parameters"), py::arg("wire_address"), py::arg("digests_address"),
          py::arg("workers") = nullptr,
          "Copy the bucket into parameters (addresses) and add to num_digests 64-bit digests.")
      .def_property_readonly("wire_bytes", &CopyProgram::wire_bytes)
      .def_property_readonly("num_digests", &CopyProgram::num_digests)
      .def_property_readonly("num_segments",
                             [](const CopyProgram& program) { return program.segments().size(); });
#ifdef ASYNCRL_WITH_CUDA
  register_cuda(module);
#endif
}

}  // namespace asyncrl
