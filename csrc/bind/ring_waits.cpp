#include "bind/ring_waits.h"

#include <pybind11/pybind11.h>

#include <algorithm>

#include "ring/errors.h"
#include "ring/futex.h"

namespace asyncrl::bind {

namespace py = pybind11;
using ring::ErrorKind;
using ring::RingError;

namespace {

// The class in asyncrl.ring.errors for a kind.
const char* ClassOf(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kClosed:
      return "RingClosed";
    case ErrorKind::kTimeout:
      return "RingTimeout";
    case ErrorKind::kFull:
      return "RingFull";
    case ErrorKind::kTooLarge:
      return "RecordTooLarge";
    case ErrorKind::kStale:
      return "RecordStale";
    case ErrorKind::kKeyTooOld:
      return "KeyTooOld";
    case ErrorKind::kNotAMember:
      return "NotAMember";
    case ErrorKind::kMemberBusy:
      return "MemberBusy";
    case ErrorKind::kLimit:
      return "RingLimit";
    case ErrorKind::kExists:
      return "RingExists";
    case ErrorKind::kMissing:
      return "RingMissing";
    case ErrorKind::kForeign:
      return "NotARing";
    case ErrorKind::kAbi:
      return "RingAbiMismatch";
    case ErrorKind::kCorrupt:
      return "RingCorrupt";
    case ErrorKind::kNoSpace:
      return "RingNoSpace";
    case ErrorKind::kLockTimeout:
      return "LockTimeout";
    case ErrorKind::kReleased:
      return "BatchReleased";
    case ErrorKind::kDetached:
      return "RingDetached";
    case ErrorKind::kViewsAlive:
      return "ViewsAlive";
    case ErrorKind::kSystem:
      return "RingSystemError";
  }
  return "RingError";
}

}  // namespace

void Translate(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const RingError& error) {
    const py::object type = py::module_::import("asyncrl.ring.errors").attr(ClassOf(error.kind()));
    PyErr_SetString(type.ptr(), error.what());
  }
}

void CheckSignals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

int64_t DeadlineIn(double seconds) {
  if (seconds > 1e9) return ring::kForever;
  return ring::NowNs() + static_cast<int64_t>(std::max(seconds, 0.0) * 1e9);
}

}  // namespace asyncrl::bind
