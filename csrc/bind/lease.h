// A batch on loan: the records stay in place while it, or any view of them, exists.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "ring/groups.h"
#include "ring/record.h"

namespace asyncrl::bind {

// Shared by the Python object and by every array over its records. When the last of them goes, the
// lease ends; if it was not acknowledged, the batch is delivered again.
class Lease : public std::enable_shared_from_this<Lease> {
 public:
  Lease(std::shared_ptr<ring::GroupReader> reader, ring::Delivery delivery)
      : reader_(std::move(reader)), delivery_(std::move(delivery)) {}
  ~Lease();

  size_t size() const { return delivery_.slots.size(); }
  uint64_t begin() const { return delivery_.begin; }
  uint64_t end() const { return delivery_.end; }
  int num_views() const { return num_views_; }
  bool acknowledged() const { return acknowledged_; }
  bool released() const { return released_; }

  // A numpy array over a field of record `index`, without a copy. `writeable` only sets numpy's
  // flag (for torch, which has no read-only tensors); the memory itself is mapped read-only.
  pybind11::object View(size_t index, const std::string& name, bool writeable);

  // All array fields of record `index`, by name; together they count as one view.
  pybind11::dict Views(size_t index);

  // The same with the scalars and strings.
  pybind11::dict Values(size_t index);

  // `Values` of every record, in order, or only the fields named; together they count as one view.
  // Throws KeyError for a name that the first record does not have.
  pybind11::list AllValues(const std::optional<pybind11::sequence>& names);

  // A scalar or a string.
  pybind11::object Scalar(size_t index, const std::string& name) const;

  const ring::Slot& slot(size_t index) const;

  void Ack();

  // Throws kViewsAlive while views exist.
  void Release();

  // Ends the lease now, or when the last view goes.
  void ReleaseWhenUnused();

  // Ack and ReleaseWhenUnused, under one lock where no view is left.
  void Finish();

  // Throws kCorrupt when a record was published with a checksum and its bytes differ.
  void Verify(size_t index) const;

 private:
  struct ViewToken;
  pybind11::capsule MakeToken();
  template <typename Wants>
  static pybind11::dict Fields(const std::byte* record, const pybind11::capsule& token,
                               Wants wants);
  const std::byte* Record(size_t index) const;
  const ring::RecordField& Find(size_t index, const std::string& name) const;

  std::shared_ptr<ring::GroupReader> reader_;
  ring::Delivery delivery_;
  std::atomic<int> num_views_{0};
  bool acknowledged_ = false, released_ = false;
};

}  // namespace asyncrl::bind
