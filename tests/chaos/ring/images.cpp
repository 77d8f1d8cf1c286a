// Crash images. One operation is executed instruction by instruction; every distinct content of the
// shared memory on the way is what a SIGKILL at that instruction leaves behind. From each one the
// ring is recovered, both by a process that takes the dead one's place and by one that steals its
// lock, and checked:
//   acknowledged => never delivered again; put returned => delivered; the same order on both ranks;
//   no leaked slot or byte; a retried put is published exactly once.
//
// usage: ring_images [STRIDE]     check every STRIDE-th image by stealing (20 ms each); default 1
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <functional>

#include "ring/admin.h"
#include "ring/errors.h"
#include "scenario.h"

namespace asyncrl::ring::testing {
namespace {

using Values = std::vector<uint64_t>;

// The two ranks of the group, and a producer, all in one process.
struct Actors {
  std::shared_ptr<Session> session;
  std::unique_ptr<GroupReader> rank0, rank1;
};

struct Case {
  const char* name;
  // Runs before the stepped operation in the dying process, which holds ranks 0 and 1.
  std::function<void(Actors&)> prepare;
  // The stepped operation.
  std::function<void(Actors&)> operation;
  // What each rank must still get after any crash, and what it may get besides, in order of
  // publication.
  Values must0, must1, may;
  // Whether the operation is PutValue(1, 77): then a retry must leave it published exactly once.
  bool retries = false;
  // Whether the operation removes the group "old", which is then removed again.
  bool removes_group = false;
  // Records that each rank gets all of or none of.
  Values together = {};
  // Not 0: the next batch of so many records has so many.
  uint32_t batch = 0;
};

Case Together(Case c, Values values) {
  c.together = std::move(values);
  return c;
}

Case Whole(Case c, uint32_t batch) {
  c.batch = batch;
  return c;
}

Actors JoinGroup(std::shared_ptr<Session> session) {
  Actors actors;
  actors.session = std::move(session);
  actors.rank0 = std::make_unique<GroupReader>(actors.session, "dp0", 0, 2, 0);
  actors.rank1 = std::make_unique<GroupReader>(actors.session, "dp0", 1, 2, 0);
  return actors;
}

// The shared bytes as they are now.
std::string Capture(Region& region) {
  return std::string(reinterpret_cast<const char*>(&region.header()),
                     region.geometry().total_bytes);
}

// Steps the operation and returns every distinct image, the first before it and the last after it.
std::vector<std::string> Step(const std::string& directory, const Case& c, uint64_t& num_steps) {
  auto region = Region::Open(directory, false);
  const pid_t child = fork();
  if (child == 0) {
    Actors actors = JoinGroup(Session::Attach(directory, Role::kProducer, "dying"));
    c.prepare(actors);
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    c.operation(actors);
    raise(SIGKILL);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child && WIFSTOPPED(status),
          "%s: the child failed to prepare", c.name);
  std::vector<std::string> images{Capture(*region)};
  for (;;) {
    REQUIRE(ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) == 0, "single step");
    waitpid(child, &status, 0);
    if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) break;
    ++num_steps;
    if (std::memcmp(images.back().data(), &region->header(), images.back().size()) != 0) {
      images.push_back(Capture(*region));
    }
  }
  if (WIFSTOPPED(status)) {
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
  }
  REQUIRE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "%s: the operation failed", c.name);
  return images;
}

void Restore(Region& region, const std::string& image) {
  std::memcpy(static_cast<void*>(&region.header()), image.data(), image.size());
}

// `got` must be `must` with elements of `may` inserted anywhere.
bool IsMerge(const Values& got, const Values& must, const Values& may) {
  size_t next = 0;
  for (uint64_t value : got) {
    if (next < must.size() && value == must[next]) {
      ++next;
    } else if (std::find(may.begin(), may.end(), value) == may.end()) {
      return false;
    }
  }
  return next == must.size();
}

