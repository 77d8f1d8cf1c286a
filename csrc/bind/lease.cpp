#include "bind/lease.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "bind/record_codec.h"
#include "common/crc32c.h"
#include "ring/errors.h"

namespace asyncrl::bind {

namespace py = pybind11;
using ring::ErrorKind;
using ring::RingError;

namespace {

// An array over `field`, which keeps `token`.
py::object MakeView(const std::byte* record, const ring::RecordField& field, py::handle token,
                    bool writeable) {
  auto& api = py::detail::npy_api::get();
  Py_intptr_t shape[2] = {static_cast<Py_intptr_t>(field.shape[0]),
                          static_cast<Py_intptr_t>(field.shape[1])};
  const int flags = py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_ |
                    py::detail::npy_api::NPY_ARRAY_ALIGNED_ |
                    (writeable ? py::detail::npy_api::NPY_ARRAY_WRITEABLE_ : 0);
  auto* data = const_cast<std::byte*>(record + field.offset);
  auto view = py::reinterpret_steal<py::object>(
      api.PyArray_NewFromDescr_(api.PyArray_Type_, NumpyDType(field.dtype).release().ptr(),
                                field.num_dims, shape, nullptr, data, flags, nullptr));
  if (!view) throw py::error_already_set();
  if (api.PyArray_SetBaseObject_(view.ptr(), token.inc_ref().ptr()) != 0)
    throw py::error_already_set();
  return view;
}

// The name of a record's field number `index`. Names come back on every read: each is made once and
// kept for the life of the process; a ring's records all have the same, so the first look finds it.
py::handle NameOf(const ring::RecordField& field, size_t index) {
  struct Known {
    char name[ring::kFieldNameBytes];
    PyObject* text;
  };
  static std::vector<Known> known;  // the GIL guards it
  auto is_it = [&field](const Known& candidate) {
    return std::memcmp(candidate.name, field.name, sizeof(field.name)) == 0;
  };
  if (index < known.size() && is_it(known[index])) return known[index].text;
  const auto found = std::find_if(known.begin(), known.end(), is_it);
  if (found != known.end()) return found->text;
  Known added{{}, PyUnicode_InternFromString(field.name)};
  if (added.text == nullptr) throw py::error_already_set();
  std::memcpy(added.name, field.name, sizeof(field.name));
  known.push_back(added);
  return added.text;
}

// Another core wrote the record a moment ago: its table of fields comes while the one before is
// read.
void FetchAhead(const std::byte* record) {
  constexpr size_t kLine = 64, kUsualTable = 10 * kLine;
  for (size_t at = 0; at < kUsualTable; at += kLine) __builtin_prefetch(record + at);
}

void Set(const py::dict& values, py::handle name, const py::object& value) {
  if (PyDict_SetItem(values.ptr(), name.ptr(), value.ptr()) != 0) throw py::error_already_set();
}

// A field as a Python object; an array keeps `token`.
py::object ReadField(const std::byte* record, const ring::RecordField& field, py::handle token) {
  const bool is_array = field.num_dims > 0 && field.dtype != ring::DType::kString;
  return is_array ? MakeView(record, field, token, /*writeable=*/false) : ReadScalar(record, field);
}

// The fields that are wanted of many records with the same table, as one of them has it.
class Selection {
 public:
  // `values`: what was wanted of that record.
  Selection(const std::byte* record, const py::dict& values)
      : num_fields_(reinterpret_cast<const ring::RecordHeader*>(record)->num_fields),
        names_(py::reinterpret_steal<py::dict>(PyDict_Copy(values.ptr()))) {
    for (uint32_t i = 0; i < num_fields_; ++i) {
      const ring::RecordField& field = FieldsOf(record)[i];
      const py::handle name = NameOf(field, i);
      if (!names_.contains(name)) continue;
      wanted_.push_back({i, name, field});
      Set(names_, name, py::none());
    }
  }

  // Whether they stand in the same places in this record, too.
  bool Fits(const std::byte* record) const {
    const auto* header = reinterpret_cast<const ring::RecordHeader*>(record);
    return header->num_fields == num_fields_ &&
           std::all_of(wanted_.begin(), wanted_.end(), [record](const Wanted& each) {
             return std::memcmp(FieldsOf(record)[each.index].name, each.field.name,
                                ring::kFieldNameBytes) == 0;
           });
  }

  // What is wanted of a record that fits. The copy of a dictionary has its size from the start.
  py::dict Read(const std::byte* record, py::handle token) const {
    auto values = py::reinterpret_steal<py::dict>(PyDict_Copy(names_.ptr()));
    if (!values) throw py::error_already_set();
    for (const Wanted& each : wanted_)
      Set(values, each.name, ReadField(record, FieldsOf(record)[each.index], token));
    return values;
  }

 private:
  struct Wanted {
    uint32_t index;
    py::handle name;  // kept for the life of the process
    ring::RecordField field;
  };

  static const ring::RecordField* FieldsOf(const std::byte* record) {
    return reinterpret_cast<const ring::RecordField*>(record + sizeof(ring::RecordHeader));
  }

