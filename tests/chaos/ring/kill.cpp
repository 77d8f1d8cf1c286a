// Kill test. Producers and a group of readers work on one small ring without end; every process is
// armed to be killed at a labelled point of the ring (SIGKILL, at the n-th time that it gets there)
// and is started again when it died. Several may be dead or dying at a time, also inside the
// recovery from each other.
//
// What must hold, however they die:
//   * each rank gets every record of a producer exactly once, in order and untorn, up to redelivery
//     of the one batch that it had not acknowledged;
//   * both ranks get the same batches at the same positions;
//   * nobody stands still: a look at the statistics takes at most one probe interval of the lock,
//   and
//     one for every owner that died with it meanwhile. One look in a thousand may be late, because
//     other processes have the cores;
//   * at the end no slot and no byte has leaked.
//
// usage: ring_kill KILLS SEED POINT...
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <map>
#include <random>

#include "crash_point.h"
#include "ring/admin.h"
#include "ring/errors.h"
#include "ring/stats.h"
#include "scenario.h"

namespace asyncrl::ring::testing {
namespace {

constexpr uint32_t kProducers = 2, kRanks = 2, kBatch = 3;
constexpr uint64_t kRemembered = 1 << 16;  // positions whose value is kept for the other rank
constexpr int64_t kPatience = 25 * kMillisecond;  // with a process that does not reach its point
constexpr int64_t kStandstill = 30'000 * kMillisecond;
constexpr int64_t kScheduling = 10 * kMillisecond;  // until a process that may run does

// A rank's progress up to the end of a batch.
struct Progress {
  uint64_t end;               // position
  uint64_t next[kProducers];  // the record that must come next from each producer
};

// What survives the processes. Each word has one writer.
struct Journal {
  std::atomic<uint64_t> put_returned[kProducers];  // records 0 .. n-1 of the producer
  Progress progress[kRanks][2];                    // before and after the batch in hand
  std::atomic<uint32_t> current[kRanks];           // which of the two is certain
  std::atomic<uint64_t> values[kRemembered];       // value + 1 at each position
  std::atomic<uint32_t> batch_sizes[kRemembered];  // at the batch's first position
  std::atomic<uint32_t> stop;
  std::atomic<uint64_t> redelivered;
  std::atomic<uint64_t> looks, late_looks, slowest_look_ns;
};

uint64_t ValueOf(uint32_t producer, uint64_t index) { return index * kProducers + producer; }

uint64_t LengthOf(uint64_t value) { return 64 + (value * 7919) % 900 / 8 * 8; }

void Produce(const std::string& directory, Journal& journal, uint32_t producer) {
  auto session = Session::Attach(directory, Role::kProducer, "producer" + std::to_string(producer));
  while (Peek(journal.stop) == 0) {
    const uint64_t index = Peek(journal.put_returned[producer]);
    const uint64_t value = ValueOf(producer, index);
    PutValue(*session, producer + 1, value, LengthOf(value));
    journal.put_returned[producer].store(index + 1);
  }
}

// Both ranks must see the same value at a position; the first one writes it down.
void CompareValue(Journal& journal, uint64_t position, uint64_t value) {
  std::atomic<uint64_t>& word = journal.values[position % kRemembered];
  const uint64_t mark = (position / kRemembered) << 48 | (value + 1);
  uint64_t expected = word.load();
  while (expected >> 48 < position / kRemembered || expected == 0) {
    if (word.compare_exchange_weak(expected, mark)) return;
  }
  REQUIRE(expected == mark, "position %lu: one rank read %lu, another %lu", position, expected,
          mark);
}

void CompareBatch(Journal& journal, uint64_t begin, uint32_t size) {
  std::atomic<uint32_t>& word = journal.batch_sizes[begin % kRemembered];
  const uint32_t mark = static_cast<uint32_t>(begin / kRemembered) << 8 | size;
  uint32_t expected = word.load();
  while (expected >> 8 < begin / kRemembered || expected == 0) {
    if (word.compare_exchange_weak(expected, mark)) return;
  }
  REQUIRE(expected == mark, "the batch at %lu has %u records for one rank, %u for another", begin,
          expected & 255, size);
}

// Checks a batch against what this rank has certainly, or perhaps, acknowledged. Returns the
// progress after it.
Progress CheckBatch(Journal& journal, uint32_t rank, const Delivery& delivery,
                    const std::vector<uint64_t>& values) {
  uint32_t current = journal.current[rank].load();
  const Progress& after = journal.progress[rank][1 - current];
  if (after.end > journal.progress[rank][current].end && delivery.begin == after.end) {
    journal.current[rank].store(current =
                                    1 - current);  // killed after the acknowledgement had happened
  }
  Progress progress = journal.progress[rank][current];
  if (after.end == delivery.end && after.end > progress.end) ++journal.redelivered;
  REQUIRE(delivery.begin == progress.end, "rank %u acknowledged up to %lu and was given [%lu, %lu)",
          rank, progress.end, delivery.begin, delivery.end);
  CompareBatch(journal, delivery.begin, static_cast<uint32_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i) {
    CompareValue(journal, delivery.begin + i, values[i]);
    uint64_t& next = progress.next[values[i] % kProducers];
    REQUIRE(values[i] / kProducers == next, "rank %u: producer %lu's record %lu came, %lu was next",
            rank, values[i] % kProducers, values[i] / kProducers, next);
    ++next;
  }
  progress.end = delivery.end;
  return progress;
}

void Read(const std::string& directory, Journal& journal, uint32_t rank) {
  auto session = Session::Attach(directory, Role::kReader, "rank" + std::to_string(rank));
  GroupReader reader(session, "dp0", rank, kRanks, 0);
  for (;;) {
    Delivery delivery;
    try {
      delivery = reader.Get({kBatch, 0}, NowNs() + kStandstill, NoInterrupt);
    } catch (const RingError& error) {
      REQUIRE(error.kind() == ErrorKind::kClosed, "rank %u: %s", rank, error.what());
      return;
    }
    const Progress after = CheckBatch(journal, rank, delivery, ValuesOf(reader, delivery));
    const uint32_t other = 1 - journal.current[rank].load();
    journal.progress[rank][other] = after;
    reader.Ack(delivery.begin, delivery.end);
    journal.current[rank].store(other);
    reader.Release(delivery.slots);
  }
}

void Watch(const std::string& directory, Journal& journal) {
  auto session = Session::Attach(directory, Role::kObserver, "observer");
  while (Peek(journal.stop) == 0) {
    ReadStats(*session);
    usleep(2000);
  }
}

// Looks at the ring all the time: a dead or dying lock owner must not keep it waiting. It waits one
// probe interval for itself, and one for every lock that somebody else took from a dead owner.
void Witness(const std::string& directory, Journal& journal) {
  auto session = Session::Attach(directory, Role::kObserver, "witness");
  uint64_t num_recoveries = ReadStats(*session).num_recoveries;
  while (Peek(journal.stop) == 0) {
    const int64_t begin = NowNs();
    const uint64_t recoveries_now = ReadStats(*session).num_recoveries;
    const int64_t took = NowNs() - begin;
    const auto num_waits = static_cast<int64_t>(1 + recoveries_now - num_recoveries);
    num_recoveries = recoveries_now;
    ++journal.looks;
    if (took > num_waits * kProbeInterval + kScheduling) ++journal.late_looks;
    if (static_cast<uint64_t>(took) > Peek(journal.slowest_look_ns))
      journal.slowest_look_ns.store(static_cast<uint64_t>(took));
    usleep(2000);
  }
}

// One started process and the point that it was armed with.
struct Worker {
  pid_t pid;  // 0: dead, and to be started again at `restart_ns`
  std::string point;
  int64_t restart_ns;
  int64_t start_ns;
};

class Arena {
 public:
  Arena(uint64_t num_kills, uint64_t seed, std::vector<std::string> points)
      : ring_({.num_slots = 16, .arena_bytes = 8192, .max_record_bytes = 2048}),
        num_kills_(num_kills),
        random_(seed),
        points_(std::move(points)) {
    void* memory =
        mmap(nullptr, sizeof(Journal), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    journal_ = new (memory) Journal{};
    // Registers the group before the first record, so that neither rank can be late for it.
    auto session = Session::Attach(ring_.directory(), Role::kReader, "setup");
    GroupReader(session, "dp0", 0, kRanks, 0);
  }

  int Run() {
    const pid_t witness = StartWitness();
    for (uint32_t who = 0; who < kProducers + kRanks + 1; ++who) workers_.push_back(Start(who));
    int64_t last_progress = NowNs();
    uint64_t last_end = 0;
    while (total_ < num_kills_) {
      Reap();
      const uint64_t end = journal_->progress[0][journal_->current[0].load()].end;
      if (end != last_end) last_progress = NowNs();
      last_end = end;
      REQUIRE(NowNs() - last_progress < kStandstill, "no batch in 30 s");
      usleep(200);
    }
    kill(witness, SIGKILL);
    waitpid(witness, nullptr, 0);
    Finish();
    return Report();
  }

 private:
  // Looks at the ring for as long as it lasts: the others do not live long enough to wait for long.
  pid_t StartWitness() {
    const pid_t pid = fork();
    if (pid != 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    Witness(ring_.directory(), *journal_);
    std::_Exit(0);
  }

  Worker Start(uint32_t who) {
    Worker worker{0, "", 0, NowNs()};
    const bool armed = random_() % 8 != 0;
    if (armed) worker.point = Draw(who);
    const int count = random_() % 2 == 0 ? 1 : 1 + static_cast<int>(random_() % 12);
    worker.pid = fork();
    if (worker.pid != 0) return worker;
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // nobody outlives the test
    if (armed) ArmCrashPoint(worker.point.c_str(), count, SIGKILL);
    const std::string& directory = ring_.directory();
    if (who < kProducers) {
      Produce(directory, *journal_, who);
    } else if (who < kProducers + kRanks) {
      Read(directory, *journal_, who - kProducers);
    } else {
      Watch(directory, *journal_);
    }
    std::_Exit(0);
  }

  // A point for worker `who`: mostly one that its role is known to reach, and of those one that
  // killed few.
  std::string Draw(uint32_t who) {
    const std::vector<std::string>& known = reached_[who];
    const std::vector<std::string>& choice = known.empty() || random_() % 8 == 0 ? points_ : known;
    std::string least;
    for (int draw = 0; draw < 3; ++draw) {
      const std::string& candidate = choice[random_() % choice.size()];
      if (least.empty() || kills_[candidate] < kills_[least]) least = candidate;
    }
    return least;
  }

  void Reap() {
    int status = 0;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
      const auto found = std::find_if(workers_.begin(), workers_.end(),
                                      [pid](const Worker& w) { return w.pid == pid; });
      REQUIRE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "a process ended by itself");
      if (found->point.empty()) {
        ++anywhere_;
      } else {
        std::vector<std::string>& known = reached_[static_cast<size_t>(found - workers_.begin())];
        if (std::find(known.begin(), known.end(), found->point) == known.end())
          known.push_back(found->point);
        ++kills_[found->point];
        ++total_;
      }
      // At once, so that the heir finds the lock in its name; or later, so that the others have to
      // steal it; or much later, so that it shows if they do not.
      const uint64_t draw = random_() % 16;
      const int64_t delay = draw < 8 ? 0 : draw < 15 ? 2 * kProbeInterval : 10 * kProbeInterval;
      *found = Worker{0, "", NowNs() + delay, 0};
    }
    for (Worker& worker : workers_) {
      if (worker.pid != 0 || NowNs() < worker.restart_ns) continue;
      worker = Start(static_cast<uint32_t>(&worker - workers_.data()));
    }
    // Most points are reached by some roles only; the others are ended anywhere, so that they draw
    // again.
    for (Worker& worker : workers_) {
      if (worker.pid == 0 || NowNs() - worker.start_ns < kPatience) continue;
      worker.point.clear();
      kill(worker.pid, SIGKILL);
    }
  }

