// What the C++ tests of the ring share: a small ring in a directory of its own, records that carry
// a number in every byte, and checks that say what differs.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "ring/groups.h"
#include "ring/put.h"
#include "ring/session.h"

namespace asyncrl::ring::testing {

// Prints and ends the process; usable in forked children.
#define REQUIRE(condition, ...)                                            \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fprintf(stderr, "\n");                                          \
      std::_Exit(1);                                                       \
    }                                                                      \
  } while (0)

// Gives up waiting never; signals do not matter to the tests.
inline void NoInterrupt() {}

struct SmallRing {
  uint32_t num_slots = 8;
  uint64_t arena_bytes = 4096;
  uint64_t max_record_bytes = 4096;
};

// A ring under /dev/shm that is removed with the object.
class TemporaryRing {
 public:
  explicit TemporaryRing(const SmallRing& size);
  ~TemporaryRing();
  const std::string& directory() const { return directory_; }

 private:
  std::string directory_;
};

// The bytes of record `value`: its number over and over.
void FillRecord(std::byte* target, uint64_t value, uint64_t length);

// The number that the record carries; ends the test if the record is torn.
uint64_t ReadRecord(Session& session, uint32_t slot);

// Publishes record `value`, keyed by (producer, value) unless producer is 0. Returns false for a
// duplicate.
bool PutValue(Session& session, uint64_t producer, uint64_t value, uint64_t length,
              WhenFull when_full = WhenFull::kBlock, int64_t version = 0);

// Values of a delivery.
std::vector<uint64_t> ValuesOf(GroupReader& reader, const Delivery& delivery);

// Everything that the reader can get now, one record at a time, each acknowledged and released.
std::vector<uint64_t> Drain(GroupReader& reader);

std::string Join(const std::vector<uint64_t>& values);

}  // namespace asyncrl::ring::testing
