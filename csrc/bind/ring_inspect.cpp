#include "bind/ring_inspect.h"

namespace asyncrl::bind {

namespace py = pybind11;

py::dict ToDict(const ring::Stats& stats) {
  using namespace py::literals;
  return py::dict(
      "num_slots"_a = stats.num_slots, "num_free"_a = stats.num_free, "depth"_a = stats.num_ready,
      "claimed"_a = stats.num_claimed, "held"_a = stats.num_held,
      "arena_bytes"_a = stats.arena_bytes, "bytes_used"_a = stats.bytes_used,
      "ready_tokens"_a = stats.ready_weight, "max_record_bytes"_a = stats.max_record_bytes,
      "puts"_a = stats.num_puts, "duplicates"_a = stats.num_duplicates, "gets"_a = stats.num_gets,
      "acks"_a = stats.num_acks, "nacks"_a = stats.num_nacks, "reclaimed"_a = stats.num_reclaimed,
      "recoveries"_a = stats.num_recoveries, "steals"_a = stats.num_steals,
      "dropped_stale"_a = stats.num_dropped[0], "dropped_oldest"_a = stats.num_dropped[1],
      "dropped_evicted"_a = stats.num_dropped[2], "dropped_group_removed"_a = stats.num_dropped[3],
      "dropped_damaged"_a = stats.num_dropped[4],
      "min_version"_a =
          stats.min_version == INT64_MIN ? py::object(py::none()) : py::int_(stats.min_version),
      "closed"_a = stats.closed);
}

py::dict InspectRing(const std::string& directory) {
  using namespace py::literals;
  const ring::Snapshot snapshot = ring::Inspect(directory);
  py::list participants, leases;
  for (const ring::ParticipantInfo& who : snapshot.participants) {
    participants.append(py::dict("index"_a = who.index, "pid"_a = who.pid,
                                 "role"_a = static_cast<uint32_t>(who.role), "alive"_a = who.alive,
                                 "name"_a = who.name,
                                 "age_s"_a = static_cast<double>(who.age_ns) / 1e9,
                                 "puts"_a = who.num_puts, "gets"_a = who.num_gets));
  }
  auto index_or_none = [](uint32_t index) {
    return index == ring::kNil ? py::object(py::none()) : py::int_(index);
  };
  for (const ring::LeaseInfo& lease : snapshot.leases) {
    leases.append(py::dict(
        "group"_a = lease.group, "rank"_a = lease.rank, "holder"_a = index_or_none(lease.holder),
        "pending"_a = lease.num_pending, "leased"_a = lease.num_leased, "num_bytes"_a = lease.bytes,
        "oldest_s"_a = static_cast<double>(lease.oldest_ns) / 1e9));
  }
  return py::dict("stats"_a = ToDict(snapshot.stats), "participants"_a = participants,
                  "leases"_a = leases, "lock_owner"_a = index_or_none(snapshot.lock_owner),
                  "oldest_ready_s"_a = static_cast<double>(snapshot.oldest_ready_ns) / 1e9);
}

}  // namespace asyncrl::bind
