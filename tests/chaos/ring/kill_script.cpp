// Kill test of everything that a ring meets once in its life. A child runs one script from creation
// to removal, with eviction, dropping, a removed group, a nack, close and detach in between; it is
// killed at a labelled point; whoever comes next must be able to use what is left, and nothing may
// have leaked.
//
// usage: ring_kill_script KILLS SEED POINT...
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <map>
#include <random>

#include "crash_point.h"
#include "ring/admin.h"
#include "ring/errors.h"
#include "scenario.h"

namespace asyncrl::ring::testing {
namespace {

void CreateRing(const std::string& directory) {
  Options options;
  options.arena_bytes = 8192;
  options.max_record_bytes = 4096;
  options.num_slots = 16;
  options.num_participants = 8;
  options.num_groups = 2;
  options.num_producers = 4;
  options.key_window = 256;
  Region::Create(directory, options);
}

void Script(const std::string& directory) {
  CreateRing(directory);
  auto session = Session::Attach(directory, Role::kProducer, "script");
  for (uint64_t value = 0; value < 8; ++value) {
    PutValue(*session, 1, value, 400, WhenFull::kBlock, value % 2);
  }
  GroupReader old(session, "old", 0, 1, 0);
  old.Release(old.TryGet({2, 0})->slots);
  old.Leave();
  RemoveGroup(*session, "old");
  Evict(*session, 1);
  PutValue(*session, 1, 9, 4000, WhenFull::kDropOldest, 1);
  PutValue(*session, 1, 10, 4000, WhenFull::kDropOldest, 1);
  GroupReader reader(session, "dp0", 0, 2, 0);
  reader.Release(reader.TryGet({1, 0})->slots);
  const Delivery again = *reader.TryGet({1, 0});
  reader.Ack(again.begin, again.end);
  reader.Release(again.slots);
  reader.Leave();
  Session::Attach(directory, Role::kObserver, "other")->Detach();
  Close(*session);
  session->Detach();
  Region::Unlink(directory);
}

void DrainAll(std::shared_ptr<Session> session, const std::string& group, uint32_t size) {
  for (uint32_t rank = 0; rank < size; ++rank) {
    GroupReader reader(session, group, rank, size, 0);
    try {
      uint64_t last = 0;
      for (uint64_t value : Drain(reader)) {
        REQUIRE(value >= last, "value %lu came after %lu", value, last);
        last = value;
      }
    } catch (const RingError& error) {
      REQUIRE(error.kind() == ErrorKind::kClosed, "%s", error.what());
    }
  }
}

// Uses what a dead script left behind, and removes it.
void CheckWhatIsLeft(const std::string& directory, const std::string& point) {
  std::shared_ptr<Session> session;
  try {
    session = Session::Attach(directory, Role::kProducer, "next");
  } catch (const RingError& error) {
    REQUIRE(error.kind() == ErrorKind::kMissing, "%s: %s", point.c_str(), error.what());
    CreateRing(directory);  // killed before the ring was there, or after it was removed
    session = Session::Attach(directory, Role::kProducer, "next");
  }
  try {
    RemoveGroup(*session, "old");
  } catch (const RingError& error) {
    REQUIRE(error.kind() == ErrorKind::kNotAMember, "%s: %s", point.c_str(), error.what());
  }
  DrainAll(session, "dp0", 2);
  {
    Session::Locked locked(*session);
    const std::string problem = session->table().Check();
    REQUIRE(problem.empty(), "%s: %s", point.c_str(), problem.c_str());
    REQUIRE(session->control().num_free == session->geometry().num_slots, "%s: %u slots leaked",
            point.c_str(), session->geometry().num_slots - session->control().num_free);
  }
  session->Detach();
  Region::Unlink(directory);
  REQUIRE(access(directory.c_str(), F_OK) != 0, "%s: %s is still there", point.c_str(),
          directory.c_str());
}

}  // namespace

int Main(int argc, char** argv) {
  REQUIRE(argc > 3, "usage: ring_kill_script KILLS SEED POINT...");
  const uint64_t num_kills = std::strtoull(argv[1], nullptr, 10);
  std::mt19937_64 random(std::strtoull(argv[2], nullptr, 10));
  std::map<std::string, uint64_t> kills;
  const std::vector<std::string> points(argv + 3, argv + argc);
  const std::string directory = "/dev/shm/asyncrl-test-script-" + std::to_string(getpid());
  uint64_t total = 0;
  for (uint64_t attempt = 0; total < num_kills; ++attempt) {
    const std::string& point = points[attempt % points.size()];
    const int count = 1 + static_cast<int>(random() % 4);
    const pid_t child = fork();
    if (child == 0) {
      ArmCrashPoint(point.c_str(), count, SIGKILL);
      Script(directory);
      std::_Exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
    REQUIRE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "%s: the script failed",
            point.c_str());
    ++kills[point];
    ++total;
    CheckWhatIsLeft(directory, point);
  }
  std::printf("script kills: %lu at %zu of %zu points\n", total, kills.size(), points.size());
  return 0;
}

}  // namespace asyncrl::ring::testing

int main(int argc, char** argv) { return asyncrl::ring::testing::Main(argc, argv); }
