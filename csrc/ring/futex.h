// Time and futexes shared between processes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace asyncrl::ring {

inline constexpr int64_t kMillisecond = 1'000'000;
inline constexpr int64_t kForever = INT64_MAX;

// CLOCK_MONOTONIC in nanoseconds.
inline int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// Sleeps while `word` == `expected`, at most until `deadline_ns`. Returns false at the deadline and
// true on any other return: the caller looks again.
inline bool FutexWaitUntil(std::atomic<uint32_t>& word, uint32_t expected, int64_t deadline_ns) {
  const timespec deadline{deadline_ns / 1'000'000'000, deadline_ns % 1'000'000'000};
  const long rc = syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_BITSET,
                          expected, &deadline, nullptr, FUTEX_BITSET_MATCH_ANY);
  return !(rc == -1 && errno == ETIMEDOUT);
}

// Tells the core that this is a spinning loop.
inline void Relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks on for at most `spin_ns`, until `changed()`; returns whether it did.
template <typename Changed>
inline bool SpinUntil(int64_t spin_ns, Changed changed) {
  const int64_t deadline = NowNs() + spin_ns;
  do {
    for (int look = 0; look < 16; ++look) {
      if (changed()) return true;
      Relax();
    }
  } while (NowNs() < deadline);
  return false;
}

inline void FutexWake(std::atomic<uint32_t>& word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, count, nullptr, nullptr, 0);
}

}  // namespace asyncrl::ring
