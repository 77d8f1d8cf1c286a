#include "bind/record_codec.h"

#include <cstring>

namespace asyncrl::bind {

namespace py = pybind11;
using ring::DType;
using ring::DTypeInfo;
using ring::RecordField;
using ring::RecordHeader;

namespace {

DType DTypeNamed(const std::string& name) {
  for (const DTypeInfo& info : ring::kDTypes) {
    if (name == info.name) return info.dtype;
  }
  throw py::value_error("a record field cannot have dtype " + name);
}

template <typename T>
uint64_t Bits(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  return bits;
}

[[noreturn]] void ThrowType(const RecordField& field, py::handle value,
                            const std::string& expected) {
  throw py::type_error(std::string("field ") + field.name + ": expected " + expected + ", got " +
                       std::string(py::str(py::type::of(value).attr("__name__"))));
}

void CheckPythonError() {
  if (PyErr_Occurred()) throw py::error_already_set();
}

}  // namespace

RecordFormat::RecordFormat(const std::vector<std::tuple<std::string, std::string, int>>& fields) {
  for (const auto& [name, dtype, num_dims] : fields) {
    RecordField field{};
    if (name.empty() || name.size() >= ring::kFieldNameBytes) {
      throw py::value_error("a field's name has 1 to 23 bytes: " + name);
    }
    if (num_dims < 0 || num_dims > 2)
      throw py::value_error("field " + name + ": 0 to 2 dimensions");
    std::memcpy(field.name, name.data(), name.size());
    field.dtype = DTypeNamed(dtype);
    field.num_dims = static_cast<uint8_t>(num_dims);
    fields_.push_back(field);
  }
}

EncodedRecord::EncodedRecord(const RecordFormat& format, const py::tuple& values)
    : fields_(format.fields()) {
  if (values.size() != fields_.size()) {
    throw py::type_error("a record has " + std::to_string(fields_.size()) + " fields, got " +
                         std::to_string(values.size()) + " values");
  }
  sources_.reserve(fields_.size());
  arrays_.reserve(fields_.size());
  length_ = sizeof(RecordHeader) + fields_.size() * sizeof(RecordField);
  try {
    for (size_t index = 0; index < fields_.size(); ++index) {
      RecordField& field = fields_[index];
      const py::handle value = PyTuple_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(index));
      if (field.dtype == DType::kString) {
        AddString(field, value);
      } else if (field.num_dims == 0) {
        AddScalar(field, value);
      } else {
        AddArray(field, value);
      }
      field.offset = ring::AlignUp(length_, field.num_dims == 0 ? 8 : ring::kFieldAlign);
      length_ = field.offset + sources_.back().bytes;
    }
  } catch (...) {
    for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
    throw;
  }
}

EncodedRecord::~EncodedRecord() {
  for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
}

void EncodedRecord::AddScalar(RecordField& field, py::handle value) {
  uint64_t bits = 0;
  switch (field.dtype) {
    case DType::kFloat64:
      bits = Bits(PyFloat_AsDouble(value.ptr()));
      break;
    case DType::kFloat32:
      bits = Bits(static_cast<float>(PyFloat_AsDouble(value.ptr())));
      break;
    case DType::kUint64:
      bits = PyLong_AsUnsignedLongLong(value.ptr());
      break;
    case DType::kInt64:
      bits = Bits(PyLong_AsLongLong(value.ptr()));
      break;
    default:
      throw py::type_error(std::string("field ") + field.name +
                           ": a scalar is int64, uint64, float32 or float64");
  }
  CheckPythonError();
  sources_.push_back({nullptr, 8, bits});
}

void EncodedRecord::AddString(RecordField& field, py::handle value) {
  Py_ssize_t size = 0;
  if (!PyUnicode_Check(value.ptr())) ThrowType(field, value, "str");
  const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &size);  // kept by the str
  if (text == nullptr) throw py::error_already_set();
  field.num_dims = 1;
  field.shape[0] = static_cast<uint64_t>(size);
  sources_.push_back({text, static_cast<uint64_t>(size), 0});
}

