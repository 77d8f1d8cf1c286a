"""The rollout loop of one process: prompts in, rewarded groups out in training order, one path for all modes.

    prompts --> Feed --> groups --> Processor, a task per sample --> finished groups --> Releaser --> rings
                 |                   |         |                                           |
             admission            engines    reward                                    sequencer
         (staleness bound)  (prefix, resumed)                                     (position, journal)

What blocks what:

* Feed waits for admission (the trainer's next policy version), never for a ring or a reward;
* a sample waits for the gate (a publication), its engine, the journal, its reward;
* Releaser waits for the oldest unfinished group where the bound demands it, and for a full ring.

Every one of these waits ends by a deadline with an error naming whom it waited for; an exception in any
coroutine ends `run` with it. Records are durable before what follows from them: a start before the
request, segments before the next request, a reward before the release, a release before the ring.
Synchronous training is ``max_staleness = 0`` of this same loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from asyncrl.control.ledger import LedgerCounts
from asyncrl.engines.base import Engine
from asyncrl.rewards.base import Reward
from asyncrl.rollout.consume import OnBatchReleased, Releaser
from asyncrl.rollout.feed import Feed
from asyncrl.rollout.group import LiveGroup
from asyncrl.rollout.journal import JournalStore
from asyncrl.rollout.process import Processor, abort
from asyncrl.rollout.records import BatchesAcknowledged
from asyncrl.rollout.report import RolloutStats
from asyncrl.rollout.restore import PromptSource, restore
from asyncrl.rollout.rewarding import Decode
from asyncrl.rollout.settings import RolloutSettings
from asyncrl.rollout.sinks import SampleSink
from asyncrl.rollout.state import begin
from asyncrl.rollout.waiting import RolloutError, first_failure, within
from asyncrl.types import PolicyVersion

WIND_DOWN_S = 10.0
"""How long `stop` waits for engines to hand back what they have."""


class Rollouter:
    """Not thread-safe: one event loop owns it.

    ``start_batch`` is the batch with which the trainer begins, and the policy version that the engines
    serve when `run` is called; 0 for a new run. The constructor reads the journal and raises JournalError.
    """

    def __init__(
        self,
        *,
        engines: Mapping[str, Engine],
        prompts: PromptSource,
        reward: Reward,
        decode: Decode,
        sink: SampleSink,
        journal: JournalStore,
        settings: RolloutSettings,
        start_batch: int = 0,
        on_batch_released: OnBatchReleased = lambda batch: None,
    ) -> None:
        restored = restore(journal.load(), prompts, settings, start_batch)
        self._state = begin(restored, engines, journal, settings, start_batch)
        self._feed = Feed(self._state, prompts)
        self._processor = Processor(self._state, reward, decode)
        self._releaser = Releaser(self._state, sink, decode, on_batch_released, restored.released)
        self._stop = asyncio.Event()

    # --- what the control plane tells ---

    def on_version(self, version: PolicyVersion, num_batches_consumed: int) -> None:
        """The engines serve ``version``; the trainer has taken batches below ``num_batches_consumed``.

        Raises:
            RolloutError: the version went back (a trainer that restarts needs a new rollouter).
        """
        current = self._state.gate.version
        if version < current:
            raise RolloutError(f"policy version {version} came after {current}; restart the rollouter")
        self._state.book.consumed(num_batches_consumed)
        self._state.gate.publish(version)

    async def on_checkpoint(self, num_batches: int, oldest_kept: int) -> None:
        """Batches below ``num_batches`` are durable; no kept checkpoint is older than ``oldest_kept``.

        Needs `run` to be running. A number that was told before has no effect.
        """
        if self._state.book.acknowledged(num_batches):
            await self._state.commit.write(BatchesAcknowledged(num_batches, oldest_kept))

    def set_paused(self, paused: bool) -> None:
        """While paused nothing is sent to engines; what runs there goes on until it ends or is cut."""
        self._state.gate.set_paused(paused)

    async def drained(self, timeout_s: float) -> None:
        """After `set_paused`: return when no request is in flight; raises RolloutError naming stragglers."""
        in_flight = self._state.requests_in_flight

        def stragglers() -> str:
            return "; ".join(in_flight())

        drained = self._state.progress.wait_until(lambda: not in_flight(), stragglers)
        await within(timeout_s, drained, stragglers)

    def add_engine(self, name: str, engine: Engine) -> None:
        """Use a replica that serves the current policy version."""
        self._state.router.add(name, engine)

    def uses_engine(self, name: str) -> bool:
        """Whether requests go to a replica; one that failed too often gets none until it is added again."""
        return name in self._state.router.names

    def remove_engine(self, name: str, reason: str) -> None:
        """Send nothing more to a replica; what runs there ends or fails by itself."""
        self._state.router.remove(name, reason)

    def stop(self) -> None:
        """End `run` without an error; unfinished samples are saved as far as they got."""
        self._stop.set()

    # --- what it tells ---

    @property
    def complete(self) -> bool:
        """Whether every batch of a limited run is in the rings."""
        return self._state.complete

    def counts(self) -> LedgerCounts:
        """Where every sample is."""
        return self._state.ledger.counts()

    def stats(self) -> RolloutStats:
        """Running totals; call it inside the event loop."""
        state, counters, errors = self._state, self._processor.sampler.counters, self._processor.errors
        return RolloutStats(
            tokens_generated=counters.tokens_generated,
            num_requests=counters.num_requests,
            num_interrupted=counters.num_interrupted,
            num_lost_requests=counters.num_lost,
            engine_busy_s=state.router.busy_s,
            num_engines=len(state.router.names),
            reward_errors=errors.num_errors,
            reward_error_rate=errors.rate,
            groups_running=state.sequencer.num_unreleased - state.sequencer.num_waiting,
            groups_waiting=state.sequencer.num_waiting,
            released_batches=state.num_put // state.settings.groups_per_batch,
            next_prompt_idx=state.next_group_id,
        )

    # --- the loop ---

    async def run(self) -> None:
        """Produce batches until `stop`; call it once.

        Raises:
            RolloutError, JournalError, RingError, ...: the first failure of any part, as it was raised.
        """
        try:
            async with asyncio.TaskGroup() as parts:
                tasks: list[asyncio.Task[None]] = []

                def begin_group(group: LiveGroup) -> None:
                    waiting = (sample for sample in group.samples if sample.reward is None)
                    tasks.extend(parts.create_task(self._processor.run(group, s)) for s in waiting)

                tasks.append(parts.create_task(self._state.commit.run()))
                tasks.append(parts.create_task(self._releaser.run()))
                for group in tuple(self._state.groups.values()):
                    begin_group(group)
                tasks.append(parts.create_task(self._feed.run(begin_group)))
                await self._stop.wait()
                await self._wind_down()
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            self._state.commit.close()

    async def _wind_down(self) -> None:
        """Interrupt what runs, so that every token that engines hand back in time is in the journal."""
        self.set_paused(True)
        groups = self._state.groups.values()
        await abort(s.request for group in groups for s in group.samples if s.request is not None)
        with contextlib.suppress(RolloutError):  # a hung engine costs its unsaved tokens, not the exit
            await self.drained(WIND_DOWN_S)
        await self._state.commit.write()
