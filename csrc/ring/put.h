// Publishing records: claim an extent under the lock, copy outside of it, commit under it again.
//
//   Claim -> the caller fills Payload(request) -> Commit
//
// A claim that is not committed is given back by Abandon, or by whoever notices that its process
// died. A record with a key is published at most once, however often its producer dies and tries
// again.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "ring/session.h"

namespace asyncrl::ring {

enum class WhenFull { kBlock, kFail, kDropOldest };

struct Key {
  uint64_t uid[2];
  uint64_t seq;
};

struct PutRequest {
  uint64_t length;  // bytes of the record
  uint32_t weight;  // tokens
  int64_t min_version, max_version;
  std::optional<Key> key;
  // filled by Claim
  uint32_t slot = kNil;    // kNil while unclaimed, and for a duplicate
  bool duplicate = false;  // its key was published before: nothing to copy
};

class Writer {
 public:
  explicit Writer(Session& session) : session_(session) {}

  // Claims room for the first requests that fit, at least one, and returns how many; waits for room
  // according to `when_full`. Throws kTooLarge, kStale, kKeyTooOld, kClosed, kFull, kTimeout
  // (naming who holds the room). Any thread; the requests belong to the caller.
  size_t Claim(std::span<PutRequest> requests, WhenFull when_full, int64_t deadline_ns,
               const Interrupt& interrupt);

  // The same without waiting: returns 0 when there is no room, after arming this participant's
  // FIFO. `serial` identifies the waiting put from call to call; it goes first once it has a
  // ticket.
  size_t TryClaim(std::span<PutRequest> requests, WhenFull when_full, uint32_t serial,
                  bool take_ticket);

  // Where the record of a claimed request goes.
  std::byte* Payload(const PutRequest& request);

  // Publishes claimed requests, in order. Throws kClosed when the ring was closed meanwhile, and
  // kStale when a version bound passed one; what was not published is given back.
  void Commit(std::span<PutRequest> requests, bool with_checksum);

  // Gives claims back.
  void Abandon(std::span<PutRequest> requests);

  // Gives up the ticket of a put that no longer waits.
  void DropTicket(uint32_t serial);

 private:
  size_t ClaimLocked(std::span<PutRequest> requests, WhenFull when_full, uint32_t serial,
                     Session::Locked& locked);
  size_t ClaimPrefix(std::span<PutRequest> requests, WhenFull when_full, uint32_t serial);
  void ReturnTicket(uint32_t serial, Session::Locked& locked);
  bool ClaimOne(PutRequest& request, WhenFull when_full, uint32_t serial);
  void CheckSize(const PutRequest& request) const;
  void CheckFresh(const PutRequest& request);
  void CheckOpen();
  uint32_t ProducerOf(const Key& key);
  void WakeReaders(Session::Locked& locked);
  uint64_t TicketOf(uint32_t serial) const {
    return (uint64_t{session_.self()} + 1) << 32 | serial;
  }

  Session& session_;
};

}  // namespace asyncrl::ring
