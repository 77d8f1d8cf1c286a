// The ring in Python: handles, groups, batches. asyncrl/ring is the face that users see.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/lease.h"
#include "bind/record_codec.h"
#include "ring/admin.h"
#include "ring/errors.h"
#include "ring/put.h"
#include "ring/stats.h"

namespace asyncrl {

namespace py = pybind11;

namespace bind {

using ring::ErrorKind;
using ring::GroupReader;
using ring::Interrupt;
using ring::PutRequest;
using ring::RingError;
using ring::Session;

// The class in asyncrl.ring.errors for a kind.
const char* ClassOf(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kClosed:
      return "RingClosed";
    case ErrorKind::kTimeout:
      return "RingTimeout";
    case ErrorKind::kFull:
      return "RingFull";
    case ErrorKind::kTooLarge:
      return "RecordTooLarge";
    case ErrorKind::kStale:
      return "RecordStale";
    case ErrorKind::kKeyTooOld:
      return "KeyTooOld";
    case ErrorKind::kNotAMember:
      return "NotAMember";
    case ErrorKind::kMemberBusy:
      return "MemberBusy";
    case ErrorKind::kLimit:
      return "RingLimit";
    case ErrorKind::kExists:
      return "RingExists";
    case ErrorKind::kMissing:
      return "RingMissing";
    case ErrorKind::kForeign:
      return "NotARing";
    case ErrorKind::kAbi:
      return "RingAbiMismatch";
    case ErrorKind::kCorrupt:
      return "RingCorrupt";
    case ErrorKind::kNoSpace:
      return "RingNoSpace";
    case ErrorKind::kLockTimeout:
      return "LockTimeout";
    case ErrorKind::kReleased:
      return "BatchReleased";
    case ErrorKind::kDetached:
      return "RingDetached";
    case ErrorKind::kViewsAlive:
      return "ViewsAlive";
    case ErrorKind::kSystem:
      return "RingSystemError";
  }
  return "RingError";
}

void Translate(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const RingError& error) {
    const py::object type = py::module_::import("asyncrl.ring.errors").attr(ClassOf(error.kind()));
    PyErr_SetString(type.ptr(), error.what());
  }
}

// Lets Ctrl-C and other Python signal handlers end a wait.
void CheckSignals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

int64_t DeadlineIn(double seconds) {
  if (seconds > 1e9) return ring::kForever;
  return ring::NowNs() + static_cast<int64_t>(std::max(seconds, 0.0) * 1e9);
}

// Records on their way in: what is to be written, and where. Not tied to one attempt, so that an
// asynchronous put may try, wait and try again.
class Outgoing {
 public:
  Outgoing(std::shared_ptr<Session> session, const RecordFormat& format, ring::WhenFull when_full,
           bool with_checksum)
      : session_(std::move(session)),
        writer_(*session_),
        format_(format),
        when_full_(when_full),
        with_checksum_(with_checksum),
        serial_(session_->NextSerial()) {}

  void Add(const py::tuple& values, int64_t min_version, int64_t max_version, uint32_t weight,
           std::optional<std::tuple<uint64_t, uint64_t, uint64_t>> key) {
    records_.emplace_back(format_, values);
    PutRequest request{};
    request.length = records_.back().length();
    request.weight = weight;
    request.min_version = min_version;
    request.max_version = max_version;
    request.slot = ring::kNil;
    if (key) request.key = ring::Key{{std::get<0>(*key), std::get<1>(*key)}, std::get<2>(*key)};
    requests_.push_back(request);
  }

  // Publishes all, waiting for room. Without the GIL.
  void Put(double timeout_s) {
    const int64_t deadline = DeadlineIn(timeout_s);
    while (num_done_ < requests_.size()) {
      Publish(writer_.Claim(Rest(), when_full_, deadline, CheckSignals));
    }
  }

  // Publishes what there is room for now; true when all are out, else the wake descriptor is armed.
  bool TryPut(bool take_ticket) {
    while (num_done_ < requests_.size()) {
      const size_t claimed = writer_.TryClaim(Rest(), when_full_, serial_, take_ticket);
      if (claimed == 0) return false;
      Publish(claimed);
    }
    return true;
  }

  void GiveUp() { writer_.DropTicket(serial_); }

  size_t num_done() const { return num_done_; }
  size_t num_published() const { return num_published_; }

