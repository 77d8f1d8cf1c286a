"""The coordinator: policy version, registry of engines and rings, the publication protocol.

It holds no sample and no weight; what it knows is one immutable `RunState`, replaced under a condition so
that everybody can wait for a change. What it knows of engines is the pure fleet of
`asyncrl.control.protocol`, which `Roster`, `Publishing` and `Refills` move; the state shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from asyncrl.control.messages import (
    CheckpointDone,
    CommitOrder,
    EngineFailed,
    EngineInfo,
    EngineLost,
    FlightName,
    HeldOut,
    Joined,
    JoinOrder,
    Landing,
    LinkOrder,
    Phase,
    ProcessInfo,
    Publication,
    PublicationResult,
    RolloutReport,
    RunState,
    StageOrder,
    StepDone,
    TrainerStart,
)
from asyncrl.control.protocol import Refused
from asyncrl.control.publishing import Publishing
from asyncrl.control.refill import Refills
from asyncrl.control.roster import EngineFactory, Roster
from asyncrl.control.staging import Staging
from asyncrl.control.steps import Steps
from asyncrl.engines.base import EngineError, Interrupt

DRAIN_POLL_S = 1.0


class Coordinator:
    """Not thread-safe: one event loop owns it."""

    def __init__(
        self,
        *,
        make_engine: EngineFactory,
        interrupt: Interrupt,
        timeout_s: float,
        probe_prompts: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        self._timeout_s = timeout_s
        self._state = RunState()
        self._changed = asyncio.Condition()
        self._roster = Roster(make_engine, timeout_s, self._show_fleet)
        self._steps = Steps(self._roster, "retract" if interrupt == "drain" else interrupt, timeout_s)
        self._publishing = Publishing(
            self._roster,
            self._steps,
            timeout_s=timeout_s,
            probe_prompts=probe_prompts,  # logprobs of these are part of every result, if any
            drain=self._drain if interrupt == "drain" else None,
        )
        self._staging = Staging(self._roster, self._steps, self._publishing, timeout_s)
        self._refills = Refills(
            self._roster, self._steps, timeout_s, may_begin=lambda: not self._staging.waits_to_land
        )

    @property
    def state(self) -> RunState:
        return self._state

    async def wait_for_change(self, after: int, timeout_s: float) -> RunState:
        """The state as soon as its revision exceeds ``after``, or after ``timeout_s`` as it is."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self._state.revision > after)
        return self._state

    async def _update(self, **changes: Any) -> None:
        async with self._changed:
            self._state = self._state.model_copy(update={**changes, "revision": self._state.revision + 1})
            self._changed.notify_all()

    async def _show_fleet(self) -> None:
        fleet = self._roster.fleet
        await self._update(
            engines=self._roster.infos(),
            policy_version=fleet.committed,
            epoch=fleet.epoch,
            draining=self._state.draining and fleet.flight is not None,
        )
        self._refills.look()

    # --- what the parts of the run report ---

    async def register_engine(self, engine: EngineInfo) -> None:
        await self._roster.register(engine)

    async def engine_lost(self, report: EngineLost) -> None:
        await self._roster.lost(report)

    async def register_process(self, process: ProcessInfo) -> None:
        others = tuple(known for known in self._state.processes if known.name != process.name)
        await self._update(processes=(*others, process))

    async def trainer_started(self, start: TrainerStart) -> None:
        await self._update(start_step=start.step, batches_trained=start.step, rings=start.rings)

    async def step_done(self, done: StepDone) -> None:
        if done.batch_idx != self._state.batches_trained:
            raise Refused(
                f"batch {done.batch_idx} reported as trained, expected batch {self._state.batches_trained}"
            )
        await self._update(batches_trained=done.batch_idx + 1)

    async def checkpoint_done(self, done: CheckpointDone) -> None:
        await self._update(checkpoint_step=done.step, oldest_checkpoint_step=done.oldest_step)

    async def rollout_report(self, report: RolloutReport) -> None:
        await self._update(rollout=report)

    async def held_out(self, result: HeldOut) -> None:
        await self._update(held_out=(*self._state.held_out, result))

    async def set_phase(self, phase: Phase) -> None:
        await self._update(phase=phase)

    async def request_stop(self) -> None:
        await self._update(stop_requested=True)

    async def fail(self, reason: str) -> None:
        """Record the first failure that ends the run; later ones are its consequences."""
        if not self._state.failure:
            await self._update(failure=reason)

    # --- weight groups and publications: see `Roster`, `Publishing`, `Staging`, `Refills` ---

    async def join_weight_group(self, order: JoinOrder) -> None:
        await self._roster.join(order)

    async def joined(self, report: Joined) -> str:
        return await self._roster.joined(report, self._steps.put_out)

    async def link(self, order: LinkOrder) -> dict[str, str]:
        return await self._roster.link(order)

    async def prepare(self, publication: Publication) -> tuple[str, ...]:
        return await self._publishing.prepare(publication)

    async def transfer(self, order: FlightName) -> None:
        await self._publishing.transfer(order)

    async def stage(self, order: StageOrder) -> tuple[str, ...]:
        return await self._staging.stage(order)

    async def land(self, order: Landing) -> PublicationResult:
        try:
            return await self._counted(self._staging.land(order))
        finally:
            self._refills.look()

    async def quarantine(self, report: EngineFailed) -> None:
        await self._staging.quarantine(report)

    async def commit(self, order: CommitOrder) -> PublicationResult:
        return await self._counted(self._publishing.commit(order))

    async def _counted(self, work: Coroutine[Any, Any, PublicationResult]) -> PublicationResult:
        before = self._state.policy_version
        result = await work
        if result.version > before:
            await self._update(publications=self._state.publications + 1)
        return result

    async def abort(self, order: FlightName) -> None:
        await self._publishing.abort(order, "the trainer gave the publication up")

    async def _drain(self) -> None:
        """Wait until the rollouter has no sample running."""
        await self._update(draining=True)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while self._state.rollout.counts.running > 0:
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(
                    f"drain: {self._state.rollout.counts.running} samples still run after"
                    f" {self._timeout_s:.0f} s;"
                    " raise weights.timeout_s or set rollout.interrupt to abort"
                )
            await self.wait_for_change(self._state.revision, DRAIN_POLL_S)

    async def close(self) -> None:
        self._refills.close()
        self._publishing.close()
        await self._roster.close()
