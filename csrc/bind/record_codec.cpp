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

RecordFormat::RecordFormat(const std::vector<std::tuple<std::string, std::string, int>>& fields,
                           const std::string& weight)
    : weight_field_(fields.size()) {
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
    if (name == weight) weight_field_ = fields_.size();
    fields_.push_back(field);
  }
  if (!weight.empty() && weight_field_ == fields.size())
    throw py::value_error("a record has no field " + weight + " to be its weight");
}

EncodedRecord::EncodedRecord(const RecordFormat& format, const py::tuple& values)
    : format_(&format), values_(values) {
  const std::vector<RecordField>& fields = format.fields();
  if (values.size() != fields.size()) {
    throw py::type_error("a record has " + std::to_string(fields.size()) + " fields, got " +
                         std::to_string(values.size()) + " values");
  }
  contents_.reserve(fields.size());
  length_ = sizeof(RecordHeader) + fields.size() * sizeof(RecordField);
  try {
    for (size_t index = 0; index < fields.size(); ++index) {
      const RecordField& field = fields[index];
      const py::handle value = PyTuple_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(index));
      const bool is_scalar = field.num_dims == 0 && field.dtype != DType::kString;
      contents_.push_back(is_scalar                       ? ScalarOf(field, value)
                          : field.dtype == DType::kString ? StringOf(field, value)
                          : IsPlainArray(field, value)    ? PlainArray(field, value)
                                                          : ArrayOf(field, value));
      Content& content = contents_.back();
      content.offset = ring::AlignUp(length_, is_scalar ? 8 : ring::kFieldAlign);
      length_ = content.offset + content.bytes;
    }
  } catch (...) {
    for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
    throw;
  }
}

EncodedRecord::~EncodedRecord() {
  for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
}

EncodedRecord::Content EncodedRecord::ScalarOf(const RecordField& field, py::handle value) {
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
  return {nullptr, 8, bits, {0, 0}, 0};
}

EncodedRecord::Content EncodedRecord::StringOf(const RecordField& field, py::handle value) {
  Py_ssize_t size = 0;
  if (!PyUnicode_Check(value.ptr())) ThrowType(field, value, "str");
  const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &size);  // kept by the str
  if (text == nullptr) throw py::error_already_set();
  return {text, static_cast<uint64_t>(size), 0, {static_cast<uint64_t>(size), 0}, 0};
}

// Whether it is a contiguous numpy array of just this type: that needs no buffer request.
bool EncodedRecord::IsPlainArray(const RecordField& field, py::handle value) {
  if (!py::detail::npy_api::get().PyArray_Check_(value.ptr())) return false;
  const auto* array = py::detail::array_proxy(value.ptr());
  return array->descr == NumpyDType(field.dtype).ptr() && array->nd == field.num_dims &&
         (array->flags & py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_) != 0;
}

EncodedRecord::Content EncodedRecord::PlainArray(const RecordField& field, py::handle value) {
  const auto* array = py::detail::array_proxy(value.ptr());
  Content content{array->data, ring::InfoOf(field.dtype).item_bytes, 0, {0, 0}, 0};
  for (int dim = 0; dim < array->nd; ++dim) {
    content.shape[dim] = static_cast<uint64_t>(array->dimensions[dim]);
    content.bytes *= content.shape[dim];
  }
  return content;
}

EncodedRecord::Content EncodedRecord::ArrayOf(const RecordField& field, py::handle value) {
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
  Content content{buffer.buf, static_cast<uint64_t>(buffer.len), 0, {0, 0}, 0};
  for (int dim = 0; dim < buffer.ndim; ++dim)
    content.shape[dim] = static_cast<uint64_t>(buffer.shape[dim]);
  return content;
}

void EncodedRecord::Write(std::byte* target) const {
  const std::vector<RecordField>& fields = format_->fields();
  const RecordHeader header{ring::kRecordMagic, static_cast<uint32_t>(fields.size())};
  std::memcpy(target, &header, sizeof(header));
  for (size_t index = 0; index < fields.size(); ++index) {
    const Content& content = contents_[index];
    RecordField field = fields[index];
    if (field.dtype == DType::kString) field.num_dims = 1;
    field.shape[0] = content.shape[0];
    field.shape[1] = content.shape[1];
    field.offset = content.offset;
    std::memcpy(target + sizeof(header) + index * sizeof(field), &field, sizeof(field));
    std::memcpy(target + content.offset, content.data ? content.data : &content.scalar,
                content.bytes);
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