// Nothing of it is used any more, and a record as large as the arena fits.
std::string CheckEmpty(Session& session) {
  {
    Session::Locked locked(session);
    const std::string problem = session.table().Check();
    if (!problem.empty()) return problem;
    const Control& control = session.control();
    if (control.num_free != session.geometry().num_slots) {
      return "leaked " + std::to_string(session.geometry().num_slots - control.num_free) + " slots";
    }
    if (control.bytes_used != 0) return "leaked " + std::to_string(control.bytes_used) + " bytes";
  }
  const uint64_t whole = session.geometry().arena_bytes;
  if (!PutValue(session, 0, 5, whole, WhenFull::kFail, INT64_MAX))
    return "the last record was not new";
  return "";
}

Delivery Take(GroupReader& reader, uint32_t count) { return *reader.TryGet({count, 0}); }

// Empty, or what is wrong after recovery from the memory as it is.
std::string CheckRecovery(std::shared_ptr<Session> session, const Case& c) {
  {
    Session::Locked locked(*session);
    session->Sweep(locked);
    const std::string problem = session->table().Check();
    if (!problem.empty()) return problem;
  }
  if (c.removes_group) {
    try {
      RemoveGroup(*session, "old");
    } catch (const RingError& error) {
      REQUIRE(error.kind() == ErrorKind::kNotAMember, "%s", error.what());  // it was removed
    }
  }
  const bool closed = Peek(session->control().closed) != 0;
  Values may = c.may;
  if (c.retries && !closed) PutValue(*session, 1, 77, 100);
  Actors actors = JoinGroup(session);
  if (c.batch > 0) {
    const Delivery next = Take(*actors.rank0, c.batch);
    if (next.slots.size() != c.batch) return "a batch of " + std::to_string(next.slots.size());
    actors.rank0->Release(next.slots);
  }
  auto drain = [&](GroupReader& reader) {
    if (!closed) return Drain(reader);
    Values values;
    try {
      values = Drain(reader);
    } catch (const RingError& error) {
      REQUIRE(error.kind() == ErrorKind::kClosed, "%s", error.what());
    }
    return values;
  };
  const Values got0 = drain(*actors.rank0), got1 = drain(*actors.rank1);
  for (const Values& got : {got0, got1}) {
    const auto counted = std::count_if(c.together.begin(), c.together.end(), [&](uint64_t value) {
      return std::find(got.begin(), got.end(), value) != got.end();
    });
    if (counted != 0 && counted != static_cast<long>(c.together.size())) {
      return "half of an acknowledgement: " + Join(got);
    }
  }
  const std::string both = Join(got0) + " and " + Join(got1);
  if (!closed && !IsMerge(got0, c.must0, may))
    return "rank 0 should get " + Join(c.must0) + ": " + both;
  if (!closed && !IsMerge(got1, c.must1, may))
    return "rank 1 should get " + Join(c.must1) + ": " + both;
  if (c.retries && std::count(got1.begin(), got1.end(), 77) != 1)
    return "77 not exactly once: " + both;
  if (closed) return "";
  const std::string problem = CheckEmpty(*session);
  if (!problem.empty()) return problem;
  return Drain(*actors.rank0) == Values{5} && Drain(*actors.rank1) == Values{5}
             ? ""
             : "the last record is lost";
}

int RunCase(const Case& c, uint64_t stride, uint64_t& num_images) {
  TemporaryRing ring(SmallRing{});
  // The witness takes index 0, so that the dying process is index 1 and a newcomer takes its place.
  auto witness = Session::Attach(ring.directory(), Role::kProducer, "witness");
  uint64_t num_steps = 0;
  const std::vector<std::string> images = Step(ring.directory(), c, num_steps);
  int failures = 0;
  auto report = [&](size_t index, const char* how, const std::string& problem) {
    if (problem.empty()) return;
    if (++failures <= 3)
      std::printf("  FAILED %s, image %zu, %s: %s\n", c.name, index, how, problem.c_str());
  };
  for (size_t index = 0; index < images.size(); ++index) {
    Restore(witness->region(), images[index]);
    {
      auto heir = Session::Attach(ring.directory(), Role::kProducer, "heir");
      REQUIRE(heir->self() == 1, "the heir has index %u", heir->self());
      report(index, "by the heir", CheckRecovery(heir, c));
    }
    if (index % stride != 0) continue;
    Restore(witness->region(), images[index]);
    report(index, "by a thief", CheckRecovery(witness, c));
    Restore(witness->region(), images[0]);
    Session::Locked locked(*witness);
    witness->Reclaim(witness->self(), locked);
  }
  std::printf("%-44s %6lu instructions %4zu images %d failures\n", c.name, num_steps, images.size(),
              failures);
  std::fflush(stdout);
  num_images += images.size();
  return failures;
}

