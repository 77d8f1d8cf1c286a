// The bytes of a record: a header, a fixed table of fields, the fields. A record describes itself.
//
//   RecordHeader | RecordField[num_fields] | scalars, 8 bytes each | arrays, each aligned to 64
//   bytes
#pragma once

#include <cstdint>
#include <string_view>

#include "ring/layout.h"

namespace asyncrl::ring {

inline constexpr uint32_t kRecordMagic = 0x31434552;  // "REC1"
inline constexpr uint32_t kFieldNameBytes = 24;       // terminating zero included
inline constexpr uint64_t kFieldAlign = 64;

enum class DType : uint8_t {
  kInt8,
  kUint8,
  kInt16,
  kUint16,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBool,
  kString
};

struct DTypeInfo {
  DType dtype;
  const char* name;     // as numpy spells it
  const char* formats;  // the struct-module characters of a buffer of this type
  uint32_t item_bytes;
};

inline constexpr DTypeInfo kDTypes[] = {
    {DType::kInt8, "int8", "b", 1},       {DType::kUint8, "uint8", "B", 1},
    {DType::kInt16, "int16", "h", 2},     {DType::kUint16, "uint16", "H", 2},
    {DType::kInt32, "int32", "il", 4},    {DType::kUint32, "uint32", "IL", 4},
    {DType::kInt64, "int64", "lq", 8},    {DType::kUint64, "uint64", "LQ", 8},
    {DType::kFloat16, "float16", "e", 2}, {DType::kFloat32, "float32", "f", 4},
    {DType::kFloat64, "float64", "d", 8}, {DType::kBool, "bool", "?", 1},
    {DType::kString, "str", "", 1},  // UTF-8
};

inline constexpr const DTypeInfo& InfoOf(DType dtype) {
  return kDTypes[static_cast<uint8_t>(dtype)];
}

struct RecordField {
  char name[kFieldNameBytes];
  DType dtype;
  uint8_t num_dims;  // 0: a scalar
  uint8_t reserved[6];
  uint64_t shape[2];
  uint64_t offset;  // from the start of the record
};
static_assert(sizeof(RecordField) == 56);

struct RecordHeader {
  uint32_t magic;
  uint32_t num_fields;
};

inline uint64_t FieldBytes(const RecordField& field) {
  uint64_t count = InfoOf(field.dtype).item_bytes;
  for (uint8_t dim = 0; dim < field.num_dims; ++dim) count *= field.shape[dim];
  return count;
}

// The field called `name` in the record at `record`, or nullptr.
inline const RecordField* FindField(const std::byte* record, std::string_view name) {
  const auto* header = reinterpret_cast<const RecordHeader*>(record);
  const auto* fields = reinterpret_cast<const RecordField*>(record + sizeof(RecordHeader));
  for (uint32_t index = 0; index < header->num_fields; ++index) {
    if (name == fields[index].name) return &fields[index];
  }
  return nullptr;
}

}  // namespace asyncrl::ring
