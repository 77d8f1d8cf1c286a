#include "ring/admin.h"

#include <algorithm>
#include <string>

#include "common/crash_point.h"
#include "ring/errors.h"
#include "ring/groups.h"

namespace asyncrl::ring {

void Close(Session& session) {
  Session::Locked locked(session);
  Publish(session.control().closed, uint32_t{1});
  CRASH_POINT("close.closed");
  locked.WakeDataSleepers();
  locked.WakeSpaceSleepers();
}

void SetMinVersion(Session& session, int64_t version) {
  Session::Locked locked(session);
  Control& control = session.control();
  Publish(control.min_version, std::max(version, Peek(control.min_version)));
}

uint32_t Evict(Session& session, int64_t version) {
  Session::Locked locked(session);
  Control& control = session.control();
  const int64_t bound = std::max(version, Peek(control.min_version));
  Publish(control.min_version, bound);
  CRASH_POINT("evict.bound");
  const uint32_t num_dropped = session.table().DropBelow(bound, DropReason::kEvicted);
  control.swept_version = bound;
  if (num_dropped > 0) locked.WakeSpaceSleepers();
  return num_dropped;
}

void ForceRebuild(Session& session) {
  Session::Locked locked(session);
  session.table().Rebuild();
  session.Sweep(locked);
  locked.WakeDataSleepers();
  locked.WakeSpaceSleepers();
}

void CheckNoLeases(Session& session) {
  const uint32_t leases = CountOwnLeases(session);
  if (leases == 0) return;
  throw RingError(ErrorKind::kViewsAlive,
                  session.region().directory() + ": " + std::to_string(leases) +
                      " records are on loan to this handle; release their batches first");
}

}  // namespace asyncrl::ring
