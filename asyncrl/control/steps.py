"""What every flight asks of one engine, under a deadline: to pause, to do its part, to resume.

    step -- done -----------------------> the engine is still in the flight
         -- failed, or not in time -----> `protocol.failed`: it leaves the flight; the others go on
         -- lost or restarted meanwhile > nothing: the flight has forgotten it

Also whose turn it is. The next flight waits until the last one's engines run (`settling`). A publication or
catch-up waits for the end of a refill (`refilling`), and goes first afterwards: what it finds then it has to
look at again, which takes the trainer a while.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from asyncrl.control import protocol
from asyncrl.control.protocol import Flight
from asyncrl.control.roster import Roster, Seat, outcome
from asyncrl.engines.base import PauseMode


class Steps:
    """Not thread-safe: one event loop owns it. ``timeout_s`` is the deadline of pausing and resuming."""

    def __init__(self, roster: Roster, pause_mode: PauseMode, timeout_s: float) -> None:
        self._roster = roster
        self._pause_mode = pause_mode
        self._timeout_s = timeout_s
        self._trainer_until = 0.0
        self.settling = asyncio.Lock()
        self.refilling = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def trainers_turn(self) -> AsyncIterator[None]:
        """Within it the trainer may begin a flight: no refill is under way, and the last flight is over."""
        if self.refilling.locked():
            self._trainer_until = asyncio.get_running_loop().time() + 2 * self._timeout_s
        async with self.refilling, self.settling:
            yield
            self._trainer_until = 0.0

    @property
    def trainer_first_s(self) -> float:
        """How much longer a refill has to wait, because the trainer waited for one."""
        return max(0.0, self._trainer_until - asyncio.get_running_loop().time())

    async def pause(self, flight: Flight, seat: Seat) -> bool:
        seat.paused_at = asyncio.get_running_loop().time()
        paused = await self.step(flight, seat, seat.engine.pause(self._pause_mode), self._timeout_s, "pause")
        if not paused:
            seat.paused_at = None
        return paused

    async def step(
        self, flight: Flight, seat: Seat, work: Coroutine[Any, Any, None], timeout_s: float, what: str
    ) -> bool:
        """One engine's step in a flight; returns whether it is still in it. One that fails leaves it."""
        name = seat.info.name
        reason = await outcome(asyncio.ensure_future(work), timeout_s, f"{name} did not {what}")
        if not self.waits_for(flight, seat):
            return False
        if reason:
            self._roster.fleet = protocol.failed(self._roster.fleet, name, reason)
            await self._roster.changed()
        return not reason

    async def resume(self, seat: Seat) -> tuple[str, float]:
        """Returns name and seconds of the pause; an engine that cannot resume is lost."""
        work = asyncio.ensure_future(seat.engine.resume())
        reason = await outcome(work, self._timeout_s, f"{seat.info.name} did not resume")
        paused_at, seat.paused_at = seat.paused_at, None
        if reason:
            self.lose(seat, reason)
        now = asyncio.get_running_loop().time()
        return seat.info.name, now - (now if paused_at is None else paused_at)

    async def put_out(self, name: str, reason: str) -> None:
        """Quarantine an engine that is in no flight, and interrupt what it samples; no other flight begins
        meanwhile."""
        async with self.settling:
            seat = self._roster.seat(name)
            if not self._roster.holds(seat):
                return
            self._roster.fleet = protocol.failed(self._roster.fleet, name, reason)
            await self._roster.changed()
            if seat.paused_at is not None:
                return
            seat.paused_at = asyncio.get_running_loop().time()
            work = asyncio.ensure_future(seat.engine.pause(self._pause_mode))
            failure = await outcome(work, self._timeout_s, f"{name} did not pause")
            if failure and self._roster.holds(seat):
                self.lose(seat, failure)
                await self._roster.changed()

    def lose(self, seat: Seat, reason: str) -> None:
        info, fleet = seat.info, self._roster.fleet
        self._roster.fleet = protocol.lost(fleet, info.name, info.incarnation, reason)

    def waits_for(self, flight: Flight, seat: Seat) -> bool:
        """Whether the flight is under way and this incarnation has yet to verify or fail."""
        now = self._roster.fleet.flight
        if now is None or (now.version, now.epoch) != (flight.version, flight.epoch):
            return False
        return seat.info.name in now.waiting and self._roster.holds(seat)
