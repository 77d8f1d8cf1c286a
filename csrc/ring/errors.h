// What can go wrong in the ring. The binding maps each kind to a Python class of the same meaning.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace asyncrl::ring {

enum class ErrorKind {
  kClosed,       // put after close, or get after close and drain
  kTimeout,      // a deadline passed; the message names whom it waited for
  kFull,         // no room, and the policy is to fail
  kTooLarge,     // a record above max_record_bytes
  kStale,        // a record below the ring's min_version
  kKeyTooOld,    // a publication key below the window in which duplicates are recognised
  kNotAMember,   // rank outside the group, or the group is gone
  kMemberBusy,   // another live process holds this rank
  kLimit,        // a fixed table (participants, groups, producers) is full
  kExists,       // create where a ring is
  kMissing,      // open where no ring is
  kForeign,      // not a ring file
  kAbi,          // a ring of another version of this code
  kCorrupt,      // damaged or truncated
  kNoSpace,      // the file system cannot hold the ring
  kLockTimeout,  // the metadata lock is held by a live process that does not run
  kReleased,     // a record of a batch that was released
  kDetached,     // this handle was detached, or was opened before a fork
  kViewsAlive,   // release while views over the records exist
  kSystem,       // a system call failed
};

class RingError : public std::runtime_error {
 public:
  RingError(ErrorKind kind, const std::string& message)
      : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// "WHAT: strerror" of the current errno.
[[noreturn]] inline void ThrowSystem(const std::string& what) {
  throw RingError(ErrorKind::kSystem, what + ": " + std::strerror(errno));
}

}  // namespace asyncrl::ring
