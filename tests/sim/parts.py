"""The simple parts of the simulated job: what an observer saw, a journal, rings, prompts, a reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.control.ledger import LedgerCounts
from asyncrl.rewards.base import RewardResult
from asyncrl.rollout.admission import Placement
from asyncrl.rollout.records import (
    BatchesAcknowledged,
    GroupDropped,
    GroupReleased,
    GroupStarted,
    JournalError,
    JournalState,
    Record,
    SampleAdvanced,
    SampleRewarded,
    fold,
)
from asyncrl.rollout.settings import RolloutSettings
from asyncrl.types import Prompt, Sample, SampleGroup
from tests.sim.loop import SimLoop

STOP_TOKENS = tuple(range(60))
VOCAB = 600
RECORD_KINDS: tuple[type[Record], ...] = (
    GroupStarted,
    SampleAdvanced,
    SampleRewarded,
    GroupReleased,
    GroupDropped,
    BatchesAcknowledged,
)


class MemoryJournal:
    """Durable from the moment `write` returns; outlives its rollouter.

    ``fault`` makes the next write of a record of ``fault_kind`` fail: "refuse" with nothing written, "lose"
    with everything written.
    """

    producer_uid = "producer"

    def __init__(self, history: History) -> None:
        self.records: list[Record] = []
        self.fault = ""
        self.fault_kind: type[Record] = GroupStarted
        self._history = history

    def write(self, records: Sequence[Record]) -> None:
        fault = self.fault if any(isinstance(record, self.fault_kind) for record in records) else ""
        if fault != "refuse":
            self.records.extend(records)
            for record in records:
                self._history.journaled(record)
        if fault:
            self._history.faults.append(f"{fault} {self.fault_kind.__name__}")
            raise JournalError(f"the disk failed ({fault})")

    def load(self) -> JournalState:
        return fold(self.records)


@dataclass
class History:
    """What an outside observer saw."""

    settings: RolloutSettings
    version: int = 0
    starts: list[tuple[int, int, int]] = field(default_factory=list)
    """(group id, version and number of dropped groups when it became durable)."""
    dropped: list[int] = field(default_factory=list)
    puts: dict[tuple[int, int], list[tuple[int, Sample]]] = field(default_factory=dict)
    """(position, sample index) -> every (ring, sample) that was ever put there, over all lives."""
    trained: list[tuple[int, int]] = field(default_factory=list)  # (batch, version), over all lives
    leaks: list[str] = field(default_factory=list)  # requests in engines that should have none
    counts: LedgerCounts = field(default_factory=LedgerCounts)  # at the end
    faults: list[str] = field(default_factory=list)

    def journaled(self, record: Record) -> None:
        if isinstance(record, GroupStarted):
            self.starts.append((record.group_id, self.version, len(self.dropped)))
        if isinstance(record, GroupDropped):
            self.dropped.append(record.group_id)


class RingFailure(RuntimeError):
    """What a ring raises when its reader is gone."""


class Rings:
    """One list per data-parallel replica; a key is accepted once, as the real ring does.

    ``fault`` makes the next put fail, before or after one of its samples was accepted.
    """

    def __init__(self, loop: SimLoop, history: History) -> None:
        self._loop, self._history = loop, history
        self._last_key = [-1] * history.settings.num_rings
        self.num_samples = [0] * history.settings.num_rings
        self.fault = False

    async def put_group(self, group: SampleGroup, placement: Placement) -> None:
        for sample in group.samples:
            await asyncio.sleep(self._loop.rng.random() * 0.01)
            if self.fault and self._loop.rng.random() < 0.5:
                raise RingFailure("the ring was closed")
            key = placement.position * len(group.samples) + sample.sample_idx
            where = (placement.position, sample.sample_idx)
            self._history.puts.setdefault(where, []).append((placement.ring_idx, sample))
            if key > self._last_key[placement.ring_idx]:
                self._last_key[placement.ring_idx] = key
                self.num_samples[placement.ring_idx] += 1
            if self.fault:
                raise RingFailure("the ring was closed")


class Prompts:
    def prompt_at(self, prompt_idx: int) -> Prompt:
        return Prompt(prompt_idx, (), (1000 + prompt_idx, 7, 1000 + prompt_idx % 3))


def true_reward(token_ids: Sequence[int]) -> float:
    """What a completion deserves."""
    return 1.0 + sum(token_ids) % 5


class FlakyReward:
    """Fails for some samples, differently on every attempt, and takes a while."""

    def __init__(self, loop: SimLoop, error_rate: float) -> None:
        self._loop, self._error_rate = loop, error_rate

    async def score(self, prompt: Prompt, completion: str, token_ids: tuple[int, ...]) -> RewardResult:
        await asyncio.sleep(self._loop.rng.random() * 0.05)
        if self._loop.rng.random() < self._error_rate:
            return RewardResult(None, error="flaky")
        return RewardResult(true_reward(token_ids))

    async def close(self) -> None:
        """Nothing to end."""
