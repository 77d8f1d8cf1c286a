// Arms a labelled point of the ring in this process.
#pragma once

namespace asyncrl {

// The `count`-th time that this process reaches the point called `name`, it gets `signal`.
void ArmCrashPoint(const char* name, int count, int signal);

}  // namespace asyncrl
