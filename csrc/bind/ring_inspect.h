// Statistics and snapshots of a ring as Python dictionaries; asyncrl/ring gives them types.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "ring/stats.h"

namespace asyncrl::bind {

pybind11::dict ToDict(const ring::Stats& stats);

// ring::Inspect.
pybind11::dict InspectRing(const std::string& directory);

}  // namespace asyncrl::bind
