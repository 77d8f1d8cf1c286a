// The metadata lock: one futex word that names its owner, so that a dead owner can be told from a
// slow one.
#pragma once

#include <cstdint>

#include "ring/futex.h"
#include "ring/presence.h"
#include "ring/region.h"

namespace asyncrl::ring {

inline constexpr int64_t kProbeInterval = 20 * kMillisecond;

class MetadataLock {
 public:
  MetadataLock(Region& region, Presence& presence, uint32_t self)
      : region_(region), word_(region.header().lock), presence_(presence), self_(self) {}

  // Acquires. Returns true when the word was taken from a participant that died holding it: the
  // tables may be half-changed and must be rebuilt before anything else. Throws kLockTimeout,
  // naming the owner, when a live owner keeps it past `timeout_ns`. One thread per participant at a
  // time.
  bool Acquire(int64_t timeout_ns);

  void Release();

  // Whether the word names this participant, although it has not acquired: its predecessor under
  // the same index died holding it.
  bool Inherited() const;

 private:
  bool Spin();
  bool StealFrom(uint32_t owner);
  [[noreturn]] void ThrowTimeout(uint32_t owner, int64_t timeout_ns) const;

  Region& region_;
  std::atomic<uint32_t>& word_;
  Presence& presence_;
  uint32_t self_;
};

}  // namespace asyncrl::ring
