#include "ring/put.h"

#include <string>

#include "common/crash_point.h"
#include "common/crc32c.h"
#include "ring/describe.h"
#include "ring/errors.h"
#include "ring/keys.h"

namespace asyncrl::ring {

size_t Writer::Claim(std::span<PutRequest> requests, WhenFull when_full, int64_t deadline_ns,
                     const Interrupt& interrupt) {
  const uint32_t serial = session_.NextSerial();
  WaitPoint& point = session_.region().header().space;
  for (bool waited = false, may_spin = true;;) {
    uint32_t sequence;
    {
      Session::Locked locked(session_);
      const size_t claimed = ClaimLocked(requests, when_full, serial, locked);
      if (claimed > 0) return claimed;
      // Once it has waited, it goes before later and smaller records.
      if (waited && session_.control().ticket == 0) session_.control().ticket = TicketOf(serial);
      CRASH_POINT("claim.ticket");
      if (NowNs() >= deadline_ns) {
        ReturnTicket(serial, locked);
        throw RingError(ErrorKind::kTimeout, DescribeFull(session_, requests.front().length));
      }
      sequence = may_spin ? Peek(point.sequence) : session_.PrepareSleep(point, /*armed=*/false);
    }
    if (may_spin) {  // a reader that works through its records frees one soon
      may_spin = SpinUntil(kSpin, [&] { return Peek(point.sequence) != sequence; });
      continue;
    }
    waited = true;
    try {
      may_spin = session_.Sleep(point, sequence, deadline_ns, interrupt);
    } catch (...) {
      DropTicket(serial);
      throw;
    }
  }
}

size_t Writer::TryClaim(std::span<PutRequest> requests, WhenFull when_full, uint32_t serial,
                        bool take_ticket) {
  Session::Locked locked(session_);
  const size_t claimed = ClaimLocked(requests, when_full, serial, locked);
  if (claimed > 0) return claimed;
  if (take_ticket && session_.control().ticket == 0) session_.control().ticket = TicketOf(serial);
  session_.PrepareSleep(session_.region().header().space, /*armed=*/true);
  return 0;
}

// Claims what fits now; 0 when nothing does, also not after taking back what the dead hold.
size_t Writer::ClaimLocked(std::span<PutRequest> requests, WhenFull when_full, uint32_t serial,
                           Session::Locked& locked) {
  CheckOpen();
  size_t claimed = ClaimPrefix(requests, when_full, serial);
  if (claimed == 0) {
    session_.Sweep(locked);
    claimed = ClaimPrefix(requests, when_full, serial);
  }
  if (claimed > 0) ReturnTicket(serial, locked);
  if (claimed == 0 && when_full == WhenFull::kFail) {
    throw RingError(ErrorKind::kFull, DescribeFull(session_, requests.front().length));
  }
  return claimed;
}

size_t Writer::ClaimPrefix(std::span<PutRequest> requests, WhenFull when_full, uint32_t serial) {
  size_t claimed = 0;
  try {
    while (claimed < requests.size() && ClaimOne(requests[claimed], when_full, serial)) ++claimed;
  } catch (...) {
    for (PutRequest& request : requests.first(claimed)) {
      if (request.slot != kNil) session_.table().Free(request.slot);
      request.slot = kNil;
    }
    throw;
  }
  return claimed;
}

bool Writer::ClaimOne(PutRequest& request, WhenFull when_full, uint32_t serial) {
  CheckSize(request);
  CheckFresh(request);
  Control& control = session_.control();
  const uint32_t producer = request.key ? ProducerOf(*request.key) : kNil;
  if (producer != kNil) {
    const KeyWindow window(session_.region().window(producer), session_.geometry().key_window);
    const KeyStatus status = window.Find(request.key->seq);
    if (status == KeyStatus::kTooOld) {
      throw RingError(
          ErrorKind::kKeyTooOld,
          "key sequence " + std::to_string(request.key->seq) + " is more than " +
              std::to_string(session_.geometry().key_window) +
              " behind its producer's newest: whether it was published is no longer known");
    }
    request.duplicate = status == KeyStatus::kPublished;
    if (request.duplicate) return true;
  }
  Table& table = session_.table();
  if (when_full != WhenFull::kDropOldest && control.ticket != 0 &&
      control.ticket != TicketOf(serial)) {
    return false;
  }
  request.slot = table.Allocate(request.length, session_.self());
  while (request.slot == kNil && when_full == WhenFull::kDropOldest && control.num_ready > 0) {
    table.DropOldest(DropReason::kOldest);
    request.slot = table.Allocate(request.length, session_.self());
  }
  if (request.slot == kNil) return false;
  Slot& slot = table.slot(request.slot);
  slot.min_version = request.min_version;
  slot.max_version = request.max_version;
  slot.weight = request.weight;
  slot.producer = producer;
  slot.key_seq = request.key ? request.key->seq : 0;
  return true;
}

std::byte* Writer::Payload(const PutRequest& request) {
  return session_.region().arena() + session_.table().slot(request.slot).offset;
}

void Writer::Commit(std::span<PutRequest> requests, bool with_checksum) {
  Table& table = session_.table();
  CRASH_POINT("commit.copied");
  if (with_checksum) {
    for (PutRequest& request : requests) {
      if (request.slot != kNil)
        table.slot(request.slot).checksum = Crc32c(Payload(request), request.length);
    }
  }
  Session::Locked locked(session_);
  Control& control = session_.control();
  try {
    CheckOpen();
    for (PutRequest& request : requests) CheckFresh(request);
  } catch (...) {
    for (PutRequest& request : requests) {
      if (request.slot != kNil) table.Free(request.slot);
      request.slot = kNil;
    }
    locked.WakeSpaceSleepers();
    throw;
  }
  for (PutRequest& request : requests) {
    if (request.slot != kNil && request.key) {
      const Slot& slot = table.slot(request.slot);
      const KeyWindow window(session_.region().window(slot.producer),
                             session_.geometry().key_window);
      if (window.Find(slot.key_seq) != KeyStatus::kNew) {  // another attempt was faster
        table.Free(request.slot);
        request.slot = kNil;
        request.duplicate = true;
        locked.WakeSpaceSleepers();
      }
    }
    if (request.duplicate) {
      ++control.num_duplicates;
      continue;
    }
    table.MakeReady(request.slot);
    ++control.num_puts;
    ++session_.region().participants()[session_.self()].num_puts;
  }
  control.last_put_ns = static_cast<uint64_t>(NowNs());
  WakeReaders(locked);
}

void Writer::WakeReaders(Session::Locked& locked) {
  const WaitPoint& point = session_.region().header().data;
  if (Peek(point.sleepers) == 0 && Peek(point.armed) == 0) return;
  const Control& control = session_.control();
  if (control.num_ready >= point.goal_count || control.ready_weight >= point.goal_weight) {
    locked.WakeDataSleepers();
  }
}

void Writer::Abandon(std::span<PutRequest> requests) {
  Session::Locked locked(session_);
  for (PutRequest& request : requests) {
    if (request.slot == kNil) continue;
    session_.table().Free(request.slot);
    request.slot = kNil;
    locked.WakeSpaceSleepers();
  }
}

void Writer::DropTicket(uint32_t serial) {
  Session::Locked locked(session_);
  ReturnTicket(serial, locked);
}

void Writer::ReturnTicket(uint32_t serial, Session::Locked& locked) {
  if (session_.control().ticket != TicketOf(serial)) return;
  session_.control().ticket = 0;
  locked.WakeSpaceSleepers();  // those behind it may go
}

void Writer::CheckSize(const PutRequest& request) const {
  const Geometry& geometry = session_.geometry();
  if (request.length <= geometry.max_record_bytes) return;
  throw RingError(ErrorKind::kTooLarge,
                  "a record of " + std::to_string(request.length) +
                      " bytes exceeds max_record_bytes = " +
                      std::to_string(geometry.max_record_bytes) + "; make the ring's arena (now " +
                      std::to_string(geometry.arena_bytes) + " bytes) larger");
}

void Writer::CheckFresh(const PutRequest& request) {
  const int64_t bound = Peek(session_.control().min_version);
  if (request.min_version >= bound) return;
  throw RingError(ErrorKind::kStale,
                  "a record of policy version " + std::to_string(request.min_version) +
                      " is below the ring's min_version = " + std::to_string(bound));
}

void Writer::CheckOpen() {
  if (Peek(session_.control().closed) == 0) return;
  throw RingError(ErrorKind::kClosed, session_.region().directory() + ": the ring is closed");
}

uint32_t Writer::ProducerOf(const Key& key) {
  Producer* producers = session_.region().producers();
  const uint32_t count = session_.geometry().num_producers;
  uint32_t empty = kNil;
  for (uint32_t index = 0; index < count && empty == kNil; ++index) {
    if (Peek(producers[index].state) == 0) {
      empty = index;
    } else if (producers[index].uid[0] == key.uid[0] && producers[index].uid[1] == key.uid[1]) {
      return index;
    }
  }
  if (empty == kNil) {
    throw RingError(ErrorKind::kLimit,
                    session_.region().directory() + ": " + std::to_string(count) +
                        " producer uids are known already; create the ring with more"
                        " num_producers, or keep a producer's uid over its restarts");
  }
  producers[empty].uid[0] = key.uid[0];
  producers[empty].uid[1] = key.uid[1];
  CRASH_POINT("producer.fields");
  Publish(producers[empty].state, uint32_t{1});
  return empty;
}

}  // namespace asyncrl::ring