  uint32_t num_fields_;
  py::dict names_;  // to none
  std::vector<Wanted> wanted_;
};

}  // namespace

// What an array over a record has as its base: it counts as a view and keeps the lease.
struct Lease::ViewToken {
  std::shared_ptr<Lease> lease;
  explicit ViewToken(std::shared_ptr<Lease> held) : lease(std::move(held)) { ++lease->num_views_; }
  ~ViewToken() { --lease->num_views_; }
};

Lease::~Lease() {
  if (!released_) reader_->ReleaseSoon(delivery_.slots);
}

const ring::Slot& Lease::slot(size_t index) const {
  if (index >= delivery_.slots.size()) {
    throw py::index_error("record " + std::to_string(index) + " of a batch of " +
                          std::to_string(delivery_.slots.size()));
  }
  if (released_)
    throw RingError(ErrorKind::kReleased, "the batch was released; its records are gone");
  return reader_->session().table().slot(delivery_.slots[index]);
}

const std::byte* Lease::Record(size_t index) const {
  return reader_->session().region().arena() + slot(index).offset;
}

const ring::RecordField& Lease::Find(size_t index, const std::string& name) const {
  const ring::RecordField* field = ring::FindField(Record(index), name);
  if (field == nullptr) throw py::key_error("the record has no field " + name);
  return *field;
}

py::capsule Lease::MakeToken() {
  return py::capsule(new ViewToken(shared_from_this()),
                     [](void* token) { delete static_cast<ViewToken*>(token); });
}

py::object Lease::View(size_t index, const std::string& name, bool writeable) {
  const ring::RecordField& field = Find(index, name);
  if (field.num_dims == 0 || field.dtype == ring::DType::kString) {
    throw py::type_error("field " + name + " is not an array");
  }
  return MakeView(Record(index), field, MakeToken(), writeable);
}

py::dict Lease::Views(size_t index) {
  return Fields(Record(index), MakeToken(), [](const auto& field, py::handle) {
    return field.num_dims > 0 && field.dtype != ring::DType::kString;
  });
}

py::dict Lease::Values(size_t index) {
  return Fields(Record(index), MakeToken(), [](const auto&, py::handle) { return true; });
}

py::list Lease::AllValues(const std::optional<py::sequence>& names) {
  std::vector<py::object> wanted;  // interned, as those of NameOf: the same text is the same object
  if (names) {
    for (const py::handle name : *names) {
      PyObject* text = py::str(name).release().ptr();
      PyUnicode_InternInPlace(&text);
      wanted.push_back(py::reinterpret_steal<py::object>(text));
    }
  }
  const auto wants = [&](const ring::RecordField&, py::handle name) {
    return !names || std::any_of(wanted.begin(), wanted.end(),
                                 [name](const py::object& each) { return each.is(name); });
  };
  py::list records(size());
  if (size() == 0) return records;
  const py::capsule token = MakeToken();
  const py::dict first = Fields(Record(0), token, wants);
  if (first.size() < wanted.size()) {
    for (const py::object& name : wanted) Find(0, name.cast<std::string>());
  }
  PyList_SET_ITEM(records.ptr(), 0, first.inc_ref().ptr());
  if (size() == 1) return records;
  const Selection selection(Record(0), first);
  for (size_t index = 1; index < size(); ++index) {
    const std::byte* record = Record(index);
    if (index + 1 < size()) FetchAhead(Record(index + 1));
    py::dict values =
        selection.Fits(record) ? selection.Read(record, token) : Fields(record, token, wants);
    PyList_SET_ITEM(records.ptr(), static_cast<Py_ssize_t>(index), values.release().ptr());
  }
  return records;
}

template <typename Wants>
py::dict Lease::Fields(const std::byte* record, const py::capsule& token, Wants wants) {
  const auto* header = reinterpret_cast<const ring::RecordHeader*>(record);
  const auto* fields = reinterpret_cast<const ring::RecordField*>(record + sizeof(*header));
  py::dict values;
  for (uint32_t i = 0; i < header->num_fields; ++i) {
    const ring::RecordField& field = fields[i];
    const py::handle name = NameOf(field, i);
    if (!wants(field, name)) continue;
    Set(values, name, ReadField(record, field, token));
  }
  return values;
}

py::object Lease::Scalar(size_t index, const std::string& name) const {
  const ring::RecordField& field = Find(index, name);
  if (field.num_dims != 0 && field.dtype != ring::DType::kString) {
    throw py::type_error("field " + name + " is an array");
  }
  return ReadScalar(Record(index), field);
}

void Lease::Ack() {
  if (acknowledged_) return;
  if (released_) {
    throw RingError(ErrorKind::kReleased,
                    "the batch was released before it was acknowledged; get it again");
  }
  reader_->Ack(delivery_.begin, delivery_.end);
  acknowledged_ = true;
}

void Lease::Release() {
  if (released_) return;
  if (num_views_ > 0) {
    throw RingError(ErrorKind::kViewsAlive, std::to_string(num_views_.load()) +
                                                " views of the batch's " + std::to_string(size()) +
                                                " records are alive; drop them, then release");
  }
  reader_->Release(delivery_.slots);
  released_ = true;
}

void Lease::ReleaseWhenUnused() {
  if (num_views_ == 0) Release();
}

void Lease::Finish() {
  if (!acknowledged_ && !released_ && num_views_ == 0) {
    reader_->Finish(delivery_);
    acknowledged_ = released_ = true;
    return;
  }
  Ack();
  ReleaseWhenUnused();
}

void Lease::Verify(size_t index) const {
  const ring::Slot& checked = slot(index);
  if (checked.checksum == 0) return;
  const uint32_t found = Crc32c(Record(index), checked.length);
  if (found == checked.checksum) return;
  throw RingError(ErrorKind::kCorrupt, "record " + std::to_string(index) + " at position " +
                                           std::to_string(checked.position) + ": CRC-32C is " +
                                           std::to_string(found) + ", published with " +
                                           std::to_string(checked.checksum));
}

}  // namespace asyncrl::bind
