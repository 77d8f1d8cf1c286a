#include "ring/stats.h"

#include <algorithm>
#include <cstring>

namespace asyncrl::ring {

namespace {

Stats Collect(Region& region) {
  const Control& control = region.control();
  const Geometry& geometry = region.geometry();
  Stats stats{};
  stats.num_slots = geometry.num_slots;
  stats.num_free = control.num_free;
  stats.num_ready = control.num_ready;
  stats.num_claimed = control.num_claimed;
  stats.num_held = geometry.num_slots - control.num_free - control.num_ready - control.num_claimed;
  stats.arena_bytes = geometry.arena_bytes;
  stats.bytes_used = control.bytes_used;
  stats.ready_weight = control.ready_weight;
  stats.max_record_bytes = geometry.max_record_bytes;
  stats.num_puts = control.num_puts;
  stats.num_duplicates = control.num_duplicates;
  stats.num_gets = control.num_gets;
  stats.num_acks = control.num_acks;
  stats.num_nacks = control.num_nacks;
  stats.num_reclaimed = control.num_reclaimed;
  stats.num_recoveries = control.num_recoveries;
  stats.num_steals = control.num_steals;
  std::copy(std::begin(control.num_dropped), std::end(control.num_dropped),
            std::begin(stats.num_dropped));
  stats.min_version = Peek(control.min_version);
  stats.closed = Peek(control.closed) != 0;
  return stats;
}

std::string NameOf(const char (&name)[kNameBytes]) {
  return std::string(name, strnlen(name, kNameBytes));
}

std::vector<ParticipantInfo> CollectParticipants(Region& region, const Presence& presence,
                                                 uint64_t now) {
  std::vector<ParticipantInfo> found;
  for (uint32_t index = 0; index < region.geometry().num_participants; ++index) {
    const Participant& who = region.participants()[index];
    if (Peek(who.state) != ParticipantState::kAttached) continue;
    found.push_back({index, who.pid, who.role, presence.IsAlive(index), NameOf(who.name),
                     now - who.attached_ns, who.num_puts, who.num_gets});
  }
  return found;
}

std::vector<LeaseInfo> CollectLeases(Region& region, uint64_t now) {
  std::vector<LeaseInfo> found;
  for (uint32_t g = 0; g < region.geometry().num_groups; ++g) {
    const Group& group = region.groups()[g];
    if (Peek(group.state) != GroupState::kActive) continue;
    for (uint32_t rank = 0; rank < std::min(group.size, kMaxMembers); ++rank) {
      LeaseInfo lease{NameOf(group.name), rank, group.members[rank].participant, 0, 0, 0, 0};
      for (uint32_t index = 0; index < region.geometry().num_slots; ++index) {
        const Slot& slot = region.slots()[index];
        if (Peek(slot.state) != SlotState::kHeld || slot.group != g) continue;
        const bool pending = Peek(slot.pending) >> rank & 1, leased = Peek(slot.leased) >> rank & 1;
        if (!pending && !leased) continue;
        lease.num_pending += pending;
        lease.num_leased += leased;
        lease.bytes += ExtentBytes(slot.length);
        lease.oldest_ns = std::max(lease.oldest_ns, now - slot.publish_ns);
      }
      found.push_back(lease);
    }
  }
  return found;
}

}  // namespace

Stats ReadStats(Session& session) {
  Session::Locked locked(session);
  return Collect(session.region());
}

Snapshot Inspect(const std::string& directory) {
  auto region = Region::Open(directory, /*read_only_arena=*/true);
  const Presence presence(region->lock_path());
  const uint64_t now = static_cast<uint64_t>(NowNs());
  Snapshot snapshot;
  snapshot.stats = Collect(*region);
  snapshot.participants = CollectParticipants(*region, presence, now);
  snapshot.leases = CollectLeases(*region, now);
  const uint32_t word = Peek(region->header().lock);
  snapshot.lock_owner = word == 0 ? kNil : (word & ~kLockWaiters) - 1;
  snapshot.oldest_ready_ns = 0;
  for (uint32_t index = 0; index < region->geometry().num_slots; ++index) {
    const Slot& slot = region->slots()[index];
    if (Peek(slot.state) != SlotState::kReady) continue;
    snapshot.oldest_ready_ns = std::max(snapshot.oldest_ready_ns, now - slot.publish_ns);
  }
  return snapshot;
}

}  // namespace asyncrl::ring
