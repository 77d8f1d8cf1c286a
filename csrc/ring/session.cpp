#include "ring/session.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "common/crash_point.h"
#include "ring/errors.h"

namespace asyncrl::ring {

namespace {

uint32_t ClaimIndex(Presence& presence, const Region& region) {
  const uint32_t limit = region.geometry().num_participants;
  const uint32_t index = presence.Claim(limit);
  if (index == kNil) {
    throw RingError(ErrorKind::kLimit,
                    region.directory() + ": all " + std::to_string(limit) +
                        " places are taken; create the ring with more num_participants");
  }
  CRASH_POINT("attach.claimed");
  return index;
}

void NotifyFifo(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return;  // ENXIO or ENOENT: its reader is gone
  const char byte = 1;
  // EAGAIN means that it is full, so its reader has plenty to wake up from.
  [[maybe_unused]] const ssize_t written = write(fd, &byte, 1);
  close(fd);
}

}  // namespace

std::shared_ptr<Session> Session::Attach(const std::string& directory, Role role,
                                         const std::string& name) {
  auto region = Region::Open(directory, /*read_only_arena=*/role != Role::kProducer);
  return std::make_shared<Session>(std::move(region), role, name);
}

Session::Session(std::shared_ptr<Region> region, Role role, const std::string& name)
    : region_(std::move(region)),
      presence_(region_->lock_path()),
      self_(ClaimIndex(presence_, *region_)),
      lock_(*region_, presence_, self_),
      table_(*region_) {
  Register(role, name);
}

Session::~Session() {
  if (!detached_ && !presence_.forked()) {
    try {
      Detach();
    } catch (const RingError&) {
      // The lock's owner does not run. The kernel drops this participant's byte, and whoever sweeps
      // next takes back what it held.
    }
  }
}

void Session::Register(Role role, const std::string& name) {
  Participant& me = region_->participants()[self_];
  // From here on nobody takes this process for its predecessor.
  if (Peek(me.state) == ParticipantState::kAttached) Publish(me.state, ParticipantState::kArriving);
  CRASH_POINT("attach.arriving");
  if (lock_.Inherited()) {
    table_.Rebuild();
    CRASH_POINT("attach.rebuilt");
    lock_.Release();
  }
  Locked locked(*this);
  Reclaim(self_, locked);
  me.role = role;
  me.pid = static_cast<uint32_t>(getpid());
  me.attached_ns = static_cast<uint64_t>(NowNs());
  me.num_puts = me.num_gets = 0;
  std::memset(me.name, 0, sizeof(me.name));
  std::strncpy(me.name, name.c_str(), sizeof(me.name) - 1);
  CRASH_POINT("attach.fields");
  Publish(me.state, ParticipantState::kAttached);
  CRASH_POINT("attach.registered");
  Sweep(locked);
}

void Session::Detach() {
  if (detached_) return;
  {
    Locked locked(*this);
    Reclaim(self_, locked);
    Publish(region_->participants()[self_].state, ParticipantState::kDetached);
    CRASH_POINT("detach.unregistered");
  }
  detached_ = true;
  unlink(region_->wake_path(self_).c_str());
  presence_.Leave();
}

void Session::CheckUsable() const {
  if (detached_) {
    throw RingError(ErrorKind::kDetached,
                    region_->directory() + ": this handle was detached; open the ring again");
  }
  if (presence_.forked()) {
    throw RingError(ErrorKind::kDetached,
                    region_->directory() +
                        ": this handle was opened before a fork; open the ring in the child");
  }
}

Session::Locked::Locked(Session& session)
    : session_(session), mutex_(session.mutex_, std::defer_lock) {
  session.CheckUsable();
  mutex_.lock();
  if (session.lock_.Acquire(session.lock_timeout_ns_)) {
    CRASH_POINT("steal.acquired");
    session.table_.Rebuild();
    ++session.control().num_steals;
    wake_data_ = wake_space_ = true;
  }
  CRASH_POINT("lock.acquired");
  session.RunDeferred(*this);
}

Session::Locked::~Locked() {
  std::vector<uint32_t> fifos;
  Header& header = session_.region_->header();
  const bool data = wake_data_ && session_.Wake(header.data, kArmedData, fifos);
  const bool space = wake_space_ && session_.Wake(header.space, kArmedSpace, fifos);
  session_.lock_.Release();
  mutex_.unlock();
  CRASH_POINT("wake.before");
  if (data) FutexWake(header.data.sequence, INT_MAX);
  if (space) FutexWake(header.space.sequence, INT_MAX);
  for (uint32_t participant : fifos) NotifyFifo(session_.region_->wake_path(participant));
  CRASH_POINT("wake.after");
}

// Returns whether some thread sleeps on the futex. Sleepers are noted under the lock, which is
// held.
bool Session::Wake(WaitPoint& point, uint32_t armed_bit, std::vector<uint32_t>& fifos) {
  point.sequence.fetch_add(1, std::memory_order_relaxed);
  const bool sleeping = point.sleepers.exchange(0, std::memory_order_relaxed) != 0;
  point.goal_count = UINT32_MAX;
  point.goal_weight = UINT64_MAX;
  if (point.armed.exchange(0, std::memory_order_relaxed) == 0) return sleeping;
  for (uint32_t index = 0; index < geometry().num_participants; ++index) {
    std::atomic<uint32_t>& armed = region_->participants()[index].armed;
    if (Peek(armed) & armed_bit) {
      armed.fetch_and(~armed_bit, std::memory_order_relaxed);
      fifos.push_back(index);
    }
  }
  return sleeping;
}

uint32_t Session::PrepareSleep(WaitPoint& point, bool armed) {
  if (armed) {
    const uint32_t bit = &point == &region_->header().data ? kArmedData : kArmedSpace;
    region_->participants()[self_].armed.fetch_or(bit, std::memory_order_relaxed);
    point.armed.store(1, std::memory_order_relaxed);
  } else {
    point.sleepers.store(1, std::memory_order_relaxed);
  }
  return Peek(point.sequence);
}

bool Session::Sleep(WaitPoint& point, uint32_t sequence, int64_t deadline_ns,
                    const Interrupt& interrupt) {
  if (FutexWaitUntil(point.sequence, sequence, std::min(deadline_ns, NowNs() + kWaitSlice)))
    return true;
  interrupt();
  Locked locked(*this);
  Sweep(locked);
  return false;
}

void Session::Sweep(Locked& locked) {
  for (uint32_t index = 0; index < geometry().num_participants; ++index) {
    Participant& participant = region_->participants()[index];
    const ParticipantState state = Peek(participant.state);
    if (state != ParticipantState::kAttached && state != ParticipantState::kArriving) continue;
    if (presence_.IsAlive(index)) continue;
    Reclaim(index, locked);
    CRASH_POINT("sweep.reclaimed");
    Publish(participant.state, ParticipantState::kDetached);
  }
}

void Session::Reclaim(uint32_t index, Locked& locked) {
  for (uint32_t slot = 0; slot < geometry().num_slots && control().num_claimed > 0; ++slot) {
    if (Peek(table_.slot(slot).state) != SlotState::kClaimed || table_.slot(slot).owner != index)
      continue;
    table_.Free(slot);
    ++control().num_reclaimed;
    CRASH_POINT("reclaim.claim");
    locked.WakeSpaceSleepers();
  }
  for (uint32_t g = 0; g < geometry().num_groups; ++g) {
    Group& group = region_->groups()[g];
    for (uint32_t rank = 0; rank < group.size && Peek(group.state) == GroupState::kActive; ++rank) {
      Member& member = group.members[rank];
      if (member.participant != index) continue;
      for (uint32_t slot = 0; slot < geometry().num_slots; ++slot) {
        Slot& held = table_.slot(slot);
        if (Peek(held.state) != SlotState::kHeld || held.group != g) continue;
        held.leased.fetch_and(~(uint64_t{1} << rank), std::memory_order_relaxed);
        CRASH_POINT("reclaim.lease");
        FreeIfDone(slot, locked);
      }
      member.cursor = 0;
      member.participant = kNil;
    }
  }
  if (control().ticket >> 32 == index + 1) control().ticket = 0;
  region_->participants()[index].armed.store(0, std::memory_order_relaxed);
}

void Session::FreeIfDone(uint32_t slot, Locked& locked) {
  if (Peek(table_.slot(slot).pending) != 0 || Peek(table_.slot(slot).leased) != 0) return;
  table_.Free(slot);
  locked.WakeSpaceSleepers();
}

bool Session::IsAttached(uint32_t participant) const {
  return Peek(region_->participants()[participant].state) == ParticipantState::kAttached &&
         presence_.IsAlive(participant);
}

int Session::OpenWakeFifo() {
  CheckUsable();
  const std::string path = region_->wake_path(self_);
  if (mkfifo(path.c_str(), 0600) != 0 && errno != EEXIST) ThrowSystem("mkfifo " + path);
  // Read and write: a FIFO without a writer would report end-of-file to the loop for ever.
  const int fd = open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) ThrowSystem(path);
  return fd;
}

void Session::Defer(std::function<void(Locked&)> release) {
  std::lock_guard guard(deferred_mutex_);
  deferred_.push_back(std::move(release));
}

void Session::RunDeferred(Locked& locked) noexcept {
  std::vector<std::function<void(Locked&)>> due;
  {
    std::lock_guard guard(deferred_mutex_);
    due.swap(deferred_);
  }
  for (const auto& release : due) release(locked);
}

uint32_t Session::NextSerial() { return serial_.fetch_add(1, std::memory_order_relaxed) + 1; }

}  // namespace asyncrl::ring
