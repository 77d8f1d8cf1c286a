// Recovery: Table::Rebuild and Table::Check. See table.h.
#include <algorithm>
#include <string>
#include <vector>

#include "common/crash_point.h"
#include "ring/keys.h"
#include "ring/table.h"

namespace asyncrl::ring {

namespace {

// Clears the bits of acknowledgements that a dead process had begun.
void FinishAcks(const Group& group, Slot& slot) {
  for (uint32_t rank = 0; rank < group.size; ++rank) {
    const Member& member = group.members[rank];
    const uint64_t end = Peek(member.ack_to);
    if (end != 0 && slot.position >= Peek(member.ack_from) && slot.position < end) {
      slot.pending.fetch_and(~(uint64_t{1} << rank), std::memory_order_relaxed);
    }
  }
}

}  // namespace

bool Table::IsSane(const Slot& slot) const {
  const SlotState state = Peek(slot.state);
  if (state == SlotState::kFree) return true;
  return state <= SlotState::kHeld && slot.offset % kExtentAlign == 0 &&
         slot.length <= geometry_.max_record_bytes && slot.offset <= geometry_.arena_bytes &&
         ExtentBytes(slot.length) <= geometry_.arena_bytes - slot.offset &&
         (state != SlotState::kHeld || slot.group < geometry_.num_groups);
}

void Table::RebuildSlotWords() {
  Group* groups = region_.groups();
  for (uint32_t index = 0; index < geometry_.num_slots; ++index) {
    Slot& slot = slots_[index];
    if (!IsSane(slot)) {
      Publish(slot.state, SlotState::kFree);
      ++control_.num_dropped[static_cast<uint32_t>(DropReason::kDamaged)];
    }
    if (Peek(slot.state) != SlotState::kHeld) continue;
    const Group& group = groups[slot.group];
    const GroupState state = Peek(group.state);
    if (state == GroupState::kActive && slot.position < Peek(group.length)) {
      FinishAcks(group, slot);
      if (Peek(slot.pending) == 0 && Peek(slot.leased) == 0) Publish(slot.state, SlotState::kFree);
    } else if (state == GroupState::kRemoving && Peek(slot.pending) != AllMembers(group)) {
      Publish(slot.state, SlotState::kFree);  // some member has learned from it
      ++control_.num_dropped[static_cast<uint32_t>(DropReason::kGroupRemoved)];
    } else {
      Publish(slot.state, SlotState::kReady);  // nobody has: back to its place in the queue
    }
    CRASH_POINT("rebuild.slot");
  }
  for (uint32_t index = 0; index < geometry_.num_groups; ++index) {
    Group& group = groups[index];
    for (Member& member : group.members) {
      Publish(member.ack_to, uint64_t{0});
      member.cursor = 0;
    }
    if (Peek(group.state) == GroupState::kRemoving) Publish(group.state, GroupState::kNone);
  }
  CRASH_POINT("rebuild.groups");
}

void Table::RebuildLists() {
  std::vector<uint32_t> live, ready;
  control_.free_head = control_.address_head = control_.ready_head = control_.ready_tail = kNil;
  control_.num_free = control_.num_ready = control_.num_claimed = 0;
  control_.ready_weight = control_.bytes_used = 0;
  control_.swept_version = INT64_MIN;
  uint64_t next_seq = Peek(control_.next_seq);
  for (uint32_t index = 0; index < geometry_.num_slots; ++index) {
    if (Peek(slots_[index].state) != SlotState::kFree) live.push_back(index);
  }
  std::sort(live.begin(), live.end(),
            [this](uint32_t a, uint32_t b) { return slots_[a].offset < slots_[b].offset; });
  uint32_t last = kNil;
  for (uint32_t index : live) {
    Slot& slot = slots_[index];
    const uint64_t free_from =
        last == kNil ? 0 : slots_[last].offset + ExtentBytes(slots_[last].length);
    if (slot.offset < free_from) {  // two records cannot share bytes: the words were overwritten
      Publish(slot.state, SlotState::kFree);
      ++control_.num_dropped[static_cast<uint32_t>(DropReason::kDamaged)];
      continue;
    }
    slot.prev = last;
    slot.next = kNil;
    (last == kNil ? control_.address_head : slots_[last].next) = index;
    last = index;
    control_.bytes_used += ExtentBytes(slot.length);
    if (Peek(slot.state) == SlotState::kClaimed) {
      ++control_.num_claimed;
      continue;
    }
    next_seq = std::max(next_seq, slot.seq + 1);
    if (slot.producer < geometry_.num_producers) {
      KeyWindow(region_.window(slot.producer), geometry_.key_window).Mark(slot.key_seq);
    }
    if (Peek(slot.state) == SlotState::kReady) ready.push_back(index);
    if (Peek(slot.state) == SlotState::kHeld) {
      region_.log(slot.group)[slot.position % geometry_.num_slots] = index;
    }
  }
  control_.cursor = last;
  CRASH_POINT("rebuild.addresses");
  for (uint32_t index = geometry_.num_slots; index-- > 0;) {
    if (Peek(slots_[index].state) != SlotState::kFree) continue;
    slots_[index].link = control_.free_head;
    control_.free_head = index;
    ++control_.num_free;
  }
  std::sort(ready.begin(), ready.end(),
            [this](uint32_t a, uint32_t b) { return slots_[a].seq < slots_[b].seq; });
  for (uint32_t index : ready) AppendReady(index);
  Publish(control_.next_seq, next_seq);
  CRASH_POINT("rebuild.queue");
}

void Table::Rebuild() noexcept {
  CRASH_POINT("rebuild.begin");
  RebuildSlotWords();
  RebuildLists();
  ++control_.num_recoveries;
  CRASH_POINT("rebuild.end");
}

std::string Table::Check() {
  uint32_t num_free = 0, num_ready = 0, num_claimed = 0;
  uint64_t bytes = 0, weight = 0, last_seq = 0, end = 0;
  for (uint32_t index = control_.free_head; index != kNil; index = slots_[index].link) {
    if (Peek(slots_[index].state) != SlotState::kFree) return "a slot in the free list is not free";
    if (++num_free > geometry_.num_slots) return "the free list is a cycle";
  }
  uint32_t num_live = 0, prev = kNil;
  for (uint32_t index = control_.address_head; index != kNil;
       prev = index, index = slots_[index].next) {
    const Slot& slot = slots_[index];
    if (++num_live > geometry_.num_slots) return "the address list is a cycle";
    if (Peek(slot.state) == SlotState::kFree) return "a free slot is in the address list";
    if (!IsSane(slot) || slot.offset < end || slot.prev != prev)
      return "the address list is out of order";
    end = slot.offset + ExtentBytes(slot.length);
    bytes += ExtentBytes(slot.length);
    if (Peek(slot.state) == SlotState::kClaimed) ++num_claimed;
    if (Peek(slot.state) == SlotState::kHeld && Peek(slot.pending) == 0 && Peek(slot.leased) == 0) {
      return "a held slot that nobody waits for is not free";
    }
  }
  for (uint32_t index = control_.ready_head; index != kNil; index = slots_[index].link) {
    const Slot& slot = slots_[index];
    if (++num_ready > geometry_.num_slots) return "the ready queue is a cycle";
    if (Peek(slot.state) != SlotState::kReady) return "a slot in the ready queue is not ready";
    if (slot.seq <= last_seq) return "the ready queue is out of order";
    last_seq = slot.seq;
    weight += slot.weight;
  }
  if (num_free + num_live != geometry_.num_slots) return "slots leaked";
  if (num_free != control_.num_free || num_ready != control_.num_ready ||
      num_claimed != control_.num_claimed || bytes != control_.bytes_used ||
      weight != control_.ready_weight || last_seq >= Peek(control_.next_seq)) {
    return "a count differs from the slots";
  }
  return "";
}

}  // namespace asyncrl::ring
