// Faults that need a process to stop or die at one exact place: the metadata lock's hard cases.
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "crash_point.h"
#include "ring/errors.h"
#include "ring/stats.h"
#include "scenario.h"

namespace asyncrl::ring::testing {
namespace {

constexpr int64_t kPatience =
    5'000 * kMillisecond;  // the machine may be busy; the lock needs 20 ms

// Runs `body` in a child that gets `signal` when it next acquires the lock; returns when that has
// happened.
template <typename Body>
pid_t InLock(const std::string& directory, int signal, Body body) {
  const pid_t child = fork();
  if (child == 0) {
    auto session = Session::Attach(directory, Role::kProducer, "victim");
    body(session);
    ArmCrashPoint("lock.acquired", 1, signal);
    ReadStats(*session);
    std::_Exit(0);
  }
  int status = 0;
  waitpid(child, &status, WUNTRACED);
  REQUIRE(WIFSIGNALED(status) || WIFSTOPPED(status), "the victim did not reach the lock");
  return child;
}

void TwoStealers() {
  TemporaryRing ring(SmallRing{});
  auto witness = Session::Attach(ring.directory(), Role::kObserver, "witness");
  std::vector<std::shared_ptr<Session>> thieves;
  const uint64_t before = ReadStats(*witness).num_steals;
  // The victim attaches last, so that its place is taken by nobody.
  for (int i = 0; i < 3; ++i)
    thieves.push_back(Session::Attach(ring.directory(), Role::kReader, "thief"));
  InLock(ring.directory(), SIGKILL, [](const std::shared_ptr<Session>&) {});
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    // Of its own: it takes the dead one's place only if that byte is free and nobody is looking.
    const int64_t begin = NowNs();
    auto session = Session::Attach(ring.directory(), Role::kReader, "late");
    ReadStats(*session);
    REQUIRE(NowNs() - begin < kPatience, "the lock of a dead process blocked for %ld ms",
            (NowNs() - begin) / kMillisecond);
    std::_Exit(0);
  }
  ReadStats(*thieves[0]);
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a stealer failed");
  }
  const Stats stats = ReadStats(*witness);
  REQUIRE(stats.num_steals <= before + 1 && stats.num_recoveries == 1,
          "one death, %lu steals and %lu recoveries", stats.num_steals, stats.num_recoveries);
}

void StoppedOwner() {
  TemporaryRing ring(SmallRing{});
  auto session = Session::Attach(ring.directory(), Role::kReader, "reader");
  const pid_t stopped = InLock(ring.directory(), SIGSTOP, [](const std::shared_ptr<Session>&) {});
  session->set_lock_timeout(200 * kMillisecond);
  try {
    ReadStats(*session);
    REQUIRE(false, "the lock was stolen from a live process");
  } catch (const RingError& error) {
    REQUIRE(error.kind() == ErrorKind::kLockTimeout, "%s", error.what());
    const std::string named = "victim (pid " + std::to_string(stopped) + ")";
    REQUIRE(std::string(error.what()).find(named) != std::string::npos, "%s", error.what());
  }
  kill(stopped, SIGCONT);
  session->set_lock_timeout(kPatience);
  ReadStats(*session);
  int status = 0;
  waitpid(stopped, &status, 0);
  REQUIRE(WIFEXITED(status) && ReadStats(*session).num_steals == 0,
          "the stopped owner did not go on");
}

// A child of the dead owner lives on. If it kept the descriptor, the owner would seem alive for
// ever.
void ForkThenDeath() {
  TemporaryRing ring(SmallRing{});
  auto session = Session::Attach(ring.directory(), Role::kReader, "reader");
  int alive[2];
  REQUIRE(pipe(alive) == 0, "pipe");
  InLock(ring.directory(), SIGKILL, [&](const std::shared_ptr<Session>& inherited) {
    if (fork() != 0) return;
    try {
      ReadStats(*inherited);
      REQUIRE(false, "a forked child used its parent's handle");
    } catch (const RingError& error) {
      REQUIRE(error.kind() == ErrorKind::kDetached, "%s", error.what());
    }
    char byte;
    close(alive[1]);
    [[maybe_unused]] const ssize_t got = read(alive[0], &byte, 1);  // until the test ends
    std::_Exit(0);
  });
  const int64_t begin = NowNs();
  ReadStats(*session);
  REQUIRE(NowNs() - begin < kPatience, "the dead owner's child kept its place");
  REQUIRE(ReadStats(*session).num_steals == 1, "the lock was not stolen");
  close(alive[0]);
  close(alive[1]);
}

