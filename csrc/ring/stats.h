// What is in a ring: counts under the lock, and a lock-free look inside for a ring whose lock is
// stuck.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ring/session.h"

namespace asyncrl::ring {

struct Stats {
  uint32_t num_slots, num_free, num_ready, num_claimed, num_held;
  uint64_t arena_bytes, bytes_used, ready_weight, max_record_bytes;
  uint64_t num_puts, num_duplicates, num_gets, num_acks, num_nacks, num_reclaimed, num_recoveries,
      num_steals;
  uint64_t num_dropped[kNumDropReasons];
  int64_t min_version;
  bool closed;
};

Stats ReadStats(Session& session);

struct ParticipantInfo {
  uint32_t index, pid;
  Role role;
  bool alive;
  std::string name;
  uint64_t age_ns, num_puts, num_gets;
};

struct LeaseInfo {
  std::string group;
  uint32_t rank, holder;  // holder: participant, or kNil
  uint64_t num_pending, num_leased, bytes, oldest_ns;
};

struct Snapshot {
  Stats stats;
  std::vector<ParticipantInfo> participants;
  std::vector<LeaseInfo> leases;
  uint32_t lock_owner;       // participant, or kNil
  uint64_t oldest_ready_ns;  // age of the oldest record that nobody has read, or 0
};

// Looks without the lock, so that it works on a stuck ring; a number that changes meanwhile may be
// off. Attaches nothing. Throws what Region::Open throws.
Snapshot Inspect(const std::string& directory);

}  // namespace asyncrl::ring
