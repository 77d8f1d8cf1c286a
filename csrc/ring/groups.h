// Reader groups: all ranks of a group read the same records, in the same order, in the same
// batches.
//
// A group has a log of positions. The rank that is first to ask beyond its end appends a batch of
// ready records; the others find it there. Each rank acknowledges for itself; the last
// acknowledgement, or the end of the last view if that is later, frees the record. Nobody leads and
// nothing is collective.
//
// Of each held record a rank has two bits: pending (not acknowledged: will be delivered again if
// the rank restarts) and leased (somebody in its process looks at the bytes: they must stay).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ring/session.h"

namespace asyncrl::ring {

struct Want {
  uint32_t count = 0;   // records, or
  uint64_t weight = 0;  // at most so many tokens, at least one record; one of the two is zero
};

struct Delivery {
  uint64_t begin = 0, end = 0;  // positions of the batch in the group's log
  std::vector<uint32_t> slots;  // in order of position
};

class GroupReader {
 public:
  // Joins as `rank` of `size`; makes the group if it is new. Records acknowledged by this rank
  // before it restarted are not delivered again, the others are. Positions below `resume_at` count
  // as acknowledged. Throws kNotAMember, kMemberBusy, kLimit.
  GroupReader(std::shared_ptr<Session> session, const std::string& name, uint32_t rank,
              uint32_t size, uint64_t resume_at);

  // The next batch: the one in the log, or a new one of exactly `want.count` records (or the
  // longest run within `want.weight` tokens). Shorter only when the ring is closed. Throws kClosed
  // when the ring is closed and drained, kTimeout naming the producers, kNotAMember when the group
  // was removed.
  Delivery Get(Want want, int64_t deadline_ns, const Interrupt& interrupt);

  // The same without waiting: nullopt after arming this participant's FIFO.
  std::optional<Delivery> TryGet(Want want);

  // Acknowledges positions [begin, end) for this rank, all or none of them.
  void Ack(uint64_t begin, uint64_t end);

  // Acknowledges a delivery and ends its lease.
  void Finish(const Delivery& delivery);

  // Ends a lease; what was not acknowledged will be delivered again.
  void Release(const std::vector<uint32_t>& slots);

  // The same for destructors: if the lock's owner does not run, it is done at the session's next
  // call.
  void ReleaseSoon(const std::vector<uint32_t>& slots) noexcept;

  // Gives up the membership; another process may take the rank. Throws kViewsAlive while it holds
  // records.
  void Leave();

  // Positions appended so far.
  uint64_t Length();

  Session& session() { return *session_; }
  uint32_t rank() const { return rank_; }
  uint32_t size() const { return size_; }
  const std::string& name() const { return name_; }

 private:
  void Join(uint64_t resume_at);
  bool TryJoin(uint64_t resume_at, bool last);
  uint32_t FindOrMake();
  std::optional<Delivery> TryGetLocked(Want want, Session::Locked& locked);
  bool Append(Want want, Session::Locked& locked);
  uint32_t CountWithin(Want want);
  uint32_t Lookup(uint64_t position);
  uint32_t NextUndelivered();
  Delivery Lease(uint32_t first);
  void SetGoal(Want want);
  void AckLocked(uint64_t begin, uint64_t end, Session::Locked& locked);
  void CheckMember();
  Group& group() { return session_->region().groups()[index_]; }
  Member& member() { return group().members[rank_]; }
  uint64_t bit() const { return uint64_t{1} << rank_; }

  std::shared_ptr<Session> session_;
  std::string name_;
  uint32_t rank_, size_;
  uint32_t index_ = kNil;
};

// Removes a group that no live process is a member of. Records that nobody
// acknowledged go back to their place in the ready queue; partly acknowledged ones are dropped and
// counted. Throws kMemberBusy, kNotAMember.
void RemoveGroup(Session& session, const std::string& name);

// Records that this session holds leases on, in all groups.
uint32_t CountOwnLeases(Session& session);

}  // namespace asyncrl::ring
