#include "ring/table.h"

#include <algorithm>
#include <string>

#include "common/crash_point.h"
#include "ring/futex.h"
#include "ring/keys.h"

namespace asyncrl::ring {

uint32_t Table::Allocate(uint64_t length, uint32_t owner) {
  const uint64_t bytes = ExtentBytes(length);
  if (control_.free_head == kNil || geometry_.arena_bytes - control_.bytes_used < bytes)
    return kNil;
  // Try the gap after `at` (kNil: the gap before the first extent), beginning behind the cursor and
  // coming back to it.
  const uint32_t start = control_.cursor;
  uint32_t at = start;
  do {
    const uint64_t begin = at == kNil ? 0 : slots_[at].offset + ExtentBytes(slots_[at].length);
    const uint32_t next = at == kNil ? control_.address_head : slots_[at].next;
    const uint64_t end = next == kNil ? geometry_.arena_bytes : slots_[next].offset;
    if (end - begin >= bytes) return Place(at, begin, length, owner);
    at = next;
  } while (at != start);
  return kNil;
}

uint32_t Table::Place(uint32_t after, uint64_t offset, uint64_t length, uint32_t owner) {
  const uint32_t index = control_.free_head;
  Slot& slot = slots_[index];
  const uint32_t next_free = slot.link;
  slot.owner = owner;
  slot.offset = offset;
  slot.length = length;
  slot.checksum = 0;
  CRASH_POINT("claim.fields");
  Publish(slot.state, SlotState::kClaimed);
  CRASH_POINT("claim.state");
  control_.free_head = next_free;
  --control_.num_free;
  ++control_.num_claimed;
  control_.bytes_used += ExtentBytes(length);
  slot.prev = after;
  slot.next = after == kNil ? control_.address_head : slots_[after].next;
  (after == kNil ? control_.address_head : slots_[after].next) = index;
  CRASH_POINT("claim.linked");
  if (slot.next != kNil) slots_[slot.next].prev = index;
  control_.cursor = index;
  return index;
}

void Table::Free(uint32_t index) {
  Slot& slot = slots_[index];
  if (Peek(slot.state) == SlotState::kClaimed) --control_.num_claimed;
  Publish(slot.state, SlotState::kFree);
  CRASH_POINT("free.state");
  (slot.prev == kNil ? control_.address_head : slots_[slot.prev].next) = slot.next;
  CRASH_POINT("free.unlinked");
  if (slot.next != kNil) slots_[slot.next].prev = slot.prev;
  control_.cursor = slot.prev;
  slot.link = control_.free_head;
  control_.free_head = index;
  ++control_.num_free;
  control_.bytes_used -= ExtentBytes(slot.length);
}

void Table::AppendReady(uint32_t index) {
  slots_[index].link = kNil;
  (control_.ready_tail == kNil ? control_.ready_head : slots_[control_.ready_tail].link) = index;
  control_.ready_tail = index;
  ++control_.num_ready;
  control_.ready_weight += slots_[index].weight;
}

void Table::MakeReady(uint32_t index) {
  Slot& slot = slots_[index];
  const uint64_t seq = Peek(control_.next_seq);
  slot.seq = seq;
  slot.publish_ns = static_cast<uint64_t>(NowNs());
  CRASH_POINT("commit.seq");
  Publish(slot.state, SlotState::kReady);
  CRASH_POINT("commit.state");
  Publish(control_.next_seq, seq + 1);
  CRASH_POINT("commit.next_seq");
  if (slot.producer != kNil) {
    KeyWindow(region_.window(slot.producer), geometry_.key_window).Mark(slot.key_seq);
    CRASH_POINT("commit.key");
  }
  --control_.num_claimed;
  AppendReady(index);
  CRASH_POINT("commit.queued");
}

uint32_t Table::HoldNext(uint32_t group, uint64_t position, uint32_t batch_offset,
                         uint64_t members) {
  const uint32_t index = control_.ready_head;
  Slot& slot = slots_[index];
  slot.group = group;
  slot.position = position;
  slot.batch_offset = batch_offset;
  slot.pending.store(members, std::memory_order_relaxed);
  slot.leased.store(0, std::memory_order_relaxed);
  CRASH_POINT("hold.fields");
  Publish(slot.state, SlotState::kHeld);
  CRASH_POINT("hold.state");
  control_.ready_head = slot.link;
  if (control_.ready_head == kNil) control_.ready_tail = kNil;
  --control_.num_ready;
  control_.ready_weight -= slot.weight;
  return index;
}

void Table::DropOldest(DropReason reason) {
  const uint32_t index = control_.ready_head;
  const uint32_t next = slots_[index].link;
  control_.ready_weight -= slots_[index].weight;
  --control_.num_ready;
  CRASH_POINT("drop.before");
  Free(index);
  control_.ready_head = next;
  if (next == kNil) control_.ready_tail = kNil;
  ++control_.num_dropped[static_cast<uint32_t>(reason)];
  CRASH_POINT("drop.after");
}

uint32_t Table::DropBelow(int64_t version, DropReason reason) {
  uint32_t num_dropped = 0;
  uint32_t kept_tail = kNil;
  for (uint32_t index = control_.ready_head; index != kNil;) {
    const uint32_t next = slots_[index].link;
    if (slots_[index].min_version >= version) {
      (kept_tail == kNil ? control_.ready_head : slots_[kept_tail].link) = index;
      kept_tail = index;
    } else {
      control_.ready_weight -= slots_[index].weight;
      --control_.num_ready;
      Free(index);
      ++control_.num_dropped[static_cast<uint32_t>(reason)];
      ++num_dropped;
      CRASH_POINT("evict.one");
    }
    index = next;
  }
  (kept_tail == kNil ? control_.ready_head : slots_[kept_tail].link) = kNil;
  control_.ready_tail = kept_tail;
  return num_dropped;
}

}  // namespace asyncrl::ring
