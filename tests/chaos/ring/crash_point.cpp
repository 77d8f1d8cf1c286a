// The armed side of csrc/common/crash_point.h.
#include "crash_point.h"

#include <unistd.h>

#include <csignal>
#include <cstring>

#include "common/crash_point.h"

namespace asyncrl {

namespace {
const char* armed_name = nullptr;
int countdown = 0;
int end_signal = SIGKILL;
}  // namespace

void ArmCrashPoint(const char* name, int count, int signal) {
  armed_name = name;
  countdown = count;
  end_signal = signal;
}

void ReachCrashPoint(const char* name) {
  if (armed_name == nullptr || std::strcmp(name, armed_name) != 0 || --countdown > 0) return;
  armed_name = nullptr;
  kill(getpid(), end_signal);
  while (end_signal == SIGKILL) pause();
}

}  // namespace asyncrl
