// One participant's access to a ring: its place among the participants, the metadata lock with
// recovery, and waking.
//
// Any thread of the process may call; a mutex inside lets one thread at a time compete for the lock
// that is shared between processes. In a forked child every call throws kDetached.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ring/lock.h"
#include "ring/presence.h"
#include "ring/region.h"
#include "ring/table.h"

namespace asyncrl::ring {

// Longest sleep before a waiter looks again for signals, deaths and closing.
// A wake-up from the cold costs up to 0.1 ms, so that this bounds what an idle waiter uses.
inline constexpr int64_t kWaitSlice = 150 * kMillisecond;

// How long a waiter looks on before it sleeps: less than a wake-up costs both sides.
inline constexpr int64_t kSpin = 30'000;

// Called once per slice while waiting; throws to give up.
using Interrupt = std::function<void()>;

class Session : public std::enable_shared_from_this<Session> {
 public:
  // Attaches: claims an index, recovers what its predecessor left, registers. Throws what
  // Region::Open throws, and kLimit when all places are taken. `name` is cut to kNameBytes - 1.
  static std::shared_ptr<Session> Attach(const std::string& directory, Role role,
                                         const std::string& name);
  Session(std::shared_ptr<Region> region, Role role, const std::string& name);
  ~Session();

  // Leaves the ring. The mapping lives on until the last reference to this object is gone.
  void Detach();

  // Holding one means holding the metadata lock, with sound tables. What was marked for waking is
  // woken when it ends, after the lock is free.
  class Locked {
   public:
    explicit Locked(Session& session);
    ~Locked();
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

    void WakeDataSleepers() { wake_data_ = true; }
    void WakeSpaceSleepers() { wake_space_ = true; }

   private:
    Session& session_;
    std::unique_lock<std::mutex> mutex_;
    bool wake_data_ = false, wake_space_ = false;
  };

  // With the lock: takes back what dead participants held (claims, leases, the ticket).
  void Sweep(Locked& locked);

  // With the lock: what participant `index` held. The caller knows that it is dead.
  void Reclaim(uint32_t index, Locked& locked);

  // With the lock: frees a held slot that nobody waits for or looks at any more.
  void FreeIfDone(uint32_t slot, Locked& locked);

  // With the lock: note this thread (or, with `armed`, this participant's FIFO) as waiting, before
  // it is released. Returns the sequence to sleep on.
  uint32_t PrepareSleep(WaitPoint& point, bool armed);

  // Without the lock: sleeps for a slice or until woken, and returns whether it was woken. After a
  // full slice calls `interrupt` and sweeps.
  bool Sleep(WaitPoint& point, uint32_t sequence, int64_t deadline_ns, const Interrupt& interrupt);

  // Makes this participant's FIFO if it is missing, and opens it for reading, non-blocking. The
  // caller closes the descriptor.
  int OpenWakeFifo();

  // A lease ended where the lock could not be waited for; `release` runs under the lock at the next
  // chance.
  void Defer(std::function<void(Locked&)> release);

  Region& region() { return *region_; }
  Table& table() { return table_; }
  Control& control() { return region_->control(); }
  const Geometry& geometry() const { return region_->geometry(); }
  bool IsAlive(uint32_t participant) const { return presence_.IsAlive(participant); }
  // With the lock: whether the process that registered as `participant` lives. May be true for a
  // moment after its death, while another process looks at its place.
  bool IsAttached(uint32_t participant) const;
  uint32_t self() const { return self_; }
  uint32_t NextSerial();
  void set_lock_timeout(int64_t timeout_ns) { lock_timeout_ns_ = timeout_ns; }

 private:
  void Register(Role role, const std::string& name);
  bool Wake(WaitPoint& point, uint32_t armed_bit, std::vector<uint32_t>& fifos);
  void RunDeferred(Locked& locked) noexcept;
  void CheckUsable() const;

  std::shared_ptr<Region> region_;
  Presence presence_;
  uint32_t self_;
  MetadataLock lock_;
  Table table_;
  std::mutex mutex_;
  std::mutex deferred_mutex_;
  std::vector<std::function<void(Locked&)>> deferred_;
  std::atomic<uint32_t> serial_{0};
  std::atomic<bool> detached_{false};
  int64_t lock_timeout_ns_ = 10'000 * kMillisecond;
};

}  // namespace asyncrl::ring
