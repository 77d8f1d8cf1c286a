// Sentences that name whom a wait was for. With the metadata lock.
#pragma once

#include <string>

#include "ring/session.h"

namespace asyncrl::ring {

// "NAME (pid 12, alive)".
std::string DescribeParticipant(Session& session, uint32_t participant);

// Why there is no room for `length` bytes, and who holds it.
std::string DescribeFull(Session& session, uint64_t length);

// Why there is no batch: what is ready, and which producers there are.
std::string DescribeEmpty(Session& session, const std::string& wanted);

}  // namespace asyncrl::ring