// ---- The operations
// --------------------------------------------------------------------------------

void Put3(Actors& a) {
  for (uint64_t value : {1, 2, 3}) PutValue(*a.session, 1, value, 100);
}

void Put77(Actors& a) { PutValue(*a.session, 1, 77, 100); }

void PutBatch(Actors& a) {
  Writer writer(*a.session);
  std::vector<PutRequest> requests(2);
  for (uint64_t i = 0; i < 2; ++i) {
    requests[i].length = 100;
    requests[i].weight = 1;
    requests[i].key = Key{{1, 0}, 80 + i};
  }
  writer.Claim(requests, WhenFull::kBlock, 0, NoInterrupt);
  for (uint64_t i = 0; i < 2; ++i) FillRecord(writer.Payload(requests[i]), 80 + i, 100);
  writer.Commit(requests, false);
}

// Delivered to both ranks; rank 0 has acknowledged and released 1 and 2.
void AckedByRank0(Actors& a) {
  Put3(a);
  const Delivery taken = Take(*a.rank0, 2);
  Take(*a.rank1, 2);
  a.rank0->Ack(taken.begin, taken.end);
  a.rank0->Release(taken.slots);
}

// The lock is left in the hands of a participant that is dead.
void LockOfTheDead(Actors& a) {
  a.session->region().header().lock.store(7 | kLockWaiters);
  a.session->region().slots()[0].pending.store(3);
}

std::vector<Case> PutCases() {
  auto nothing = [](Actors&) {};
  auto hole = [](Actors& a) {
    Put3(a);
    for (GroupReader* reader : {a.rank0.get(), a.rank1.get()}) {
      const Delivery first = Take(*reader, 1);
      reader->Ack(first.begin, first.end);
      reader->Release(first.slots);
    }
  };
  auto full = [](Actors& a) {
    for (uint64_t value : {1, 2, 3, 4}) PutValue(*a.session, 1, value, 1024);
  };
  return {
      {"put into an empty ring", nothing, Put77, {}, {}, {77}, true},
      {"put after three", Put3, Put77, {1, 2, 3}, {1, 2, 3}, {77}, true},
      {"put where a record was freed", hole, Put77, {2, 3}, {2, 3}, {77}, true},
      {"put of two at once", Put3, PutBatch, {1, 2, 3}, {1, 2, 3}, {80, 81}},
      {"put of a duplicate",
       [](Actors& a) {
         Put3(a);
         Put77(a);
       },
       Put77,
       {1, 2, 3},
       {1, 2, 3},
       {77},
       true},
      {"put that drops the oldest",
       full,
       [](Actors& a) { PutValue(*a.session, 1, 9, 2000, WhenFull::kDropOldest); },
       {3, 4},
       {3, 4},
       {1, 2, 9}},
      {"put by a new producer",
       Put3,
       [](Actors& a) { PutValue(*a.session, 2, 9, 64); },
       {1, 2, 3},
       {1, 2, 3},
       {9}},
  };
}

