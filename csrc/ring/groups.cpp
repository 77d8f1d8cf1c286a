#include "ring/groups.h"

#include <algorithm>

#include "common/crash_point.h"
#include "ring/describe.h"
#include "ring/errors.h"

namespace asyncrl::ring {

namespace {

void EndLeases(Session& session, uint32_t group_index, uint32_t rank,
               const std::vector<uint32_t>& slots, Session::Locked& locked) {
  Group& group = session.region().groups()[group_index];
  Member& member = group.members[rank];
  if (Peek(group.state) != GroupState::kActive || member.participant != session.self()) return;
  const uint64_t bit = uint64_t{1} << rank;
  for (uint32_t index : slots) {
    Slot& slot = session.table().slot(index);
    slot.leased.fetch_and(~bit, std::memory_order_relaxed);
    CRASH_POINT("release.one");
    if (Peek(slot.pending) & bit) {
      member.cursor = std::min(member.cursor, slot.position);
      ++session.control().num_nacks;
      locked.WakeDataSleepers();
    }
    session.FreeIfDone(index, locked);
  }
}

std::string Describe(Want want) {
  return want.count > 0 ? std::to_string(want.count) + " records"
                        : std::to_string(want.weight) + " tokens";
}

}  // namespace

Delivery GroupReader::Get(Want want, int64_t deadline_ns, const Interrupt& interrupt) {
  WaitPoint& point = session_->region().header().data;
  for (bool may_spin = true;;) {
    uint32_t sequence = 0;
    uint64_t goal = 0, length = 0;
    {
      Session::Locked locked(*session_);
      if (auto delivery = TryGetLocked(want, locked)) return std::move(*delivery);
      if (NowNs() >= deadline_ns) {
        throw RingError(ErrorKind::kTimeout,
                        DescribeEmpty(*session_, Describe(want) + " as rank " +
                                                     std::to_string(rank_) + " of group " + name_));
      }
      const Control& control = session_->control();
      const uint32_t missing = want.count > control.num_ready ? want.count - control.num_ready : 1;
      goal = Peek(control.next_seq) + missing;
      length = Peek(group().length);
      if (!may_spin) {
        SetGoal(want);
        sequence = session_->PrepareSleep(point, /*armed=*/false);
      }
    }
    if (may_spin) {
      may_spin = SpinUntil(kSpin, [&] {
        const Control& control = session_->control();
        return Peek(control.next_seq) >= goal || Peek(group().length) != length ||
               Peek(control.closed) != 0;
      });
    } else {
      may_spin = session_->Sleep(point, sequence, deadline_ns, interrupt);
    }
  }
}

std::optional<Delivery> GroupReader::TryGet(Want want) {
  Session::Locked locked(*session_);
  auto delivery = TryGetLocked(want, locked);
  if (!delivery) {
    SetGoal(want);
    session_->PrepareSleep(session_->region().header().data, /*armed=*/true);
  }
  return delivery;
}

void GroupReader::SetGoal(Want want) {
  WaitPoint& point = session_->region().header().data;
  const bool first = Peek(point.sleepers) == 0 && Peek(point.armed) == 0;
  const uint32_t count = want.count > 0 ? want.count : UINT32_MAX;
  const uint64_t weight = want.count > 0 ? UINT64_MAX : want.weight;
  point.goal_count = first ? count : std::min(point.goal_count, count);
  point.goal_weight = first ? weight : std::min(point.goal_weight, weight);
}

std::optional<Delivery> GroupReader::TryGetLocked(Want want, Session::Locked& locked) {
  CheckMember();
  if (want.count > session_->geometry().num_slots) {
    throw RingError(ErrorKind::kTooLarge, "a batch of " + std::to_string(want.count) +
                                              " records exceeds the " +
                                              std::to_string(session_->geometry().num_slots) +
                                              " slots of the ring; create it with more");
  }
  uint32_t first = NextUndelivered();
  if (first == kNil) {
    if (!Append(want, locked)) return std::nullopt;
    first = NextUndelivered();
  }
  Delivery delivery = Lease(first);
  session_->control().num_gets += delivery.slots.size();
  session_->region().participants()[session_->self()].num_gets += delivery.slots.size();
  return delivery;
}

bool GroupReader::Append(Want want, Session::Locked& locked) {
  Control& control = session_->control();
  const int64_t bound = Peek(control.min_version);
  if (control.swept_version < bound) {
    if (session_->table().DropBelow(bound, DropReason::kStale) > 0) locked.WakeSpaceSleepers();
    control.swept_version = bound;
  }
  const uint32_t count = CountWithin(want);
  if (count == 0) {
    if (Peek(control.closed) == 0) return false;
    throw RingError(ErrorKind::kClosed,
                    session_->region().directory() + ": the ring is closed and drained");
  }
  const uint64_t begin = Peek(group().length);
  uint32_t* log = session_->region().log(index_);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t slot = session_->table().HoldNext(index_, begin + i, i, AllMembers(group()));
    log[(begin + i) % session_->geometry().num_slots] = slot;
  }
  CRASH_POINT("append.before");
  Publish(group().length, begin + count);
  CRASH_POINT("append.after");
  const WaitPoint& point = session_->region().header().data;
  if (Peek(point.sleepers) != 0 || Peek(point.armed) != 0) locked.WakeDataSleepers();
  return true;
}

// How many ready records make up the next batch; 0: not enough yet.
uint32_t GroupReader::CountWithin(Want want) {
  const Control& control = session_->control();
  const bool closed = Peek(control.closed) != 0;
  if (want.count > 0) {
    if (control.num_ready >= want.count) return want.count;
    return closed ? control.num_ready : 0;
  }
  if (control.ready_weight < want.weight && !closed) return 0;
  uint32_t count = 0;
  uint64_t weight = 0;
  for (uint32_t slot = control.ready_head; slot != kNil; slot = session_->table().slot(slot).link) {
    weight += session_->table().slot(slot).weight;
    if (weight > want.weight && count > 0) break;
    ++count;
  }
  return count;
}

