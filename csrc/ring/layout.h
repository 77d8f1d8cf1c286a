// The bytes of a ring file. Every offset is derived here and stated nowhere else.
//
//   Header | participants | groups | producers + key windows | group logs | slots | arena |
//   geometry copy
//
// Truth and derived data. Recovery trusts only: the slot words (state, extent, seq, versions, key,
// masks), `Group::state/length`, `Member::ack_from/ack_to`, `Control::closed/min_version/next_seq`
// and the key windows. Lists, logs, cursors, sums and the ready queue are rebuilt from them.
//
// Order. A change of truth is one store to an atomic word, made after every field that it makes
// valid and before every field that it makes meaningless. All of it happens under the metadata
// lock, so live processes are ordered by that lock; the order of a process that dies is its program
// order, because a store that was executed reaches memory. `Publish` keeps the compiler from moving
// other stores across the word.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace asyncrl::ring {

static_assert(std::endian::native == std::endian::little, "ring files are little-endian");
static_assert(std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<uint64_t>::is_always_lock_free);

inline constexpr char kMagic[8] = {'A', 'R', 'L', 'R', 'I', 'N', 'G', '\n'};
inline constexpr uint32_t kAbiMajor = 1;  // another major: the file cannot be used
inline constexpr uint32_t kAbiMinor = 0;  // another minor: the file can be used
inline constexpr uint64_t kCompatibleFeatures = 0;
inline constexpr uint64_t kIncompatibleFeatures = 0;

inline constexpr uint32_t kNil = 0xFFFFFFFFu;  // "no slot", "no producer", "no participant"
inline constexpr uint32_t kMaxMembers = 64;    // one bit each in the masks of a slot
inline constexpr uint32_t kNameBytes = 64;     // terminating zero included
inline constexpr uint64_t kExtentAlign = 64;
inline constexpr uint64_t kKeysPerWord = 32;

// Sizes chosen at creation, and what follows from them. Immutable; stored twice, each with its
// checksum.
struct Geometry {
  char magic[8];
  uint32_t abi_major, abi_minor;
  uint64_t compatible, incompatible;
  uint8_t uuid[16];
  uint64_t page_bytes, arena_bytes, max_record_bytes, key_window, lock_inode;
  uint32_t num_slots, num_participants, num_groups, num_producers;
  // derived by DeriveOffsets
  uint64_t participants_at, groups_at, producers_at, windows_at, logs_at, slots_at, arena_at,
      copy_at;
  uint64_t total_bytes;
  uint32_t reserved;
  uint32_t checksum;  // CRC-32C of all bytes before it
};

enum class SlotState : uint32_t { kFree = 0, kClaimed = 1, kReady = 2, kHeld = 3 };

// One record's bookkeeping. kFree -> kClaimed(owner) -> kReady(seq) -> kHeld(group, position) ->
// kFree.
struct alignas(128) Slot {
  std::atomic<SlotState> state;
  uint32_t owner;    // participant that claimed it
  uint64_t offset;   // of the extent in the arena, a multiple of kExtentAlign
  uint64_t length;   // bytes of the record; the extent is this rounded up to kExtentAlign
  uint64_t seq;      // order of publication
  uint64_t key_seq;  // with `producer`: the publication key
  int64_t min_version, max_version;
  uint64_t publish_ns;            // CLOCK_MONOTONIC
  uint64_t position;              // in its group's log
  std::atomic<uint64_t> pending;  // members that have not acknowledged it
  std::atomic<uint64_t> leased;   // members that hold a view of it
  uint32_t producer;              // index of the key's producer, or kNil
  uint32_t weight;                // tokens
  uint32_t group;
  uint32_t batch_offset;  // position - first position of its batch
  uint32_t prev, next;    // derived: neighbours in address order
  uint32_t link;          // derived: next in the free list or in the ready queue
  uint32_t checksum;      // CRC-32C of the record, or 0 when not computed
};
static_assert(sizeof(Slot) == 128);

enum class Role : uint32_t { kProducer = 0, kReader = 1, kObserver = 2 };
// kArriving: a process has the place and has not yet taken back what its predecessor held.
enum class ParticipantState : uint32_t { kNone = 0, kAttached = 1, kDetached = 2, kArriving = 3 };
inline constexpr uint32_t kArmedData = 1, kArmedSpace = 2;

struct alignas(128) Participant {
  std::atomic<ParticipantState> state;
  std::atomic<uint32_t> armed;  // kArmedData | kArmedSpace: write to its FIFO when that happens
  Role role;
  uint32_t pid;  // in its own PID namespace: for messages, never for liveness
  uint64_t attached_ns;
  uint64_t num_puts, num_gets;
  char name[kNameBytes];
};

