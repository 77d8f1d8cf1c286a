#include "scenario.h"

#include <unistd.h>

#include <cstring>

#include "ring/errors.h"

namespace asyncrl::ring::testing {

TemporaryRing::TemporaryRing(const SmallRing& size) {
  static int serial = 0;
  directory_ = "/dev/shm/asyncrl-test-" + std::to_string(getpid()) + "-" + std::to_string(serial++);
  Options options;
  options.arena_bytes = size.arena_bytes;
  options.max_record_bytes = size.max_record_bytes;
  options.num_slots = size.num_slots;
  options.num_participants = 8;
  options.num_groups = 2;
  options.num_producers = 4;
  options.key_window = 256;
  Region::Create(directory_, options);
}

TemporaryRing::~TemporaryRing() { Region::Unlink(directory_); }

void FillRecord(std::byte* target, uint64_t value, uint64_t length) {
  for (uint64_t at = 0; at + 8 <= length; at += 8) std::memcpy(target + at, &value, 8);
}

uint64_t ReadRecord(Session& session, uint32_t slot) {
  const Slot& record = session.table().slot(slot);
  const std::byte* bytes = session.region().arena() + record.offset;
  uint64_t value, other;
  std::memcpy(&value, bytes, 8);
  for (uint64_t at = 0; at + 8 <= record.length; at += 8) {
    std::memcpy(&other, bytes + at, 8);
    REQUIRE(other == value, "record %lu is torn: byte %lu says %lu", value, at, other);
  }
  return value;
}

bool PutValue(Session& session, uint64_t producer, uint64_t value, uint64_t length,
              WhenFull when_full, int64_t version) {
  Writer writer(session);
  PutRequest request{};
  request.length = length;
  request.weight = 1;
  request.min_version = request.max_version = version;
  request.slot = kNil;
  if (producer != 0) request.key = Key{{producer, 0}, value};
  writer.Claim({&request, 1}, when_full, NowNs() + 20'000 * kMillisecond, NoInterrupt);
  if (request.duplicate) return false;
  FillRecord(writer.Payload(request), value, length);
  writer.Commit({&request, 1}, /*with_checksum=*/false);
  return !request.duplicate;
}

std::vector<uint64_t> ValuesOf(GroupReader& reader, const Delivery& delivery) {
  std::vector<uint64_t> values;
  for (uint32_t slot : delivery.slots) values.push_back(ReadRecord(reader.session(), slot));
  return values;
}

std::vector<uint64_t> Drain(GroupReader& reader) {
  std::vector<uint64_t> values;
  while (auto delivery = reader.TryGet({1, 0})) {
    for (uint64_t value : ValuesOf(reader, *delivery)) values.push_back(value);
    reader.Ack(delivery->begin, delivery->end);
    reader.Release(delivery->slots);
  }
  return values;
}

std::string Join(const std::vector<uint64_t>& values) {
  std::string text;
  for (uint64_t value : values) text.append(std::to_string(value)).append(" ");
  return "[" + text + "]";
}

}  // namespace asyncrl::ring::testing
