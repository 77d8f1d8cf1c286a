// Records on their way into the ring.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bind/record_codec.h"
#include "bind/ring_waits.h"
#include "ring/put.h"

namespace asyncrl::bind {

// What is to be written, and where. Not tied to one attempt, so that an
// asynchronous put may try, wait and try again.
class Outgoing {
 public:
  Outgoing(std::shared_ptr<ring::Session> session, const RecordFormat& format,
           ring::WhenFull when_full, bool with_checksum)
      : session_(std::move(session)),
        writer_(*session_),
        format_(format),
        when_full_(when_full),
        with_checksum_(with_checksum),
        serial_(session_->NextSerial()) {}

  void Reserve(size_t count) {
    records_.reserve(count);
    requests_.reserve(count);
  }

  void Add(const pybind11::tuple& values, int64_t min_version, int64_t max_version,
           std::optional<std::tuple<uint64_t, uint64_t, uint64_t>> key) {
    records_.emplace_back(format_, values);
    ring::PutRequest request{};
    request.length = records_.back().length();
    request.weight = records_.back().weight();
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
  std::span<ring::PutRequest> Rest() { return std::span(requests_).subspan(num_done_); }

  void Publish(size_t count) {
    const auto claimed = Rest().first(count);
    for (size_t i = 0; i < count; ++i) {
      if (claimed[i].slot != ring::kNil) records_[num_done_ + i].Write(writer_.Payload(claimed[i]));
    }
    writer_.Commit(claimed, with_checksum_);
    num_done_ += count;
    for (const ring::PutRequest& request : claimed) num_published_ += !request.duplicate;
  }

  std::shared_ptr<ring::Session> session_;
  ring::Writer writer_;
  const RecordFormat& format_;
  ring::WhenFull when_full_;
  bool with_checksum_;
  uint32_t serial_;
  std::vector<EncodedRecord> records_;
  std::vector<ring::PutRequest> requests_;
  size_t num_done_ = 0, num_published_ = 0;
};

// Puts whole lists in one call: what a synchronous put needs of Python is done once per list.
class Producer {
 public:
  Producer(std::shared_ptr<ring::Session> session, const RecordFormat& format,
           ring::WhenFull when_full, bool with_checksum)
      : session_(std::move(session)),
        format_(format),
        when_full_(when_full),
        with_checksum_(with_checksum) {}

  // `records` are the arguments of Outgoing::Add. Returns how many were new. With the GIL, which it
  // gives up while it publishes; any thread.
  size_t Put(const pybind11::list& records, double timeout_s) {
    Outgoing outgoing(session_, format_, when_full_, with_checksum_);
    outgoing.Reserve(records.size());
    for (const pybind11::handle record : records) {
      const auto fields = pybind11::reinterpret_borrow<pybind11::tuple>(record);
      outgoing.Add(pybind11::reinterpret_borrow<pybind11::tuple>(fields[0]),
                   fields[1].cast<int64_t>(), fields[2].cast<int64_t>(),
                   fields[3].cast<std::optional<std::tuple<uint64_t, uint64_t, uint64_t>>>());
    }
    return Publish(outgoing, timeout_s);
  }

  // The same for records of one version and without keys: `records` are their values.
  size_t PutAs(const pybind11::list& records, int64_t version, double timeout_s) {
    Outgoing outgoing(session_, format_, when_full_, with_checksum_);
    outgoing.Reserve(records.size());
    for (const pybind11::handle values : records) {
      outgoing.Add(pybind11::reinterpret_borrow<pybind11::tuple>(values), version, version,
                   std::nullopt);
    }
    return Publish(outgoing, timeout_s);
  }

 private:
  static size_t Publish(Outgoing& outgoing, double timeout_s) {
    const pybind11::gil_scoped_release no_gil;
    outgoing.Put(timeout_s);
    return outgoing.num_published();
  }

  std::shared_ptr<ring::Session> session_;
  const RecordFormat& format_;
  ring::WhenFull when_full_;
  bool with_checksum_;
};

}  // namespace asyncrl::bind