// A rank of a group. ack_from is written before ack_to; ack_to != 0 means that the acknowledgement
// of positions [ack_from, ack_to) has happened and that clearing its bits may be unfinished.
struct Member {
  std::atomic<uint64_t> ack_from, ack_to;
  uint64_t cursor;       // derived: no position below it waits for delivery
  uint32_t participant;  // index, or kNil
  uint32_t reserved;
};

enum class GroupState : uint32_t { kNone = 0, kActive = 1, kRemoving = 2 };

struct alignas(128) Group {
  std::atomic<GroupState> state;
  uint32_t size;  // members
  std::atomic<uint64_t>
      length;  // commits an append: a slot held at or beyond it was never delivered
  char name[kNameBytes];
  Member members[kMaxMembers];
};

// The mask of all members of `group`.
inline uint64_t AllMembers(const Group& group) {
  return group.size >= kMaxMembers ? ~uint64_t{0} : (uint64_t{1} << group.size) - 1;
}

// A producer identity, and which of its sequence numbers were published: a window of words, each
// (epoch << 32 | bitmap of 32 sequence numbers). One store marks a number and ages an older epoch
// out.
struct alignas(64) Producer {
  std::atomic<uint32_t> state;  // 0: empty
  uint32_t reserved;
  uint64_t uid[2];
};

enum class DropReason : uint32_t {
  kStale = 0,
  kOldest = 1,
  kEvicted = 2,
  kGroupRemoved = 3,
  kDamaged = 4
};
inline constexpr uint32_t kNumDropReasons = 5;

struct Control {
  std::atomic<uint32_t> closed;
  std::atomic<int64_t> min_version;
  std::atomic<uint64_t> next_seq;
  // derived
  uint32_t address_head, cursor;  // slots in address order; next-fit starts after `cursor`
  uint32_t free_head, num_free;
  uint32_t ready_head, ready_tail, num_ready, num_claimed;
  uint64_t ready_weight, bytes_used;
  int64_t swept_version;  // no ready record is below it
  uint64_t ticket;  // (participant + 1) << 32 | serial of the waiting put that goes first, or 0
  // counters; a crash may leave one short
  uint64_t num_puts, num_duplicates, num_gets, num_acks, num_nacks, num_reclaimed;
  uint64_t num_recoveries, num_steals;
  uint64_t num_dropped[kNumDropReasons];
  uint64_t last_put_ns;
};

// What sleepers wait on. A goal or flag is set by a sleeper under the lock and taken by the waker.
struct alignas(64) WaitPoint {
  std::atomic<uint32_t> sequence;  // the futex
  std::atomic<uint32_t> sleepers;  // some thread sleeps on the futex
  std::atomic<uint32_t> armed;     // some participant armed its FIFO
  uint32_t goal_count;             // data: wake when so many records are ready ...
  uint64_t goal_weight;            // ... or so many tokens; the smallest goal of all sleepers
};

struct Header {
  Geometry geometry;
  alignas(64) std::atomic<uint32_t> lock;  // 0, or owner + 1 with kLockWaiters
  WaitPoint data, space;
  alignas(64) Control control;
};
static_assert(sizeof(Header) <= 4096);

inline constexpr uint32_t kLockWaiters = 0x80000000u;

inline constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Fills in the offsets of `geometry` from its sizes.
inline constexpr void DeriveOffsets(Geometry& g) {
  uint64_t at = 4096;
  auto place = [&at](uint64_t bytes, uint64_t alignment) {
    at = AlignUp(at, alignment);
    const uint64_t here = at;
    at += bytes;
    return here;
  };
  g.participants_at = place(sizeof(Participant) * g.num_participants, 128);
  g.groups_at = place(sizeof(Group) * g.num_groups, 128);
  g.producers_at = place(sizeof(Producer) * g.num_producers, 128);
  g.windows_at = place(g.key_window / kKeysPerWord * 8 * g.num_producers, 128);
  g.logs_at = place(uint64_t{4} * g.num_slots * g.num_groups, 128);
  g.slots_at = place(sizeof(Slot) * g.num_slots, 128);
  g.arena_at = place(g.arena_bytes, g.page_bytes);
  g.copy_at = place(sizeof(Geometry), 128);
  g.total_bytes = AlignUp(at, g.page_bytes);
}

// Stores a word of truth: after all earlier stores and before all later ones, as the compiler sees
// it, and with release order for other processes.
template <typename T>
inline void Publish(std::atomic<T>& word, T value) {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  word.store(value, std::memory_order_release);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

template <typename T>
inline T Peek(const std::atomic<T>& word) {
  return word.load(std::memory_order_relaxed);
}

}  // namespace asyncrl::ring