// A contiguous numpy array of just this type, without the cost of a buffer request.
bool EncodedRecord::AddNumpyArray(RecordField& field, py::handle value) {
  auto& api = py::detail::npy_api::get();
  if (!api.PyArray_Check_(value.ptr())) return false;
  const auto* array = py::detail::array_proxy(value.ptr());
  if (array->descr != NumpyDType(field.dtype).ptr() || array->nd != field.num_dims ||
      !(array->flags & py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_)) {
    return false;
  }
  uint64_t bytes = ring::InfoOf(field.dtype).item_bytes;
  for (int dim = 0; dim < array->nd; ++dim) {
    field.shape[dim] = static_cast<uint64_t>(array->dimensions[dim]);
    bytes *= field.shape[dim];
  }
  arrays_.push_back(py::reinterpret_borrow<py::object>(value));
  sources_.push_back({array->data, bytes, 0});
  return true;
}

void EncodedRecord::AddArray(RecordField& field, py::handle value) {
  if (AddNumpyArray(field, value)) return;
  const DTypeInfo& info = ring::InfoOf(field.dtype);
  Py_buffer buffer;
  if (PyObject_GetBuffer(value.ptr(), &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    ThrowType(field, value, std::string("a C-contiguous array of ") + info.name);
  }
  buffers_.push_back(buffer);
  const char* format = buffer.format ? buffer.format : "B";
  if (*format == '<' || *format == '=' || *format == '@') ++format;
  if (std::strlen(format) != 1 || std::strchr(info.formats, *format) == nullptr ||
      buffer.itemsize != static_cast<Py_ssize_t>(info.item_bytes)) {
    throw py::type_error(std::string("field ") + field.name + ": expected dtype " + info.name +
                         ", got an array of format '" + format + "' and " +
                         std::to_string(buffer.itemsize) + " bytes an item");
  }
  if (buffer.ndim != field.num_dims) {
    throw py::type_error(std::string("field ") + field.name + ": expected " +
                         std::to_string(field.num_dims) + " dimensions, got " +
                         std::to_string(buffer.ndim));
  }
  for (int dim = 0; dim < buffer.ndim; ++dim)
    field.shape[dim] = static_cast<uint64_t>(buffer.shape[dim]);
  sources_.push_back({buffer.buf, static_cast<uint64_t>(buffer.len), 0});
}

void EncodedRecord::Write(std::byte* target) const {
  const RecordHeader header{ring::kRecordMagic, static_cast<uint32_t>(fields_.size())};
  std::memcpy(target, &header, sizeof(header));
  std::memcpy(target + sizeof(header), fields_.data(), fields_.size() * sizeof(RecordField));
  for (size_t index = 0; index < fields_.size(); ++index) {
    const Source& source = sources_[index];
    std::memcpy(target + fields_[index].offset, source.data ? source.data : &source.scalar,
                source.bytes);
  }
}

py::object ReadScalar(const std::byte* record, const RecordField& field) {
  const std::byte* at = record + field.offset;
  auto read = [at]<typename T>(T value) {
    std::memcpy(&value, at, sizeof(value));
    return value;
  };
  switch (field.dtype) {
    case DType::kFloat64:
      return py::float_(read(double{}));
    case DType::kFloat32:
      return py::float_(static_cast<double>(read(float{})));
    case DType::kUint64:
      return py::int_(read(uint64_t{}));
    case DType::kString:
      return py::str(reinterpret_cast<const char*>(at), field.shape[0]);
    default:
      return py::int_(read(int64_t{}));
  }
}

py::dtype NumpyDType(DType dtype) {
  // Made once and kept for the life of the process: views are made on the hot path.
  static PyObject* cached[std::size(ring::kDTypes)] = {};
  PyObject*& slot = cached[static_cast<uint8_t>(dtype)];
  if (slot == nullptr) slot = py::dtype(ring::InfoOf(dtype).name).release().ptr();
  return py::reinterpret_borrow<py::dtype>(slot);
}

}  // namespace asyncrl::bind
