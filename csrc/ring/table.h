// Slots and arena: allocation, the ready queue, recovery. No system calls, no waiting.
//
// Every method needs the metadata lock, except where said. An extent is contiguous, and is looked
// for in address order from where room was given back last: while readers keep up the same bytes
// are used again and stay in the cache, and a record that is held for long is jumped over.
#pragma once

#include <cstdint>
#include <string>

#include "ring/layout.h"
#include "ring/region.h"

namespace asyncrl::ring {

class Table {
 public:
  explicit Table(Region& region)
      : region_(region),
        control_(region.control()),
        slots_(region.slots()),
        geometry_(region.geometry()) {}

  // Claims a slot and an extent for `length` bytes, or returns kNil when there is no room. The slot
  // is kClaimed and owned by `owner`; its other fields are the caller's to fill.
  uint32_t Allocate(uint64_t length, uint32_t owner);

  // Ends a record, whatever its state.
  void Free(uint32_t slot);

  // Publishes a claimed slot at the end of the ready queue.
  void MakeReady(uint32_t slot);

  // Takes the head of the ready queue, which becomes held by `group` at `position`.
  uint32_t HoldNext(uint32_t group, uint64_t position, uint32_t batch_offset, uint64_t members);

  // Frees the head of the ready queue and counts it.
  void DropOldest(DropReason reason);

  // Frees ready records whose min_version is below `version`. Returns how many.
  uint32_t DropBelow(int64_t version, DropReason reason);

  // Rebuilds everything derived from the slots' words and finishes what a dead process began.
  // Idempotent: it may itself be killed anywhere and run again. Slots whose words make no sense are
  // dropped.
  void Rebuild() noexcept;

  // Returns an empty string, or what is inconsistent. For tests and `asyncrl ring --check`.
  std::string Check();

  Slot& slot(uint32_t index) { return slots_[index]; }

 private:
  uint32_t Place(uint32_t after, uint64_t offset, uint64_t length, uint32_t owner);
  void AppendReady(uint32_t slot);
  void RebuildSlotWords();
  void RebuildLists();
  bool IsSane(const Slot& slot) const;

  Region& region_;
  Control& control_;
  Slot* slots_;
  const Geometry& geometry_;
};

// Bytes of arena behind a record of `length` bytes.
inline uint64_t ExtentBytes(uint64_t length) { return AlignUp(length ? length : 1, kExtentAlign); }

}  // namespace asyncrl::ring