  // Ends everybody anywhere, then lets unarmed processes finish the work and checks what is left.
  void Finish() {
    for (const Worker& worker : workers_) {
      if (worker.pid == 0) continue;
      kill(worker.pid, SIGKILL);
      waitpid(worker.pid, nullptr, 0);
    }
    journal_->stop.store(1);
    auto session = Session::Attach(ring_.directory(), Role::kObserver, "end");
    Close(*session);
    for (uint32_t rank = 0; rank < kRanks; ++rank) Read(ring_.directory(), *journal_, rank);
    Session::Locked locked(*session);
    session->Sweep(locked);
    const std::string problem = session->table().Check();
    REQUIRE(problem.empty(), "%s", problem.c_str());
    REQUIRE(session->control().num_free == session->geometry().num_slots, "%u slots leaked",
            session->geometry().num_slots - session->control().num_free);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const Progress& progress = journal_->progress[rank][journal_->current[rank].load()];
      for (uint32_t producer = 0; producer < kProducers; ++producer) {
        REQUIRE(progress.next[producer] >= journal_->put_returned[producer].load(),
                "rank %u got %lu records of producer %u, %lu were put", rank,
                progress.next[producer], producer, journal_->put_returned[producer].load());
      }
    }
    recoveries_ = session->control().num_recoveries;
    steals_ = session->control().num_steals;
  }

