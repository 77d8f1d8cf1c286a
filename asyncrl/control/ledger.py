"""Where every sample is: issued = the sum of all states, always.

    pending --> running <--> interrupted
                   |
                   v
               rewarded --> in the ring --> consumed --> acknowledged (terminal)
                                  ^------------'  a trainer restarted before its checkpoint
    pending, running, interrupted, rewarded --> dropped(reason) (terminal)

Pure bookkeeping: no I/O, no clock. A move that is not drawn above raises, so a sample is never lost,
trained twice or counted twice without a word. Terminal samples are kept as counts alone.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


class SampleState(enum.StrEnum):
    """The one state of an issued sample; dropped samples also have a reason."""

    PENDING = "pending"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    REWARDED = "rewarded"
    IN_RING = "in_ring"
    CONSUMED = "consumed"
    ACKNOWLEDGED = "acknowledged"
    DROPPED = "dropped"


_S = SampleState
_MOVES: Mapping[SampleState, frozenset[SampleState]] = {
    _S.PENDING: frozenset({_S.RUNNING, _S.DROPPED}),
    _S.RUNNING: frozenset({_S.INTERRUPTED, _S.REWARDED, _S.DROPPED}),
    _S.INTERRUPTED: frozenset({_S.RUNNING, _S.DROPPED}),
    _S.REWARDED: frozenset({_S.IN_RING, _S.DROPPED}),
    _S.IN_RING: frozenset({_S.CONSUMED}),
    _S.CONSUMED: frozenset({_S.ACKNOWLEDGED, _S.IN_RING}),
}
_TERMINAL = (_S.ACKNOWLEDGED, _S.DROPPED)


class LedgerError(RuntimeError):
    """A sample would be lost, doubled or moved where it cannot go."""


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Numbers of samples; ``dropped`` by reason."""

    issued: int = 0
    pending: int = 0
    running: int = 0
    interrupted: int = 0
    rewarded: int = 0
    in_ring: int = 0
    consumed: int = 0
    acknowledged: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def accounted(self) -> int:
        """The sum over all states, which equals ``issued``."""
        live = self.pending + self.running + self.interrupted + self.rewarded + self.in_ring
        return live + self.consumed + self.acknowledged + self.num_dropped

    def check(self) -> None:
        """Raises LedgerError naming the difference when issued is not the sum of the states."""
        if self.issued != self.accounted:
            raise LedgerError(f"issued {self.issued} samples but {self.accounted} are accounted for: {self}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"dropped": dict(self.dropped)}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> LedgerCounts:
        """The counts that `to_json` wrote; raises LedgerError when keys differ or the sum is wrong."""
        names = {f.name for f in fields(cls)}
        if set(tree) != names:
            raise LedgerError(f"ledger counts have the keys {sorted(tree)}, expected {sorted(names)}")
        counts = cls(**tree)
        counts.check()
        return counts


class Ledger:
    """The states of all samples of one rollouter, by sample id.

    Ids are issued in increasing order and never again; an id below the next one that is not live is
    terminal. Not thread-safe: one event loop owns it.
    """

    def __init__(
        self, next_id: int = 0, acknowledged: int = 0, dropped: Mapping[str, int] | None = None
    ) -> None:
        """Begin with the terminal samples of an earlier life; ids from ``next_id`` on are new."""
        self._states: dict[int, SampleState] = {}
        self._totals: Counter[SampleState] = Counter({_S.ACKNOWLEDGED: acknowledged})
        self._dropped: Counter[str] = Counter(dropped or {})
        self._totals[_S.DROPPED] = self._dropped.total()
        self._issued = acknowledged + self._dropped.total()
        self._next_id = next_id

    def issue(self, sample_ids: Iterable[int]) -> None:
        """Add samples as pending; raises LedgerError for an id at or below one issued before."""
        for sample_id in sample_ids:
            if sample_id < self._next_id:
                raise LedgerError(f"sample {sample_id} was issued before; the next id is {self._next_id}")
            self._states[sample_id] = _S.PENDING
            self._totals[_S.PENDING] += 1
            self._issued += 1
            self._next_id = sample_id + 1
        self.check()

    def restore(self, sample_ids: Iterable[int], state: SampleState) -> None:
        """Add live samples of an earlier life, whose ids are below the next one, in ``state``."""
        if state in _TERMINAL:
            raise LedgerError(f"{state} samples are given to the constructor as counts")
        for sample_id in sample_ids:
            if sample_id >= self._next_id or sample_id in self._states:
                raise LedgerError(f"sample {sample_id} cannot be restored: it is new or live")
            self._states[sample_id] = state
            self._totals[state] += 1
            self._issued += 1
        self.check()

    def state(self, sample_id: int) -> SampleState:
        """The state of a live sample; raises LedgerError for one that is terminal or was never issued."""
        if sample_id not in self._states:
            known = "ended" if sample_id < self._next_id else "was never issued"
            raise LedgerError(f"sample {sample_id} {known}")
        return self._states[sample_id]

    def move(self, sample_ids: Iterable[int], to: SampleState) -> None:
        """Move samples to a state but dropped; raises LedgerError, having moved none, if any cannot."""
        if to is _S.DROPPED:
            raise LedgerError("a dropped sample needs a reason")
        self._move(tuple(sample_ids), to)

    def drop(self, sample_ids: Iterable[int], reason: str) -> None:
        """End samples that nothing will train, counted under ``reason``."""
        ids = tuple(sample_ids)
        self._check_moves(ids, _S.DROPPED)
        self._dropped[reason] += len(ids)
        self._move(ids, _S.DROPPED)

    def counts(self) -> LedgerCounts:
        live = {s.value: self._totals[s] for s in SampleState if s is not _S.DROPPED}
        return LedgerCounts(issued=self._issued, dropped=dict(self._dropped), **live)

    def check(self) -> None:
        """Raises LedgerError when issued differs from the sum over the states."""
        self.counts().check()

    def _move(self, sample_ids: tuple[int, ...], to: SampleState) -> None:
        self._check_moves(sample_ids, to)
        for sample_id in sample_ids:
            self._totals[self._states[sample_id]] -= 1
            self._totals[to] += 1
            if to in _TERMINAL:
                del self._states[sample_id]
            else:
                self._states[sample_id] = to
        self.check()

    def _check_moves(self, sample_ids: tuple[int, ...], to: SampleState) -> None:
        if len(set(sample_ids)) != len(sample_ids):
            raise LedgerError(f"a sample was named twice in a move to {to}")
        for sample_id in sample_ids:
            state = self.state(sample_id)
            if to not in _MOVES[state]:
                raise LedgerError(f"sample {sample_id} cannot go from {state} to {to}")
