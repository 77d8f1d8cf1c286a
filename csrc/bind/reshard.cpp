// Python face of the reshard executors: tables come as buffers of int64, memory as addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <vector>

#include "reshard/program.h"

namespace py = pybind11;

namespace asyncrl {
namespace {

using reshard::CopyProgram;
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

std::span<uint64_t> digest_table(const py::buffer_info& info) {
  if (info.itemsize != sizeof(uint64_t) || info.ndim != 1 || info.readonly)
    throw py::value_error("digests must be a writable 1-D buffer of 64-bit integers");
  return {static_cast<uint64_t*>(info.ptr), static_cast<size_t>(info.size)};
}

}  // namespace

void register_reshard(py::module_& module) {
  module.attr("SEGMENT_FIELDS") = reshard::kSegmentFields;
  py::class_<CopyProgram>(
      module, "CopyProgram",
      "The copies of one bucket, checked against the sizes of all that they touch.")
      .def(py::init([](const py::buffer& segments, const std::vector<int64_t>& parameter_bytes,
                       int64_t wire_bytes, int64_t num_digests) {
             return CopyProgram(copy_table<Segment>(segments, "segments"), parameter_bytes,
                                wire_bytes, num_digests);
           }),
           py::arg("segments"), py::arg("parameter_bytes"), py::arg("wire_bytes"),
           py::arg("num_digests"))
      .def(
          "pack",
          [](const CopyProgram& program, const std::vector<uint64_t>& parameters,
             uint64_t wire_address, const py::buffer& digests) {
            const py::buffer_info info = digests.request(true);
            const auto table = digest_table(info);
            const py::gil_scoped_release release;
            program.pack(parameters, reinterpret_cast<std::byte*>(wire_address), table);
          },
          py::arg("parameters"), py::arg("wire_address"), py::arg("digests"),
          "Copy parameters (addresses) into the bucket and add to the digests.")
      .def(
          "unpack",
          [](const CopyProgram& program, const std::vector<uint64_t>& parameters,
             uint64_t wire_address, const py::buffer& digests) {
            const py::buffer_info info = digests.request(true);
            const auto table = digest_table(info);
            const py::gil_scoped_release release;
            program.unpack(parameters, reinterpret_cast<const std::byte*>(wire_address), table);
          },
          py::arg("parameters"), py::arg("wire_address"), py::arg("digests"),
          "Copy the bucket into parameters (addresses) and add to the digests.")
      .def_property_readonly("wire_bytes", &CopyProgram::wire_bytes)
      .def_property_readonly("num_segments",
                             [](const CopyProgram& program) { return program.segments().size(); });
}

}  // namespace asyncrl