  int Report() {
    std::vector<std::string> missed;
    for (const std::string& point : points_) {
      if (kills_[point] == 0) missed.push_back(point);
    }
    for (const std::string& point : missed) std::printf("  never reached: %s\n", point.c_str());
    std::printf(
        "kills: %lu at %zu of %zu points and %lu anywhere; records: %lu, redelivered batches: %lu, "
        "lock steals: %lu, recoveries: %lu, looks: %lu, of them late: %lu, slowest: %.1f ms (probe "
        "interval 20 ms)\n",
        total_, points_.size() - missed.size(), points_.size(), anywhere_,
        journal_->progress[0][journal_->current[0].load()].end, journal_->redelivered.load(),
        steals_, recoveries_, journal_->looks.load(), journal_->late_looks.load(),
        static_cast<double>(journal_->slowest_look_ns.load()) / 1e6);
    REQUIRE(journal_->late_looks.load() <= 2 + journal_->looks.load() / 1000,
            "%lu of %lu looks at the ring took longer than the deaths explain",
            journal_->late_looks.load(), journal_->looks.load());
    return 0;
  }

  TemporaryRing ring_;
  uint64_t num_kills_;
  std::mt19937_64 random_;
  std::vector<std::string> points_;
  Journal* journal_;
  std::vector<Worker> workers_;
  std::map<std::string, uint64_t> kills_;
  std::vector<std::string> reached_[kProducers + kRanks + 1];
  uint64_t total_ = 0, anywhere_ = 0, steals_ = 0, recoveries_ = 0;
};

}  // namespace

int Main(int argc, char** argv) {
  REQUIRE(argc > 3, "usage: ring_kill KILLS SEED POINT...");
  return Arena(std::strtoull(argv[1], nullptr, 10), std::strtoull(argv[2], nullptr, 10),
               std::vector<std::string>(argv + 3, argv + argc))
      .Run();
}

}  // namespace asyncrl::ring::testing

int main(int argc, char** argv) { return asyncrl::ring::testing::Main(argc, argv); }
