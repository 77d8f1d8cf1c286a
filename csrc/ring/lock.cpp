#include "ring/lock.h"

#include <string>

#include "common/crash_point.h"
#include "ring/errors.h"

namespace asyncrl::ring {

namespace {

constexpr int kSpins = 64;

uint32_t OwnerOf(uint32_t word) { return (word & ~kLockWaiters) - 1; }

}  // namespace

bool MetadataLock::Spin() {
  for (int spin = 0; spin < kSpins; ++spin) {
    uint32_t expected = 0;
    if (Peek(word_) == 0 &&
        word_.compare_exchange_strong(expected, self_ + 1, std::memory_order_acquire)) {
      return true;
    }
    Relax();
  }
  return false;
}

bool MetadataLock::Acquire(int64_t timeout_ns) {
  if (Spin()) return false;
  const int64_t deadline = NowNs() + timeout_ns;
  for (;;) {
    uint32_t word = word_.load(std::memory_order_relaxed);
    if (word == 0) {
      // Others may sleep as well: keep the mark, so that the release wakes one of them.
      if (word_.compare_exchange_strong(word, (self_ + 1) | kLockWaiters,
                                        std::memory_order_acquire)) {
        CRASH_POINT("lock.contended");
        return false;
      }
      continue;
    }
    if (!(word & kLockWaiters)) {
      if (!word_.compare_exchange_strong(word, word | kLockWaiters, std::memory_order_relaxed))
        continue;
      word |= kLockWaiters;
    }
    CRASH_POINT("lock.waiting");
    const bool woken = FutexWaitUntil(word_, word, NowNs() + kProbeInterval);
    if (woken) continue;
    const uint32_t owner = OwnerOf(word);
    if (StealFrom(owner)) return true;
    if (NowNs() >= deadline) ThrowTimeout(owner, timeout_ns);
  }
}

// Holding the dead owner's byte means that nobody can become that participant, so a word that still
// names it is still the dead one's: there is no A-B-A between the probe and the exchange.
bool MetadataLock::StealFrom(uint32_t owner) {
  if (owner >= region_.geometry().num_participants) {
    throw RingError(ErrorKind::kCorrupt, region_.directory() + ": the lock names participant " +
                                             std::to_string(owner) + " of " +
                                             std::to_string(region_.geometry().num_participants) +
                                             "; run `asyncrl ring --repair`");
  }
  if (!presence_.Seize(owner)) return false;
  CRASH_POINT("steal.seized");
  bool stolen = false;
  uint32_t word = word_.load(std::memory_order_relaxed);
  while (!stolen && word != 0 && OwnerOf(word) == owner) {
    stolen =
        word_.compare_exchange_strong(word, (self_ + 1) | kLockWaiters, std::memory_order_acquire);
  }
  CRASH_POINT("steal.exchanged");
  presence_.Drop(owner);
  return stolen;
}

void MetadataLock::Release() {
  CRASH_POINT("unlock.before");
  const uint32_t word = word_.exchange(0, std::memory_order_release);
  CRASH_POINT("unlock.after");
  if (word & kLockWaiters) FutexWake(word_, 1);
}

bool MetadataLock::Inherited() const {
  const uint32_t word = word_.load(std::memory_order_acquire);
  return word != 0 && OwnerOf(word) == self_;
}

void MetadataLock::ThrowTimeout(uint32_t owner, int64_t timeout_ns) const {
  const Participant& participant = region_.participants()[owner];
  throw RingError(ErrorKind::kLockTimeout,
                  region_.directory() + ": waited " + std::to_string(timeout_ns / kMillisecond) +
                      " ms for the lock, held by " + std::string(participant.name) + " (pid " +
                      std::to_string(participant.pid) +
                      "), which is alive but does not run; continue it or kill it");
}

}  // namespace asyncrl::ring
