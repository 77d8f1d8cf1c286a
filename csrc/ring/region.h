// The ring's directory and the mapping of its file:
//   DIR/ring    the file of layout.h, linked into place complete, so that nobody sees a half-made
//   one DIR/lock    one byte per participant (presence.h) DIR/wake/N  FIFO of participant N, for
//   asyncio
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "ring/layout.h"

namespace asyncrl::ring {

struct Options {
  uint64_t arena_bytes = 0;
  uint64_t max_record_bytes = 0;  // 0: half the arena
  uint64_t key_window = 65536;  // publication keys in which duplicates are recognised, per producer
  uint32_t num_slots = 0;
  uint32_t num_participants = 256;
  uint32_t num_groups = 8;
  uint32_t num_producers = 64;
};

class Region {
 public:
  // Makes the directory and links a complete, prefaulted ring into it. A process that dies inside
  // leaves at most an empty directory. Throws kExists, kNoSpace, kSystem, std::invalid_argument.
  static void Create(const std::string& directory, const Options& options);

  // Maps the ring. With `read_only_arena`, a write to a record faults instead of changing what
  // other processes read. Throws kMissing, kForeign, kAbi, kCorrupt, kSystem.
  static std::shared_ptr<Region> Open(const std::string& directory, bool read_only_arena);

  // Removes the directory's files, the ring first. Live participants keep their mappings.
  static void Unlink(const std::string& directory);

  // Restores a damaged header from its copy. Throws kCorrupt when the copy is damaged too.
  static bool RepairHeader(const std::string& directory);

  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  const std::string& directory() const { return directory_; }
  std::string lock_path() const { return directory_ + "/lock"; }
  std::string wake_path(uint32_t participant) const;

  const Geometry& geometry() const { return geometry_; }
  Header& header() { return *reinterpret_cast<Header*>(base_); }
  Control& control() { return header().control; }
  Participant* participants() { return At<Participant>(geometry_.participants_at); }
  Group* groups() { return At<Group>(geometry_.groups_at); }
  Producer* producers() { return At<Producer>(geometry_.producers_at); }
  std::atomic<uint64_t>* window(uint32_t producer) {
    return At<std::atomic<uint64_t>>(geometry_.windows_at) +
           producer * (geometry_.key_window / kKeysPerWord);
  }
  uint32_t* log(uint32_t group) {
    return At<uint32_t>(geometry_.logs_at) + uint64_t{group} * geometry_.num_slots;
  }
  Slot* slots() { return At<Slot>(geometry_.slots_at); }
  std::byte* arena() { return base_ + geometry_.arena_at; }

 private:
  Region(std::string directory, std::byte* base, const Geometry& geometry)
      : directory_(std::move(directory)), base_(base), geometry_(geometry) {}
  template <typename T>
  T* At(uint64_t offset) {
    return reinterpret_cast<T*>(base_ + offset);
  }

  std::string directory_;
  std::byte* base_;
  Geometry geometry_;  // a private copy: the shared one is validated once and not trusted again
};

}  // namespace asyncrl::ring
