"""Random operations on a ring against a model of lists: what is delivered, to whom, in which order."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.ring import Ring
from asyncrl.ring.errors import RecordStale, RingFull, RingTimeout
from tests.unit.ring_samples import make_sample, numbers, temporary_ring

RANKS = st.integers(0, 1)
SLOTS = 8


class RingModel(RuleBasedStateMachine):
    """``ready``: (number, version) not yet taken. ``log``: batches taken by the group. Per rank: the batches
    that it has acknowledged, and those that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.path = self.stack.enter_context(temporary_ring(num_slots=SLOTS))
        self.producer = Ring.open(self.path, role="producer", name="p", when_full="fail")
        self.ready: list[tuple[int, int]] = []
        self.log: list[list[int]] = []
        self.acked: list[set[int]] = [set(), set()]
        self.held: list[dict[int, Any]] = [{}, {}]
        self.handles: list[Ring] = [None, None]  # type: ignore[list-item]
        self.groups: list[Any] = [None, None]
        self.number = 0
        self.bound = -1
        for rank in range(2):
            self.join(rank)

    def join(self, rank: int) -> None:
        self.handles[rank] = Ring.open(self.path, role="reader", name=f"rank{rank}")
        self.groups[rank] = self.handles[rank].group("dp0", rank=rank, size=2)

    def kept(self) -> int:
        """Slots in use: ready, not acknowledged by all, or on loan."""
        used = [
            len(batch)
            for idx, batch in enumerate(self.log)
            if not all(idx in self.acked[rank] and idx not in self.held[rank] for rank in range(2))
        ]
        return len(self.ready) + sum(used)

    @rule(version=st.integers(0, 5), again=st.booleans())
    def put(self, version: int, again: bool) -> None:
        if again and self.number:
            key = ("p", self.number - 1)
            if version >= self.bound:
                assert not self.producer.put(make_sample(0), version=version, key=key, timeout=0)
            return
        try:
            self.producer.put(make_sample(self.number), version=version, key=("p", self.number), timeout=0)
        except RecordStale:
            assert version < self.bound
        except RingFull:
            assert self.kept() == SLOTS
        else:
            assert version >= self.bound and self.kept() < SLOTS
            self.ready.append((self.number, version))
            self.number += 1

    @rule(rank=RANKS, count=st.integers(1, 3))
    def get(self, rank: int, count: int) -> None:
        waiting = [
            idx for idx in range(len(self.log)) if idx not in self.acked[rank] and idx not in self.held[rank]
        ]
        self.ready = [entry for entry in self.ready if entry[1] >= self.bound]
        try:
            batch = self.groups[rank].get_batch(count, timeout=0)
        except RingTimeout:
            assert not waiting and len(self.ready) < count
            return
        if waiting:
            idx = waiting[0]
        else:
            idx = len(self.log)
            self.log.append([number for number, _ in self.ready[:count]])
            del self.ready[:count]
        assert numbers(batch) == self.log[idx]
        self.held[rank][idx] = batch

    @precondition(lambda self: any(self.held))
    @rule(rank=RANKS, data=st.data(), ack=st.booleans(), keep=st.booleans())
    def finish(self, rank: int, data: st.DataObject, ack: bool, keep: bool) -> None:
        if not self.held[rank]:
            return
        idx = data.draw(st.sampled_from(sorted(self.held[rank])))
        if ack:
            self.held[rank][idx].ack()
            self.acked[rank].add(idx)
        if not keep:
            self.held[rank].pop(idx).release()

    @rule(rank=RANKS)
    def restart(self, rank: int) -> None:
        for batch in self.held[rank].values():
            batch.release()
        self.held[rank].clear()
        self.handles[rank].detach()
        self.join(rank)

    @rule(version=st.integers(0, 3))
    def evict(self, version: int) -> None:
        self.bound = max(self.bound, version)
        stale = [entry for entry in self.ready if entry[1] < self.bound]
        assert self.producer.evict(version) == len(stale)
        self.ready = [entry for entry in self.ready if entry[1] >= self.bound]

    @rule()
    def rebuild(self) -> None:
        self.producer.rebuild()

    @invariant()
    def counts_agree(self) -> None:
        assert self.producer.check() == ""
        stats = self.producer.stats()
        assert stats.num_slots - stats.num_free == self.kept()
        assert stats.depth == len(self.ready)

    def teardown(self) -> None:
        self.held = [{}, {}]
        self.stack.close()


RingModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRingModel = RingModel.TestCase