 private:
  std::span<PutRequest> Rest() { return std::span(requests_).subspan(num_done_); }

  void Publish(size_t count) {
    const auto claimed = Rest().first(count);
    for (size_t i = 0; i < count; ++i) {
      if (claimed[i].slot != ring::kNil) records_[num_done_ + i].Write(writer_.Payload(claimed[i]));
    }
    writer_.Commit(claimed, with_checksum_);
    num_done_ += count;
    for (const PutRequest& request : claimed) num_published_ += !request.duplicate;
  }

  std::shared_ptr<Session> session_;
  ring::Writer writer_;
  const RecordFormat& format_;
  ring::WhenFull when_full_;
  bool with_checksum_;
  uint32_t serial_;
  std::vector<EncodedRecord> records_;
  std::vector<PutRequest> requests_;
  size_t num_done_ = 0, num_published_ = 0;
};

void RegisterRecords(py::module_& module) {
  py::class_<RecordFormat>(module, "RecordFormat")
      .def(py::init<const std::vector<std::tuple<std::string, std::string, int>>&>(),
           py::arg("fields"));
  py::enum_<ring::WhenFull>(module, "WhenFull")
      .value("BLOCK", ring::WhenFull::kBlock)
      .value("FAIL", ring::WhenFull::kFail)
      .value("DROP_OLDEST", ring::WhenFull::kDropOldest);
  py::class_<Outgoing>(module, "Outgoing")
      .def(py::init<std::shared_ptr<Session>, const RecordFormat&, ring::WhenFull, bool>(),
           py::arg("session"), py::arg("format"), py::arg("when_full"), py::arg("with_checksum"),
           py::keep_alive<1, 3>())
      .def("add", &Outgoing::Add, py::arg("values"), py::arg("min_version"), py::arg("max_version"),
           py::arg("weight"), py::arg("key").none(true))
      .def("put", &Outgoing::Put, py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>())
      .def("try_put", &Outgoing::TryPut, py::arg("take_ticket"),
           py::call_guard<py::gil_scoped_release>())
      .def("give_up", &Outgoing::GiveUp, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("num_done", &Outgoing::num_done)
      .def_property_readonly("num_published", &Outgoing::num_published);
}

void RegisterReading(py::module_& module) {
  py::class_<Lease, std::shared_ptr<Lease>>(module, "Lease")
      .def("__len__", &Lease::size)
      .def_property_readonly("begin", &Lease::begin)
      .def_property_readonly("end", &Lease::end)
      .def_property_readonly("num_views", &Lease::num_views)
      .def_property_readonly("acknowledged", &Lease::acknowledged)
      .def_property_readonly("released", &Lease::released)
      .def("view", &Lease::View, py::arg("index"), py::arg("name"), py::arg("writeable"))
      .def("scalar", &Lease::Scalar, py::arg("index"), py::arg("name"))
      .def("min_version", [](const Lease& lease, size_t i) { return lease.slot(i).min_version; })
      .def("max_version", [](const Lease& lease, size_t i) { return lease.slot(i).max_version; })
      .def("seq", [](const Lease& lease, size_t i) { return lease.slot(i).seq; })
      .def("verify", &Lease::Verify, py::arg("index"), py::call_guard<py::gil_scoped_release>())
      .def("ack", &Lease::Ack, py::call_guard<py::gil_scoped_release>())
      .def("release", &Lease::Release, py::call_guard<py::gil_scoped_release>())
      .def("release_when_unused", &Lease::ReleaseWhenUnused,
           py::call_guard<py::gil_scoped_release>());

  py::class_<GroupReader, std::shared_ptr<GroupReader>>(module, "GroupReader")
      .def(py::init<std::shared_ptr<Session>, const std::string&, uint32_t, uint32_t, uint64_t>(),
           py::arg("session"), py::arg("name"), py::arg("rank"), py::arg("size"),
           py::arg("resume_at"), py::call_guard<py::gil_scoped_release>())
      .def(
          "get",
          [](std::shared_ptr<GroupReader> reader, uint32_t count, uint64_t weight,
             double timeout_s) {
            py::gil_scoped_release no_gil;
            auto delivery = reader->Get({count, weight}, DeadlineIn(timeout_s), CheckSignals);
            return std::make_shared<Lease>(std::move(reader), std::move(delivery));
          },
          py::arg("count"), py::arg("weight"), py::arg("timeout_s"))
      .def(
          "try_get",
          [](std::shared_ptr<GroupReader> reader, uint32_t count,
             uint64_t weight) -> std::shared_ptr<Lease> {
            py::gil_scoped_release no_gil;
            auto delivery = reader->TryGet({count, weight});
            if (!delivery) return nullptr;
            return std::make_shared<Lease>(std::move(reader), std::move(*delivery));
          },
          py::arg("count"), py::arg("weight"))
      .def("ack", &GroupReader::Ack, py::arg("begin"), py::arg("end"),
           py::call_guard<py::gil_scoped_release>())
      .def("length", &GroupReader::Length, py::call_guard<py::gil_scoped_release>())
      .def("leave", &GroupReader::Leave, py::call_guard<py::gil_scoped_release>());
}

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

void RegisterSession(py::module_& module) {
  py::class_<Session, std::shared_ptr<Session>>(module, "Session")
      .def_static("attach", &Session::Attach, py::arg("directory"), py::arg("role"),
                  py::arg("name"), py::call_guard<py::gil_scoped_release>())
      .def("stats",
           [](Session& session) {
             ring::Stats stats;
             {
               py::gil_scoped_release no_gil;
               stats = ring::ReadStats(session);
             }
             return ToDict(stats);
           })
      .def(
          "check",
          [](Session& session) {
            Session::Locked locked(session);
            return session.table().Check();
          },
          py::call_guard<py::gil_scoped_release>())
      .def("rebuild", &ring::ForceRebuild, py::call_guard<py::gil_scoped_release>())
      .def("close", &ring::Close, py::call_guard<py::gil_scoped_release>())
      .def("set_min_version", &ring::SetMinVersion, py::arg("version"),
           py::call_guard<py::gil_scoped_release>())
      .def("evict", &ring::Evict, py::arg("version"), py::call_guard<py::gil_scoped_release>())
      .def("remove_group", &ring::RemoveGroup, py::arg("name"),
           py::call_guard<py::gil_scoped_release>())
      .def("open_wake_fifo", &Session::OpenWakeFifo)
      .def(
          "detach",
          [](Session& session) {
            ring::CheckNoLeases(session);
            session.Detach();
          },
          py::call_guard<py::gil_scoped_release>())
      .def("set_lock_timeout",
           [](Session& session, double seconds) {
             session.set_lock_timeout(static_cast<int64_t>(seconds * 1e9));
           })
      .def_property_readonly("index", &Session::self);
  py::enum_<ring::Role>(module, "Role")
      .value("PRODUCER", ring::Role::kProducer)
      .value("READER", ring::Role::kReader)
      .value("OBSERVER", ring::Role::kObserver);
}

void RegisterFiles(py::module_& module) {
  module.def(
      "create",
      [](const std::string& directory, uint64_t arena_bytes, uint32_t num_slots,
         uint64_t max_record_bytes, uint32_t num_participants, uint32_t num_groups,
         uint32_t num_producers, uint64_t key_window) {
        ring::Options options;
        options.arena_bytes = arena_bytes;
        options.num_slots = num_slots;
        options.max_record_bytes = max_record_bytes;
        options.num_participants = num_participants;
        options.num_groups = num_groups;
        options.num_producers = num_producers;
        options.key_window = key_window;
        py::gil_scoped_release no_gil;
        ring::Region::Create(directory, options);
      },
      py::arg("directory"), py::kw_only(), py::arg("arena_bytes"), py::arg("num_slots"),
      py::arg("max_record_bytes"), py::arg("num_participants"), py::arg("num_groups"),
      py::arg("num_producers"), py::arg("key_window"));
  module.def("unlink", &ring::Region::Unlink, py::arg("directory"));
  module.def("repair_header", &ring::Region::RepairHeader, py::arg("directory"));
  module.def("inspect", &InspectRing, py::arg("directory"));
}

}  // namespace bind

void register_ring(py::module_& module) {
  py::module_ ring = module.def_submodule("ring", "The shared-memory ring of samples.");
  py::register_local_exception_translator(bind::Translate);
  bind::RegisterSession(ring);
  bind::RegisterRecords(ring);
  bind::RegisterReading(ring);
  bind::RegisterFiles(ring);
}

}  // namespace asyncrl
