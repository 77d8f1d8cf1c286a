"""Versions that engines receive beside the weights that they serve, so that a flight is a local copy long.

    trainer leader            here                                engine (every TP rank)
    stage(v)          ->      start stage_weights                 ->  receive and verify in a second copy
    [all trainer ranks send; every engine rank tells the leader that it has verified]
    land(v)           ->      a whole flight                      ->  pause, take the copy, resume as v

Nothing is out of service until the version lands: what serves meanwhile is the committed version, whole, and
a version that does not arrive has touched nothing. Who did not verify it has no sender any more, and is
quarantined before the others land. Until then nobody may begin to serve who has not staged it, for the
landing would leave that engine out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.control.messages import EngineFailed, Landing, Plan, PublicationResult, StageOrder
from asyncrl.control.protocol import Refused
from asyncrl.control.publishing import Publishing
from asyncrl.control.roster import Roster, Seat, outcome
from asyncrl.control.steps import Steps
from asyncrl.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Staged:
    """What the engines were told to stage last."""

    version: PolicyVersion = -1
    epoch: int = -1
    plans: Mapping[str, Plan] = field(default_factory=dict)


class Staging:
    """Not thread-safe: one event loop owns it. ``timeout_s`` is the deadline of every step of an engine."""

    def __init__(self, roster: Roster, steps: Steps, publishing: Publishing, timeout_s: float) -> None:
        self._roster = roster
        self._steps = steps
        self._publishing = publishing
        self._timeout_s = timeout_s
        self._staged = Staged()
        self.waits_to_land = False

    async def stage(self, order: StageOrder) -> tuple[str, ...]:
        """Let engines receive a version while they serve; returns those that have begun.

        Raises:
            Refused: as a publication of the version would be.
        """
        await self._publishing.check(order)
        if (order.version, order.epoch) == (self._staged.version, self._staged.epoch):
            raise Refused(f"STAGE of version {order.version} (epoch {order.epoch}) came again")
        self._staged = Staged(order.version, order.epoch, order.plans)
        self.waits_to_land = True
        seats = [self._roster.seat(name) for name in sorted(order.plans)]
        began = await asyncio.gather(*(self._begin(seat, order) for seat in seats))
        return tuple(seat.info.name for seat, has_begun in zip(seats, began, strict=True) if has_begun)

    async def _begin(self, seat: Seat, order: StageOrder) -> bool:
        name = seat.info.name
        plan_hash = order.plans[name].plan_hash
        work = seat.engine.stage_weights(order.place, seat.group, order.version, plan_hash, self._timeout_s)
        what = f"{name} did not begin to stage version {order.version}"
        reason = await outcome(asyncio.ensure_future(work), self._timeout_s, what)
        if reason:
            await self._steps.put_out(name, reason)
        return not reason

    async def land(self, order: Landing) -> PublicationResult:
        """Bring the staged version into service; engines that did not verify it are quarantined.

        Raises:
            Refused: it was not staged, another publication is in flight, or no engine is left to take it.
            EngineError: the version reached no engine and is not committed.
        """
        if order.version != self._staged.version:
            raise Refused(f"version {order.version} was not staged, version {self._staged.version} was")
        try:
            for name, reason in sorted(order.failures.items()):
                await self._steps.put_out(name, reason)
            return await self._publishing.take_staged(order.version, self._staged.plans)
        finally:
            self.waits_to_land = False

    async def quarantine(self, report: EngineFailed) -> None:
        """The trainer can no longer send to an engine; told of one that is out already, nothing changes."""
        if self._roster.fleet.member(report.name).plan is not None:
            await self._steps.put_out(report.name, report.reason)