// The slot at a position, or kNil when it was freed. The log is a hint; the slot's own words
// decide.
uint32_t GroupReader::Lookup(uint64_t position) {
  auto holds = [&](uint32_t index) {
    const Slot& slot = session_->table().slot(index);
    return Peek(slot.state) == SlotState::kHeld && slot.group == index_ &&
           slot.position == position;
  };
  const uint32_t num_slots = session_->geometry().num_slots;
  const uint32_t hint = session_->region().log(index_)[position % num_slots];
  if (hint < num_slots && holds(hint)) return hint;
  for (uint32_t index = 0; index < num_slots; ++index) {
    if (holds(index)) return index;
  }
  return kNil;
}

// The slot of the lowest position that this rank has neither acknowledged nor leased, or kNil.
uint32_t GroupReader::NextUndelivered() {
  Member& me = member();
  const uint64_t length = Peek(group().length);
  if (me.cursor >= length) return kNil;
  auto waits = [&](const Slot& slot) {
    return (Peek(slot.pending) & ~Peek(slot.leased) & bit()) != 0;
  };
  const uint32_t next = session_->region().log(index_)[me.cursor % session_->geometry().num_slots];
  if (next < session_->geometry().num_slots) {
    const Slot& slot = session_->table().slot(next);
    if (Peek(slot.state) == SlotState::kHeld && slot.group == index_ &&
        slot.position == me.cursor && waits(slot)) {
      return next;
    }
  }
  uint32_t lowest = kNil;
  for (uint32_t index = 0; index < session_->geometry().num_slots; ++index) {
    const Slot& slot = session_->table().slot(index);
    if (Peek(slot.state) != SlotState::kHeld || slot.group != index_ || !waits(slot)) continue;
    if (lowest == kNil || slot.position < session_->table().slot(lowest).position) lowest = index;
  }
  me.cursor = lowest == kNil ? length : session_->table().slot(lowest).position;
  return lowest;
}

// Leases the rest of the batch that begins with slot `first`.
Delivery GroupReader::Lease(uint32_t first) {
  Delivery delivery;
  const uint64_t length = Peek(group().length);
  delivery.begin = delivery.end = session_->table().slot(first).position;
  const uint64_t batch = delivery.begin - session_->table().slot(first).batch_offset;
  for (uint32_t index = first; index != kNil;) {
    Slot& slot = session_->table().slot(index);
    if (slot.position - slot.batch_offset != batch) break;
    slot.leased.fetch_or(bit(), std::memory_order_relaxed);
    CRASH_POINT("lease.one");
    delivery.slots.push_back(index);
    ++delivery.end;
    index = delivery.end < length ? Lookup(delivery.end) : kNil;
  }
  member().cursor = delivery.end;
  return delivery;
}

void GroupReader::Ack(uint64_t begin, uint64_t end) {
  Session::Locked locked(*session_);
  CheckMember();
  AckLocked(begin, end, locked);
}

void GroupReader::AckLocked(uint64_t begin, uint64_t end, Session::Locked& locked) {
  end = std::min(end, Peek(group().length));
  if (begin >= end) return;
  // From the second store on the acknowledgement has happened; Table::Rebuild finishes it if need
  // be.
  Publish(member().ack_from, begin);
  CRASH_POINT("ack.from");
  Publish(member().ack_to, end);
  CRASH_POINT("ack.to");
  auto clear = [&](uint32_t index) {
    Slot& slot = session_->table().slot(index);
    if (slot.pending.fetch_and(~bit(), std::memory_order_relaxed) & bit())
      ++session_->control().num_acks;
    CRASH_POINT("ack.one");
    session_->FreeIfDone(index, locked);
  };
  if (end - begin <= session_->geometry().num_slots) {
    for (uint64_t position = begin; position < end; ++position) {
      const uint32_t index = Lookup(position);
      if (index != kNil) clear(index);
    }
  } else {
    for (uint32_t index = 0; index < session_->geometry().num_slots; ++index) {
      const Slot& slot = session_->table().slot(index);
      if (Peek(slot.state) == SlotState::kHeld && slot.group == index_ && slot.position >= begin &&
          slot.position < end) {
        clear(index);
      }
    }
  }
  CRASH_POINT("ack.done");
  Publish(member().ack_to, uint64_t{0});
}

void GroupReader::Finish(const Delivery& delivery) {
  Session::Locked locked(*session_);
  CheckMember();
  AckLocked(delivery.begin, delivery.end, locked);
  EndLeases(*session_, index_, rank_, delivery.slots, locked);
}

void GroupReader::Release(const std::vector<uint32_t>& slots) {
  Session::Locked locked(*session_);
  EndLeases(*session_, index_, rank_, slots, locked);
}

void GroupReader::ReleaseSoon(const std::vector<uint32_t>& slots) noexcept {
  try {
    Release(slots);
  } catch (const RingError& error) {
    if (error.kind() != ErrorKind::kLockTimeout) return;  // detached: the leases are gone already
    // No reference to this object or to the session, which owns the deferred call.
    session_->Defer(
        [&session = *session_, group = index_, rank = rank_, slots](Session::Locked& locked) {
          EndLeases(session, group, rank, slots, locked);
        });
  }
}

uint64_t GroupReader::Length() {
  Session::Locked locked(*session_);
  CheckMember();
  return Peek(group().length);
}

}  // namespace asyncrl::ring
