// For the sanitizers: participants that are threads over one mapping, each with its own place in
// the ring, so that they meet at the shared lock and at nothing else. Producers, two ranks of a
// group, and an observer.
//
// usage: ring_threads RECORDS
#include <thread>

#include "../chaos/ring/scenario.h"
#include "ring/admin.h"
#include "ring/errors.h"
#include "ring/stats.h"

namespace asyncrl::ring::testing {
namespace {

constexpr uint32_t kProducers = 2, kRanks = 2;

void Produce(std::shared_ptr<Region> region, uint64_t producer, uint64_t count) {
  auto session = std::make_shared<Session>(region, Role::kProducer, "producer");
  for (uint64_t i = 0; i < count; ++i) {
    PutValue(*session, producer, i * kProducers + producer - 1, 64 + i % 7 * 72);
  }
}

void Read(std::shared_ptr<Region> region, uint32_t rank, std::vector<uint64_t>& values) {
  auto session = std::make_shared<Session>(region, Role::kReader, "reader");
  GroupReader reader(session, "dp0", rank, kRanks, 0);
  try {
    for (;;) {
      const Delivery delivery = reader.Get({2, 0}, NowNs() + 60'000 * kMillisecond, NoInterrupt);
      for (uint64_t value : ValuesOf(reader, delivery)) values.push_back(value);
      reader.Ack(delivery.begin, delivery.end);
      reader.Release(delivery.slots);
    }
  } catch (const RingError& error) {
    REQUIRE(error.kind() == ErrorKind::kClosed, "%s", error.what());
  }
}

}  // namespace

int Main(int argc, char** argv) {
  const uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2000;
  TemporaryRing ring(SmallRing{});
  auto region = Region::Open(ring.directory(), /*read_only_arena=*/false);
  auto observer = std::make_shared<Session>(region, Role::kObserver, "observer");
  std::vector<uint64_t> values[kRanks];
  std::vector<std::thread> producers, readers;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    readers.emplace_back(Read, region, rank, std::ref(values[rank]));
  }
  for (uint64_t producer = 1; producer <= kProducers; ++producer) {
    producers.emplace_back(Produce, region, producer, count);
  }
  std::thread watcher([&] {
    while (ReadStats(*observer).num_puts < count * kProducers) std::this_thread::yield();
  });
  for (std::thread& thread : producers) thread.join();
  watcher.join();
  Close(*observer);
  for (std::thread& thread : readers) thread.join();
  REQUIRE(values[0] == values[1], "the ranks read different records");
  REQUIRE(values[0].size() == count * kProducers, "%zu of %lu records", values[0].size(),
          count * kProducers);
  uint64_t next[kProducers] = {};
  for (uint64_t value : values[0]) {
    REQUIRE(value / kProducers == next[value % kProducers]++, "record %lu is out of order", value);
  }
  std::printf("ok: %lu records by %u threads\n", count * kProducers, kProducers + kRanks + 1);
  return 0;
}

}  // namespace asyncrl::ring::testing

int main(int argc, char** argv) { return asyncrl::ring::testing::Main(argc, argv); }
