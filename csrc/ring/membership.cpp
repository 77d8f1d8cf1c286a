// Joining, leaving and removing groups. See groups.h.
#include <chrono>
#include <cstring>
#include <thread>

#include "common/crash_point.h"
#include "ring/describe.h"
#include "ring/errors.h"
#include "ring/groups.h"

namespace asyncrl::ring {

namespace {

// A dead process may seem alive while another looks at its place: not this many times.
constexpr int kJoinAttempts = 10;

uint32_t FindGroup(Session& session, const std::string& name) {
  for (uint32_t index = 0; index < session.geometry().num_groups; ++index) {
    const Group& group = session.region().groups()[index];
    if (Peek(group.state) == GroupState::kActive && name == group.name) return index;
  }
  return kNil;
}

// Records of `group` that `rank` has leased.
uint32_t CountLeases(Session& session, uint32_t group, uint32_t rank) {
  uint32_t count = 0;
  for (uint32_t index = 0; index < session.geometry().num_slots; ++index) {
    const Slot& slot = session.table().slot(index);
    if (Peek(slot.state) == SlotState::kHeld && slot.group == group &&
        (Peek(slot.leased) >> rank & 1)) {
      ++count;
    }
  }
  return count;
}

}  // namespace

GroupReader::GroupReader(std::shared_ptr<Session> session, const std::string& name, uint32_t rank,
                         uint32_t size, uint64_t resume_at)
    : session_(std::move(session)), name_(name), rank_(rank), size_(size) {
  if (size == 0 || size > kMaxMembers || rank >= size) {
    throw RingError(ErrorKind::kNotAMember, "group " + name + ": rank " + std::to_string(rank) +
                                                " of " + std::to_string(size) + " (at most " +
                                                std::to_string(kMaxMembers) + ") is not a member");
  }
  if (name.empty() || name.size() >= kNameBytes) {
    throw RingError(ErrorKind::kNotAMember,
                    "a group's name has 1 to " + std::to_string(kNameBytes - 1) +
                        " bytes, this one has " + std::to_string(name.size()));
  }
  Join(resume_at);
}

uint32_t GroupReader::FindOrMake() {
  const uint32_t found = FindGroup(*session_, name_);
  if (found != kNil) return found;
  for (uint32_t index = 0; index < session_->geometry().num_groups; ++index) {
    Group& group = session_->region().groups()[index];
    if (Peek(group.state) != GroupState::kNone) continue;
    group.size = size_;
    group.length.store(0, std::memory_order_relaxed);
    std::memset(group.name, 0, sizeof(group.name));
    std::memcpy(group.name, name_.data(), name_.size());
    for (Member& member : group.members) {
      member.ack_from.store(0, std::memory_order_relaxed);
      member.ack_to.store(0, std::memory_order_relaxed);
      member.cursor = 0;
      member.participant = kNil;
    }
    CRASH_POINT("group.fields");
    Publish(group.state, GroupState::kActive);
    CRASH_POINT("group.made");
    return index;
  }
  throw RingError(ErrorKind::kLimit,
                  session_->region().directory() + ": all " +
                      std::to_string(session_->geometry().num_groups) +
                      " groups are in use; remove one, or create the ring with more");
}

void GroupReader::Join(uint64_t resume_at) {
  for (int attempt = 1; !TryJoin(resume_at, /*last=*/attempt == kJoinAttempts); ++attempt) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(kProbeInterval));
  }
}

// Returns false when a live process seems to have the rank; throws if this is the last attempt.
bool GroupReader::TryJoin(uint64_t resume_at, bool last) {
  Session::Locked locked(*session_);
  index_ = FindOrMake();
  if (group().size != size_) {
    throw RingError(ErrorKind::kNotAMember,
                    "group " + name_ + " has " + std::to_string(group().size) +
                        " members, this process says " + std::to_string(size_));
  }
  const uint32_t holder = member().participant;
  if (holder != session_->self()) {
    if (holder != kNil && session_->IsAttached(holder)) {
      if (!last) return false;
      throw RingError(ErrorKind::kMemberBusy, "group " + name_ + " rank " + std::to_string(rank_) +
                                                  " belongs to " +
                                                  DescribeParticipant(*session_, holder));
    }
    if (holder != kNil) session_->Reclaim(holder, locked);  // ends the leases of the dead process
    CRASH_POINT("join.reclaimed");
    member().cursor = 0;
    member().participant = session_->self();
    CRASH_POINT("join.joined");
  }
  if (resume_at > 0) AckLocked(0, resume_at, locked);
  return true;
}

void GroupReader::Leave() {
  Session::Locked locked(*session_);
  CheckMember();
  const uint32_t leases = CountLeases(*session_, index_, rank_);
  if (leases > 0) {
    throw RingError(ErrorKind::kViewsAlive, "group " + name_ + " rank " + std::to_string(rank_) +
                                                " holds " + std::to_string(leases) +
                                                " records; release them first");
  }
  member().participant = kNil;
}

void GroupReader::CheckMember() {
  if (Peek(group().state) == GroupState::kActive && name_ == group().name &&
      member().participant == session_->self()) {
    return;
  }
  throw RingError(ErrorKind::kNotAMember, "rank " + std::to_string(rank_) +
                                              " is no member of group " + name_ + " any more");
}

void RemoveGroup(Session& session, const std::string& name) {
  Session::Locked locked(session);
  const uint32_t index = FindGroup(session, name);
  if (index == kNil) throw RingError(ErrorKind::kNotAMember, "there is no group " + name);
  session.Sweep(locked);
  Group& group = session.region().groups()[index];
  for (uint32_t rank = 0; rank < group.size; ++rank) {
    const uint32_t holder = group.members[rank].participant;
    if (holder == kNil) continue;
    throw RingError(ErrorKind::kMemberBusy, "group " + name + " rank " + std::to_string(rank) +
                                                " is in use by " +
                                                DescribeParticipant(session, holder));
  }
  Publish(group.state, GroupState::kRemoving);
  CRASH_POINT("remove.marked");
  session.table().Rebuild();
  CRASH_POINT("remove.rebuilt");
  locked.WakeDataSleepers();
  locked.WakeSpaceSleepers();
}

uint32_t CountOwnLeases(Session& session) {
  Session::Locked locked(session);
  uint32_t count = 0;
  for (uint32_t g = 0; g < session.geometry().num_groups; ++g) {
    const Group& group = session.region().groups()[g];
    if (Peek(group.state) != GroupState::kActive) continue;
    for (uint32_t rank = 0; rank < group.size; ++rank) {
      if (group.members[rank].participant == session.self()) count += CountLeases(session, g, rank);
    }
  }
  return count;
}

}  // namespace asyncrl::ring