// The heir of a dead owner's index finds the lock in its own name.
void IndexReuse() {
  TemporaryRing ring(SmallRing{});
  auto session = Session::Attach(ring.directory(), Role::kProducer, "first");
  PutValue(*session, 1, 1, 64);
  InLock(ring.directory(), SIGKILL, [](const std::shared_ptr<Session>& victim) {
    Writer writer(*victim);
    PutRequest claim{};
    claim.length = 640;
    writer.Claim({&claim, 1}, WhenFull::kFail, 0, NoInterrupt);
  });
  const int64_t begin = NowNs();
  auto heir = Session::Attach(ring.directory(), Role::kProducer, "heir");
  REQUIRE(heir->self() == 1 && NowNs() - begin < kPatience, "the heir has index %u", heir->self());
  const Stats stats = ReadStats(*heir);
  REQUIRE(stats.num_steals == 0 && stats.num_recoveries == 1, "recoveries: %lu",
          stats.num_recoveries);
  REQUIRE(stats.num_reclaimed == 1 && stats.num_claimed == 0 && stats.num_ready == 1, "claims: %u",
          stats.num_claimed);
}

// A dead producer's claim makes room for one that waits, within a wait slice.
void ClaimOfTheDead() {
  TemporaryRing ring(SmallRing{});
  auto session = Session::Attach(ring.directory(), Role::kProducer, "waits");
  const pid_t child = fork();
  if (child == 0) {
    auto victim = Session::Attach(ring.directory(), Role::kProducer, "victim");
    ArmCrashPoint("commit.copied", 1, SIGKILL);
    PutValue(*victim, 0, 1, 4096);
  }
  waitpid(child, nullptr, 0);
  const int64_t begin = NowNs();
  PutValue(*session, 0, 2, 4096);
  REQUIRE(NowNs() - begin < kPatience, "the dead producer's claim blocked for %ld ms",
          (NowNs() - begin) / kMillisecond);
}

// Two containers on one host: the owner is stopped, then dies, in a PID namespace of its own.
void OtherPidNamespace() {
  TemporaryRing ring(SmallRing{});
  auto session = Session::Attach(ring.directory(), Role::kReader, "outside");
  int report[2];
  REQUIRE(pipe(report) == 0, "pipe");
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWPID) != 0) std::_Exit(77);
    const pid_t first = fork();  // process 1 of the namespace; its end ends the namespace
    if (first == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      InLock(ring.directory(), SIGSTOP, [](const std::shared_ptr<Session>&) {});
      [[maybe_unused]] const ssize_t told = write(report[1], "x", 1);
      for (;;) pause();
    }
    waitpid(first, nullptr, 0);
    std::_Exit(0);
  }
  close(report[1]);
  char byte;
  if (read(report[0], &byte, 1) != 1) {
    int status = 0;
    waitpid(child, &status, 0);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 77, "the namespace failed");
    std::printf("skipped, no right to make a PID namespace: ");
    return;
  }
  session->set_lock_timeout(200 * kMillisecond);
  try {
    ReadStats(*session);
    REQUIRE(false, "the lock was stolen from a live process in another PID namespace");
  } catch (const RingError& error) {
    REQUIRE(error.kind() == ErrorKind::kLockTimeout, "%s", error.what());
  }
  session->set_lock_timeout(kPatience);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  REQUIRE(ReadStats(*session).num_steals == 1, "the lock was not stolen");
  close(report[0]);
}

}  // namespace

int Main() {
  const std::pair<const char*, void (*)()> tests[] = {
      {"two and more stealers", TwoStealers},
      {"a stopped owner", StoppedOwner},
      {"fork, then the parent's death", ForkThenDeath},
      {"reuse of a dead owner's index", IndexReuse},
      {"the claim of a dead producer", ClaimOfTheDead},
      {"death in another PID namespace", OtherPidNamespace}};
  for (const auto& [name, test] : tests) {
    test();
    std::printf("ok: %s\n", name);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace asyncrl::ring::testing

int main() { return asyncrl::ring::testing::Main(); }
