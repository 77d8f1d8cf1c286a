"""Which group may start, and which finished group comes next in the rings: the bound on staleness.

Batch b takes the groups released at positions b*B .. (b+1)*B - 1 and is trained while the policy version
is b. A group started at version v samples no token older than v, so training it in a batch b <= v + S
bounds its staleness by S. Its *deadline* is d = v + S. Proof that no deadline is ever missed:

* Invariant, with R groups released:  for every deadline d of an unreleased group,
      #(unreleased groups with deadline <= d)  <=  (d + 1) * B - R.
  The right side counts the free places in batches <= d, so at equality every place is spoken for.
* Start: admission keeps started - dropped <= (v + S + 1) * B, and no deadline exceeds v + S, so all
  unreleased groups number started - dropped - R <= (v + S + 1) * B - R. For d < v + S nothing changes.
* Release: allowed only when the invariant holds afterwards. For the released group itself it held before
  with a count of at least 1, so R < (d + 1) * B and its batch R // B is at most d.
* Progress: releasing a group of the smallest deadline lowers both sides by one for every d that is left,
  so it is always allowed: whatever the completion order, the queue moves when the oldest group finishes.
* Drop: lowers the left side only; the place goes to a later group.

Admission counts versions, not consumed batches: a batch that is consumed before its version is published
must not open a place, for the group that took it could be one version too old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.types import PolicyVersion


class AdmissionError(RuntimeError):
    """The bookkeeping of groups was broken; a bug or a journal of other settings."""


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """B = ``groups_per_batch``, S = ``max_staleness`` in policy versions (0 is synchronous training)."""

    groups_per_batch: int
    max_staleness: int

    def deadline(self, start_version: PolicyVersion) -> int:
        """The last batch that may train a group started at ``start_version``."""
        return start_version + self.max_staleness

    def capacity(self, version: PolicyVersion) -> int:
        """How many groups may have been started, dropped ones not counted, while ``version`` is current."""
        return (version + self.max_staleness + 1) * self.groups_per_batch

    def batch_of(self, position: int) -> int:
        return position // self.groups_per_batch


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a group goes: ``position`` in release order, its batch, and the ring within the batch."""

    position: int
    batch_idx: int
    ring_idx: int


def fits(unreleased: Mapping[int, int], num_released: int, groups_per_batch: int) -> bool:
    """Whether every unreleased group can still meet its deadline (the invariant above).

    ``unreleased`` maps a deadline to the number of unreleased groups that have it.
    """
    due = 0
    for deadline in sorted(unreleased):
        due += unreleased[deadline]
        if due > (deadline + 1) * groups_per_batch - num_released:
            return False
    return True


class Sequencer:
    """Orders finished groups into positions 0, 1, 2, ...; deterministic, no I/O, no clock.

    Among the groups that may go next it prefers the earliest deadline, then the earliest to finish.
    """

    def __init__(self, bound: StalenessBound, num_released: int = 0) -> None:
        self._bound = bound
        self._num_released = num_released
        self._deadlines: dict[int, int] = {}  # group id -> deadline, unreleased
        self._due: Counter[int] = Counter()  # deadline -> unreleased groups
        self._finished: list[int] = []  # in the order of finishing

    @property
    def num_released(self) -> int:
        return self._num_released

    @property
    def num_started(self) -> int:
        """Groups started and not dropped."""
        return self._num_released + len(self._deadlines)

    @property
    def num_unreleased(self) -> int:
        return len(self._deadlines)

    @property
    def num_waiting(self) -> int:
        """Finished groups that wait for an older one."""
        return len(self._finished)

    def may_start(self, version: PolicyVersion) -> bool:
        return self.num_started < self._bound.capacity(version)

    def start(self, group_id: int, start_version: PolicyVersion) -> None:
        """Raises AdmissionError when the group could not meet its deadline."""
        if group_id in self._deadlines:
            raise AdmissionError(f"group {group_id} started twice")
        deadline = self._bound.deadline(start_version)
        self._deadlines[group_id] = deadline
        self._due[deadline] += 1
        if not fits(self._due, self._num_released, self._bound.groups_per_batch):
            raise AdmissionError(
                f"group {group_id} started at policy version {start_version} is one too many:"
                f" {self._num_released} released, {len(self._deadlines)} unreleased,"
                f" {self._bound.groups_per_batch} per batch"
            )

    def finish(self, group_id: int) -> None:
        if group_id not in self._deadlines or group_id in self._finished:
            raise AdmissionError(f"group {group_id} finished, but it is not running")
        self._finished.append(group_id)

    def drop(self, group_id: int) -> None:
        if group_id in self._finished:
            self._finished.remove(group_id)
        self._forget(group_id)

    def next_group(self) -> int | None:
        """The finished group that goes next, or None when an unfinished one must go first."""
        for group_id in sorted(self._finished, key=self._deadlines.__getitem__):
            if self._may_release(self._deadlines[group_id]):
                return group_id
        return None

    def release(self, group_id: int) -> int:
        """Give the group that `next_group` named its position."""
        if group_id != self.next_group():
            raise AdmissionError(f"group {group_id} is released out of order; next is {self.next_group()}")
        self._finished.remove(group_id)
        self._forget(group_id)
        position = self._num_released
        self._num_released += 1
        return position

    def blocking(self) -> tuple[int, ...]:
        """The unfinished groups of the earliest deadline, for which finished ones may be waiting."""
        unfinished = {g: d for g, d in self._deadlines.items() if g not in self._finished}
        first = min(unfinished.values(), default=0)
        return tuple(sorted(g for g, d in unfinished.items() if d == first))

    def _may_release(self, deadline: int) -> bool:
        after = self._due.copy()
        after[deadline] -= 1
        return fits(+after, self._num_released + 1, self._bound.groups_per_batch)

    def _forget(self, group_id: int) -> None:
        deadline = self._deadlines.pop(group_id)
        self._due[deadline] -= 1
        if not self._due[deadline]:
            del self._due[deadline]


class RingBalance:
    """Deals the groups of each batch to the rings: equal in groups, close in tokens.

    A function of the sequence of (position, tokens) alone, so a resumed run deals the same way.
    """

    def __init__(self, groups_per_batch: int, num_rings: int) -> None:
        if groups_per_batch % num_rings:
            raise AdmissionError(
                f"{groups_per_batch} groups per batch are no equal share of {num_rings} rings"
            )
        self._groups_per_batch = groups_per_batch
        self._quota = groups_per_batch // num_rings
        self._groups = [0] * num_rings
        self._tokens = [0] * num_rings

    def place(self, position: int, num_tokens: int) -> Placement:
        """The ring with the fewest tokens of this batch among those with a free place."""
        if position % self._groups_per_batch == 0:
            self._groups = [0] * len(self._groups)
            self._tokens = [0] * len(self._tokens)
        free = [r for r, count in enumerate(self._groups) if count < self._quota]
        ring_idx = min(free, key=lambda r: (self._tokens[r], self._groups[r], r))
        self._groups[ring_idx] += 1
        self._tokens[ring_idx] += num_tokens
        return Placement(position, position // self._groups_per_batch, ring_idx)
