// The ring in Python: handles, groups, batches. asyncrl/ring is the face that users see.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/lease.h"
#include "bind/outgoing.h"
#include "bind/record_codec.h"
#include "bind/ring_inspect.h"
#include "bind/ring_waits.h"
#include "common/crc32c.h"
#include "ring/admin.h"
#include "ring/errors.h"
#include "ring/put.h"
#include "ring/stats.h"

namespace asyncrl {

namespace py = pybind11;

namespace bind {

using ring::GroupReader;
using ring::Session;

void RegisterRecords(py::module_& module) {
  py::class_<RecordFormat>(module, "RecordFormat")
      .def(py::init<const std::vector<std::tuple<std::string, std::string, int>>&,
                    const std::string&>(),
           py::arg("fields"), py::arg("weight") = "");
  py::enum_<ring::WhenFull>(module, "WhenFull")
      .value("BLOCK", ring::WhenFull::kBlock)
      .value("FAIL", ring::WhenFull::kFail)
      .value("DROP_OLDEST", ring::WhenFull::kDropOldest);
  py::class_<Producer>(module, "Producer")
      .def(py::init<std::shared_ptr<Session>, const RecordFormat&, ring::WhenFull, bool>(),
           py::arg("session"), py::arg("format"), py::arg("when_full"), py::arg("with_checksum"),
           py::keep_alive<1, 3>())
      .def("put", &Producer::Put, py::arg("records"), py::arg("timeout_s"))
      .def("put_as", &Producer::PutAs, py::arg("records"), py::arg("version"),
           py::arg("timeout_s"));
  py::class_<Outgoing>(module, "Outgoing")
      .def(py::init<std::shared_ptr<Session>, const RecordFormat&, ring::WhenFull, bool>(),
           py::arg("session"), py::arg("format"), py::arg("when_full"), py::arg("with_checksum"),
           py::keep_alive<1, 3>())
      .def("add", &Outgoing::Add, py::arg("values"), py::arg("min_version"), py::arg("max_version"),
           py::arg("key").none(true))
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
      .def("views", &Lease::Views, py::arg("index"))
      .def("values", &Lease::Values, py::arg("index"))
      .def("all_values", &Lease::AllValues, py::arg("names"))
      .def("scalar", &Lease::Scalar, py::arg("index"), py::arg("name"))
      .def("min_version", [](const Lease& lease, size_t i) { return lease.slot(i).min_version; })
      .def("max_version", [](const Lease& lease, size_t i) { return lease.slot(i).max_version; })
      .def("seq", [](const Lease& lease, size_t i) { return lease.slot(i).seq; })
      .def("verify", &Lease::Verify, py::arg("index"), py::call_guard<py::gil_scoped_release>())
      .def("ack", &Lease::Ack, py::call_guard<py::gil_scoped_release>())
      .def("release", &Lease::Release, py::call_guard<py::gil_scoped_release>())
      .def("finish", &Lease::Finish, py::call_guard<py::gil_scoped_release>())
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
  module.def(
      "crc32c",
      [](const py::bytes& data) {
        const std::string_view bytes = data;
        return Crc32c(bytes.data(), bytes.size());
      },
      py::arg("data"));
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
