#include "ring/describe.h"

#include <bit>

namespace asyncrl::ring {

namespace {

// "dp0 rank 2, NAME (pid 12, alive): 40 records; ..." for every member that keeps records.
std::string DescribeHolders(Session& session) {
  std::string text;
  const Geometry& geometry = session.geometry();
  for (uint32_t g = 0; g < geometry.num_groups; ++g) {
    const Group& group = session.region().groups()[g];
    if (Peek(group.state) != GroupState::kActive) continue;
    for (uint32_t rank = 0; rank < group.size; ++rank) {
      uint32_t kept = 0;
      for (uint32_t index = 0; index < geometry.num_slots; ++index) {
        const Slot& slot = session.table().slot(index);
        const uint64_t mask = Peek(slot.pending) | Peek(slot.leased);
        if (Peek(slot.state) == SlotState::kHeld && slot.group == g && (mask >> rank & 1)) ++kept;
      }
      if (kept == 0) continue;
      const uint32_t holder = group.members[rank].participant;
      text += std::string("; group ") + group.name + " rank " + std::to_string(rank) + ", " +
              (holder == kNil ? "not attached" : DescribeParticipant(session, holder)) +
              ", keeps " + std::to_string(kept);
    }
  }
  return text;
}

}  // namespace

std::string DescribeParticipant(Session& session, uint32_t participant) {
  const Participant& who = session.region().participants()[participant];
  return std::string(who.name) + " (pid " + std::to_string(who.pid) + ", " +
         (session.IsAlive(participant) ? "alive" : "dead") + ")";
}

std::string DescribeFull(Session& session, uint64_t length) {
  const Control& control = session.control();
  const Geometry& geometry = session.geometry();
  const uint32_t live = geometry.num_slots - control.num_free;
  std::string text = session.region().directory() + ": no room for a record of " +
                     std::to_string(length) + " bytes: " + std::to_string(control.bytes_used) +
                     " of " + std::to_string(geometry.arena_bytes) + " bytes and " +
                     std::to_string(live) + " of " + std::to_string(geometry.num_slots) +
                     " slots are used, " + std::to_string(control.num_ready) +
                     " records wait for a reader";
  if (control.ticket != 0) {
    const uint32_t first = static_cast<uint32_t>(control.ticket >> 32) - 1;
    if (first != session.self())
      text += "; first in line is " + DescribeParticipant(session, first);
  }
  return text + DescribeHolders(session);
}

std::string DescribeEmpty(Session& session, const std::string& wanted) {
  const Control& control = session.control();
  std::string text = session.region().directory() + ": waited for " + wanted + "; " +
                     std::to_string(control.num_ready) + " records of " +
                     std::to_string(control.ready_weight) + " tokens are ready";
  bool any = false;
  for (uint32_t index = 0; index < session.geometry().num_participants; ++index) {
    const Participant& who = session.region().participants()[index];
    if (Peek(who.state) != ParticipantState::kAttached || who.role != Role::kProducer) continue;
    text += (any ? ", " : "; producers: ") + DescribeParticipant(session, index);
    any = true;
  }
  if (!any) text += "; no producer is attached";
  if (control.last_put_ns != 0) {
    const uint64_t age = static_cast<uint64_t>(NowNs()) - control.last_put_ns;
    text += "; the last record came " + std::to_string(age / 1'000'000'000) + " s ago";
  }
  return text;
}

}  // namespace asyncrl::ring
