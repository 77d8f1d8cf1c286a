// How waits of the ring behave in Python: deadlines in seconds, signals, errors as Python
// exceptions.
#pragma once

#include <cstdint>
#include <exception>

namespace asyncrl::bind {

// Ends a wait when a Python signal handler raises (Ctrl-C). Takes the GIL.
void CheckSignals();

// CLOCK_MONOTONIC nanoseconds, `seconds` from now.
int64_t DeadlineIn(double seconds);

// pybind11 translator: a ring::RingError becomes the class of asyncrl.ring.errors for its kind.
void Translate(std::exception_ptr pending);

}  // namespace asyncrl::bind
