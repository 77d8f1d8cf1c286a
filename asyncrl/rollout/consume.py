"""Third stage: finished groups get their place in the order of training and go into the rings.

    sequencer: which group, which position --> journal --> balance: which ring --> sink --> batch hook

One coroutine does this, so the rings receive groups in the order of their positions. Groups that a
restart has to put again come first; a ring that has them already ignores them.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.control.ledger import SampleState
from asyncrl.rollout.admission import RingBalance
from asyncrl.rollout.group import LiveGroup, complete
from asyncrl.rollout.records import GroupReleased
from asyncrl.rollout.report import ReleasedBatch, RolloutRecord, describe, summarize
from asyncrl.rollout.rewarding import Decode
from asyncrl.rollout.sinks import SampleSink
from asyncrl.rollout.state import RolloutState
from asyncrl.rollout.waiting import within

OnBatchReleased = Callable[[ReleasedBatch], None]


class Releaser:
    """``put_again`` are (position, group) that a checkpoint does not have, in order."""

    def __init__(
        self,
        state: RolloutState,
        sink: SampleSink,
        decode: Decode,
        on_batch_released: OnBatchReleased,
        put_again: tuple[tuple[int, LiveGroup], ...],
    ) -> None:
        self._state = state
        self._sink = sink
        self._decode = decode
        self._on_batch_released = on_batch_released
        self._put_again = put_again
        self._balance = RingBalance(state.settings.groups_per_batch, state.settings.num_rings)
        self._records: list[RolloutRecord] = []  # of the batch that is being filled

    async def run(self) -> None:
        """Release until the run is complete."""
        for position, group in self._put_again:
            await self._put(group, position)
        self._put_again = ()
        state = self._state
        while not state.complete:
            await state.progress.wait_until(lambda: state.sequencer.next_group() is not None, self._blocker)
            for group, position in await self._release_finished():
                await self._put(group, position)

    async def _release_finished(self) -> list[tuple[LiveGroup, int]]:
        """Fix the positions of all groups that may go now, in one transaction."""
        state = self._state
        released: list[tuple[LiveGroup, int]] = []
        while (group_id := state.sequencer.next_group()) is not None:
            position = state.sequencer.release(group_id)
            released.append((state.groups.pop(group_id), position))
        await state.commit.write(*(GroupReleased(g.group_id, position) for g, position in released))
        for group, position in released:
            state.ledger.move(state.settings.sample_ids(group.group_id), SampleState.IN_RING)
            state.book.released(group.group_id, position)
        return released

    async def _put(self, group: LiveGroup, position: int) -> None:
        state = self._state
        rewarded = complete(group)
        placement = self._balance.place(position, group.num_tokens)
        await within(
            state.settings.progress_timeout_s,
            self._sink.put_group(rewarded.samples, placement),
            lambda: f"ring {placement.ring_idx} to take a group of batch {placement.batch_idx}",
        )
        state.num_put = position + 1
        state.progress.notify()
        self._records += describe(rewarded, placement, self._decode)
        if state.num_put % state.settings.groups_per_batch == 0:
            batch, self._records = summarize(placement.batch_idx, self._records), []
            self._on_batch_released(batch)

    def _blocker(self) -> str:
        state = self._state
        first = state.sequencer.blocking()
        if not first:
            return state.gate.blocker(state.gate.version + 1)
        requests = "; ".join(state.requests_in_flight())
        return f"groups {', '.join(map(str, first))} to finish (requests in flight: {requests or 'none'})"
