// Python values <-> the bytes of a record (csrc/ring/record.h).
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "ring/record.h"

namespace asyncrl::bind {

// The fixed list of fields that a ring's records have: what one Python tuple of values is checked
// against.
class RecordFormat {
 public:
  // (name, dtype, number of dimensions) per field. Dtypes as numpy spells them, and "str". A record
  // weighs what the array `weight` is long, or 1 where that is empty.
  explicit RecordFormat(const std::vector<std::tuple<std::string, std::string, int>>& fields,
                        const std::string& weight = "");

  const std::vector<ring::RecordField>& fields() const { return fields_; }
  // The number of the field that gives the weight, or that of all fields.
  size_t weight_field() const { return weight_field_; }

 private:
  std::vector<ring::RecordField> fields_;
  size_t weight_field_;
};

// One record to be: its values checked, its arrays pinned, its bytes counted. Needs the GIL, except
// Write.
class EncodedRecord {
 public:
  // Throws TypeError naming the field, what it is and what it should be.
  EncodedRecord(const RecordFormat& format, const pybind11::tuple& values);
  EncodedRecord(EncodedRecord&& other) noexcept = default;
  ~EncodedRecord();

  uint64_t length() const { return length_; }
  uint32_t weight() const {
    const size_t field = format_->weight_field();
    return field < contents_.size() ? static_cast<uint32_t>(contents_[field].shape[0]) : 1;
  }
  void Write(std::byte* target) const;

 private:
  // What differs from record to record in a field. Its bytes are pinned in a Python buffer,
  // borrowed from a str, or `scalar` itself.
  struct Content {
    const void* data;
    uint64_t bytes;
    uint64_t scalar;
    uint64_t shape[2];
    uint64_t offset;
  };

  static Content ScalarOf(const ring::RecordField& field, pybind11::handle value);
  static Content StringOf(const ring::RecordField& field, pybind11::handle value);
  Content ArrayOf(const ring::RecordField& field, pybind11::handle value);
  static bool IsPlainArray(const ring::RecordField& field, pybind11::handle value);
  static Content PlainArray(const ring::RecordField& field, pybind11::handle value);

  const RecordFormat* format_;
  std::vector<Content> contents_;  // one per field
  std::vector<Py_buffer> buffers_;
  pybind11::tuple values_;  // kept alive: arrays and strings are read in place
  uint64_t length_ = 0;
};

// A scalar or string field as a Python object.
pybind11::object ReadScalar(const std::byte* record, const ring::RecordField& field);

// The numpy dtype of a field.
pybind11::dtype NumpyDType(ring::DType dtype);

}  // namespace asyncrl::bind