std::vector<Case> ReadCases() {
  auto taken_by_0 = [](Actors& a) {
    Put3(a);
    Take(*a.rank0, 2);
  };
  auto taken_by_both = [](Actors& a) {
    Put3(a);
    Take(*a.rank0, 2);
    Take(*a.rank1, 2);
  };
  return {
      Whole({"get of a batch by the first rank",
             Put3,
             [](Actors& a) { Take(*a.rank0, 2); },
             {1, 2, 3},
             {1, 2, 3},
             {}},
            2),
      {"get of a batch by the second rank",
       taken_by_0,
       [](Actors& a) { Take(*a.rank1, 2); },
       {1, 2, 3},
       {1, 2, 3},
       {}},
      {"get by tokens", Put3, [](Actors& a) { a.rank0->TryGet({0, 2}); }, {1, 2, 3}, {1, 2, 3}, {}},
      Together({"ack of a batch by the first rank",
                taken_by_both,
                [](Actors& a) { a.rank0->Ack(0, 2); },
                {3},
                {1, 2, 3},
                {1, 2}},
               {1, 2}),
      Together({"ack of a batch by the last rank",
                AckedByRank0,
                [](Actors& a) { a.rank1->Ack(0, 2); },
                {3},
                {3},
                {1, 2}},
               {1, 2}),
      {"release after the last ack",
       [](Actors& a) {
         AckedByRank0(a);
         a.rank1->Ack(0, 2);
       },
       [](Actors& a) { a.rank1->Release({0, 1}); },
       {3},
       {3},
       {}},
      {"release without an ack",
       taken_by_both,
       [](Actors& a) { a.rank0->Release({0, 1}); },
       {1, 2, 3},
       {1, 2, 3},
       {}},
      Together({"ack through a position",
                [](Actors& a) {
                  Put3(a);
                  Take(*a.rank0, 1);
                  Take(*a.rank0, 2);
                },
                [](Actors& a) { a.rank0->Ack(0, 3); },
                {},
                {1, 2, 3},
                {1, 2, 3}},
               {1, 2, 3}),
  };
}

std::vector<Case> AdminCases() {
  auto versions = [](Actors& a) {
    for (uint64_t value : {1, 2, 3, 4})
      PutValue(*a.session, 1, value, 100, WhenFull::kBlock, value % 2);
  };
  auto attach = [](Actors& a) {
    Session::Attach(a.session->region().directory(), Role::kReader, "third");
  };
  auto other_group = [](Actors& a) {
    GroupReader other(a.session, "old", 0, 1, 0);
    Put3(a);
    Take(other, 2);
    other.Release({0, 1});
    other.Leave();
  };
  return {
      {"evict", versions, [](Actors& a) { Evict(*a.session, 1); }, {1, 3}, {1, 3}, {2, 4}},
      {"skip of stale records by get",
       [=](Actors& a) {
         versions(a);
         SetMinVersion(*a.session, 1);
       },
       [](Actors& a) { a.rank0->TryGet({1, 0}); },
       {1, 3},
       {1, 3},
       {2, 4}},
      {"attach and detach of a third", Put3, attach, {1, 2, 3}, {1, 2, 3}, {}},
      {"detach with a claim and leases",
       [](Actors& a) {
         Put3(a);
         Take(*a.rank0, 2);
       },
       [](Actors& a) { a.session->Detach(); },
       {1, 2, 3},
       {1, 2, 3},
       {}},
      {"rebuild", AckedByRank0, [](Actors& a) { ForceRebuild(*a.session); }, {3}, {1, 2, 3}, {}},
      {"steal and rebuild",
       [](Actors& a) {
         AckedByRank0(a);
         LockOfTheDead(a);
       },
       [](Actors& a) { Session::Locked locked(*a.session); },
       {3},
       {1, 2, 3},
       {1, 2}},
      {"join of a new group",
       Put3,
       [](Actors& a) { GroupReader(a.session, "new", 0, 1, 0); },
       {1, 2, 3},
       {1, 2, 3},
       {}},
      {"removal of a group",
       other_group,
       [](Actors& a) { RemoveGroup(*a.session, "old"); },
       {1, 2, 3},
       {1, 2, 3},
       {},
       false,
       true},
      {"close", Put3, [](Actors& a) { Close(*a.session); }, {1, 2, 3}, {1, 2, 3}, {}},
  };
}

}  // namespace

int Main(int argc, char** argv) {
  const uint64_t stride = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  uint64_t num_images = 0;
  int failures = 0;
  for (const auto& cases : {PutCases(), ReadCases(), AdminCases()}) {
    for (const Case& c : cases) failures += RunCase(c, stride, num_images);
  }
  std::printf("crash images: %lu, failures: %d\n", num_images, failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace asyncrl::ring::testing

int main(int argc, char** argv) { return asyncrl::ring::testing::Main(argc, argv); }
