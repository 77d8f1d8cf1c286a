"""Refills: an engine that comes back gets the committed version at once, from a replica that serves it.

    an engine registered, was quarantined, or a flight is over
      -> a target that holds no version, a source of the same tp that serves    protocol.prepare_refill
      -> target: pause, leave its old weight group
      -> source: give_weights    its ranks wait for the target's; it samples on
      -> target: take_weights    rank j from rank j, all ranks verify           protocol.verified | failed
      -> it resumes and serves; the trainer meets it when it looks next

The trainer takes no part, so an engine does not wait for the end of its step. It does so where nobody serves,
where the trainer is meeting the engine already, and for the last attempt before an engine counts as lost: a
trainer may reach what a replica cannot. A staged version has to land first, on the engines that staged it.

A refill ends within `NUM_TIMEOUTS` deadlines, then a resume; its failure counts against the target, if the
source still attests the version. A source that does not give it is not asked again for this version; what
comes from one that is put out meanwhile is not served.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.control import protocol
from asyncrl.control.messages import EngineStatus
from asyncrl.control.protocol import MAX_FAILURES, Flight
from asyncrl.control.roster import MARGIN_S, Roster, Seat, leave_group, outcome
from asyncrl.control.steps import Steps
from asyncrl.types import PolicyVersion

NUM_TIMEOUTS = 1.5
"""A refill's share of time, in deadlines of one step: a publication that waits for its end, and for a resume,
must not miss its own deadline at the trainer."""


class Refills:
    """Not thread-safe: one event loop owns it.

    Args:
        timeout_s: deadline of every step of an engine.
        may_begin: whether nothing but a flight forbids one, that is, no staged version waits to land.
    """

    def __init__(self, roster: Roster, steps: Steps, timeout_s: float, may_begin: Callable[[], bool]) -> None:
        self._roster = roster
        self._steps = steps
        self._timeout_s = timeout_s
        self._may_begin = may_begin
        self._task: asyncio.Task[None] | None = None
        self._later: asyncio.TimerHandle | None = None
        self._num_refills = 0
        self._given: Counter[str] = Counter()  # refills in which an engine was the source
        self._useless: dict[tuple[str, int], PolicyVersion] = {}  # (name, start) -> what it could not give

    def look(self) -> None:
        """Begin a refill if an engine needs one and another can give it; called after every change."""
        if self._task is not None or self._next() is None:
            return
        wait_s = self._steps.trainer_first_s
        if wait_s == 0.0:
            self._task = asyncio.ensure_future(self._run())
            self._task.add_done_callback(self._ended)
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(wait_s, self._look_later)

    def _look_later(self) -> None:
        self._later = None
        self.look()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            task.result()
            self.look()

    def _next(self) -> tuple[Seat, Seat] | None:
        """A target and its source."""
        fleet = self._roster.fleet
        if fleet.flight is not None or fleet.committed < 0 or not self._may_begin():
            return None
        seats = sorted(self._roster, key=lambda seat: (self._given[seat.info.name], seat.info.name))
        for target in sorted(filter(self._needs_version, seats), key=lambda seat: seat.info.name):
            for source in filter(self._can_give, seats):
                if source.info.tp == target.info.tp:
                    return target, source
        return None

    def _needs_version(self, seat: Seat) -> bool:
        member = self._roster.fleet.members[seat.info.name]
        meets = seat.work is not None or member.plan is not None
        waits = member.status is EngineStatus.QUARANTINED or (
            member.status is EngineStatus.JOINING and not meets
        )
        return waits and member.num_failures < MAX_FAILURES

    def _can_give(self, seat: Seat) -> bool:
        meets = seat.work is not None and not seat.work.done()
        committed = self._roster.fleet.committed
        useless = self._useless.get((seat.info.name, seat.info.incarnation)) == committed
        return self._serves(seat) and not meets and not useless

    def _serves(self, seat: Seat) -> bool:
        serves = self._roster.fleet.members[seat.info.name].status is EngineStatus.SERVING
        return serves and self._roster.holds(seat)

    async def _run(self) -> None:
        """One refill, from its turn to its end."""
        async with self._steps.refilling:
            async with self._steps.settling:
                pair = self._next()  # others may have had their turn
                if pair is None or self._steps.trainer_first_s > 0.0:
                    return
                target, source = pair
                self._roster.fleet = protocol.prepare_refill(
                    self._roster.fleet, target.info.name, source.info.name
                )
            flight = self._roster.fleet.flight
            assert flight is not None, "it was prepared"
            reason = "the refill was given up"
            try:
                reason = await self._refill(flight, target, source)
            finally:
                await self._end(flight, target, reason)

    async def _refill(self, flight: Flight, target: Seat, source: Seat) -> str:
        """Returns why it went no further, where that is not the target's failure."""
        loop, steps = asyncio.get_running_loop(), self._steps
        until = loop.time() + NUM_TIMEOUTS * self._timeout_s
        await self._roster.changed()
        # Paused anew, whatever is known: it may have been put out a moment ago.
        if not await steps.pause(flight, target):
            return ""
        await outcome(asyncio.ensure_future(leave_group(target)), self._timeout_s / 2, "")
        self._num_refills += 1
        self._given[source.info.name] += 1
        group = f"refill-{target.info.name}-{target.info.incarnation}-{self._num_refills}"
        left_s = until - loop.time()
        address, reason = await self._ask(
            source.engine.give_weights(group, flight.version, left_s),
            left_s / 2,
            f"{source.info.name} did not offer version {flight.version} to {target.info.name}",
        )
        if reason:
            self._set_aside(source, flight.version)
        if reason or not steps.waits_for(flight, target):
            return reason
        self._roster.fleet = protocol.begin_transfer(self._roster.fleet, flight.version, flight.epoch)
        timeout_s = min(self._timeout_s, until - loop.time())
        target.taking = asyncio.ensure_future(
            target.engine.take_weights(group, address, flight.version, timeout_s)
        )
        await self._roster.changed()
        await self._judge(flight, target, source, timeout_s)
        return ""

    async def _judge(self, flight: Flight, target: Seat, source: Seat, timeout_s: float) -> None:
        """Wait for the target's ranks to verify."""
        name, version = target.info.name, flight.version
        what = f"{name} did not take version {version} from {source.info.name}"
        assert target.taking is not None, "it takes the version"
        reason = await outcome(target.taking, timeout_s + MARGIN_S, what)
        target.taking = None
        counts = bool(reason) and await self._still_gives(source, version)
        reason = reason or self._distrust(source)
        if not self._steps.waits_for(flight, target):
            return
        if reason:
            self._roster.fleet = protocol.failed(self._roster.fleet, name, reason, counts=counts)
        else:
            self._roster.fleet = protocol.verified(self._roster.fleet, version, flight.epoch, name)
        await self._roster.changed()

    async def _still_gives(self, source: Seat, version: PolicyVersion) -> bool:
        """Whether it was not the source that broke a transfer off."""
        attested = None
        if self._serves(source):
            what = f"{source.info.name} did not attest its version"
            attested, _ = await self._ask(source.engine.version(), MARGIN_S, what)
        if attested != version:
            self._set_aside(source, version)
        return attested == version and self._serves(source)

    def _distrust(self, source: Seat) -> str:
        """Why a version that has arrived whole must not be served; a source that died has given it."""
        member = self._roster.fleet.members[source.info.name]
        if self._roster.seat(source.info.name) is not source or member.status is EngineStatus.LOST:
            return ""
        return "" if self._serves(source) else f"{member.name}, which gave it, was put out: {member.reason}"

    async def _ask(
        self, question: Coroutine[Any, Any, Any], timeout_s: float, failure: str
    ) -> tuple[Any, str]:
        """An engine's answer, or why there is none."""
        answers = []

        async def ask() -> None:
            answers.append(await question)

        reason = await outcome(asyncio.ensure_future(ask()), timeout_s, failure)
        return (None, reason) if reason else (answers[0], "")

    def _set_aside(self, source: Seat, version: PolicyVersion) -> None:
        self._useless[source.info.name, source.info.incarnation] = version

    async def _end(self, flight: Flight, target: Seat, reason: str) -> None:
        """End the flight; a target that verified serves."""
        roster, version, epoch = self._roster, flight.version, flight.epoch
        async with self._steps.settling:
            flight = protocol.in_flight(roster.fleet, "the end of a refill", version, epoch)
            if flight.transferring and not flight.waiting:
                roster.fleet = protocol.commit(roster.fleet, version, epoch)
            else:
                target.cancel()
                roster.fleet = protocol.abort(roster.fleet, version, epoch, reason)
            if target.info.name in flight.verified:
                await self._steps.resume(target)
            await roster.changed()

    def close(self) -> None:
        for waiting in (self._task, self._later):
            if waiting is not None:
                waiting.cancel()
