// Labelled points at which the kill tests end the process. They compile to nothing elsewhere.
#pragma once

#ifdef ASYNCRL_CRASH_POINTS
namespace asyncrl {
// Sends SIGKILL to this process if the test armed `name` and its countdown has run out.
void ReachCrashPoint(const char* name);
}  // namespace asyncrl
#define CRASH_POINT(name) ::asyncrl::ReachCrashPoint(name)
#else
#define CRASH_POINT(name) static_cast<void>(0)
#endif
