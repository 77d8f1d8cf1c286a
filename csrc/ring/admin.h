// Closing, version bounds, repair: what concerns the whole ring.
#pragma once

#include <cstdint>

#include "ring/session.h"

namespace asyncrl::ring {

// No put succeeds any more; readers drain what is ready and then end. Wakes everybody.
void Close(Session& session);

// Refuses records below `version` from now on. Ready ones that are below are skipped and counted by
// the next reader. The bound never goes down.
void SetMinVersion(Session& session, int64_t version);

// The same, and drops the ready ones below at once. Records held by readers stay. Returns how many.
uint32_t Evict(Session& session, int64_t version);

// Rebuilds all derived data from the slots, and takes back what the dead hold.
void ForceRebuild(Session& session);

// Throws kViewsAlive while this session leases records.
void CheckNoLeases(Session& session);

}  // namespace asyncrl::ring
