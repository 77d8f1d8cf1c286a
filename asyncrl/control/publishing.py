"""Carries the publication protocol out on real engines: what `asyncrl.control.protocol` decides, with I/O.

    trainer leader            here                                engine (every TP rank)
    prepare(v)        ->      pause, or drain and pause           ->  interrupt running samples, hold new ones
    transfer(v)       ->      start receive_weights               ->  receive buckets, verify, all ranks agree
    [all trainer ranks send their buckets to the engines' ranks, nobody in between]
    commit(v)         ->      await every receive                 ->  verified: resume as version v
                                                                      not: stay paused, quarantined

A state is decided before anything follows from it, and looked at again after every wait: an engine may be
lost, or start again, at any point. Every wait has a deadline; a flight that its trainer does not end is
aborted. What may happen in which order is the pure machine's to say; this module only adds time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping

from asyncrl.control import protocol
from asyncrl.control.messages import (
    CommitOrder,
    EngineVerification,
    FlightName,
    Plan,
    Publication,
    PublicationResult,
)
from asyncrl.control.protocol import Fleet, Flight
from asyncrl.control.roster import MARGIN_S, Roster, Seat
from asyncrl.control.steps import Steps
from asyncrl.engines.base import EngineError, WeightAction
from asyncrl.types import PolicyVersion


class Publishing:
    """The flights of a run. Not thread-safe: one event loop owns it.

    Args:
        steps: what it asks of engines, and whose turn it is.
        timeout_s: deadline of pausing, of one transfer, of resuming.
        probe_prompts: token ids whose logprobs are part of every result, if any.
        drain: returns when no sample is running; raises EngineError after its deadline. None: samples need
            not end before a pause.
    """

    def __init__(
        self,
        roster: Roster,
        steps: Steps,
        *,
        timeout_s: float,
        probe_prompts: tuple[tuple[int, ...], ...],
        drain: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._roster = roster
        self._steps = steps
        self._drain = drain
        self._timeout_s = timeout_s
        self._probe_prompts = probe_prompts
        self._overdue: asyncio.TimerHandle | None = None
        self._aborting: set[asyncio.Task[None]] = set()

    async def prepare(self, publication: Publication) -> tuple[str, ...]:
        """Take the engines out of service and pause them; returns those that are ready to receive.

        It waits for the end of a refill that is under way, which has a deadline.

        Raises:
            Refused: see `protocol.prepare`.
            EngineError: the samples did not drain in time; the engines serve as before.
        """
        async with self._steps.trainers_turn():
            before = self._roster.fleet
            plans = publication.plans
            self._roster.fleet = protocol.prepare(before, publication.version, publication.epoch, plans)
        order = FlightName(version=publication.version, epoch=publication.epoch)
        return await self._pause_all(order, before)

    async def _pause_all(self, order: FlightName, before: Fleet) -> tuple[str, ...]:
        roster = self._roster
        flight = self._in_flight("PREPARE", order)
        for name in sorted(flight.waiting):
            roster.seat(name).served = before.members[name].version >= 0
        limit_s = 4 * self._timeout_s + 2 * MARGIN_S
        self._overdue = asyncio.get_running_loop().call_later(limit_s, self._abort_later, order, limit_s)
        await roster.changed()
        if self._drain is not None and any(roster.seat(name).served for name in flight.waiting):
            try:
                await self._drain()
            except EngineError as error:
                await self.abort(order, str(error))
                raise
        await asyncio.gather(*(self._pause(flight, name) for name in sorted(flight.waiting)))
        return tuple(sorted(self._in_flight("PREPARE", order).waiting))

    async def _pause(self, flight: Flight, name: str) -> None:
        seat = self._roster.seat(name)
        if seat.paused_at is None and self._steps.waits_for(flight, seat):
            await self._steps.pause(flight, seat)

    async def transfer(self, order: FlightName) -> None:
        """Let the paused engines receive; the trainer's ranks send from now on."""
        await self._transfer(order, "publish")

    async def _transfer(self, order: FlightName, action: WeightAction) -> None:
        roster = self._roster
        roster.fleet = protocol.begin_transfer(roster.fleet, order.version, order.epoch)
        flight = self._in_flight("TRANSFER", order)
        for name in sorted(flight.waiting):
            seat = roster.seat(name)
            seat.cancel()
            seat.work = asyncio.ensure_future(self._receive(flight, seat, action))
        await roster.changed()

    async def _receive(self, flight: Flight, seat: Seat, action: WeightAction) -> None:
        plan = self._roster.fleet.members[seat.info.name].plan
        assert plan is not None, "only engines with a plan take part"
        receiving = seat.engine.receive_weights(
            action, seat.group, flight.version, plan.plan_hash, self._timeout_s
        )
        what = f"verify version {flight.version}"
        ok = await self._steps.step(flight, seat, receiving, self._timeout_s + MARGIN_S, what)
        if ok and self._probe_prompts:
            checksums = self._take_checksums(seat)
            ok = await self._steps.step(flight, seat, checksums, self._timeout_s, "give checksums")
        if ok:
            self._roster.fleet = protocol.verified(
                self._roster.fleet, flight.version, flight.epoch, seat.info.name
            )

    async def _take_checksums(self, seat: Seat) -> None:
        seat.checksums = tuple(await seat.engine.checksums())

    async def commit(self, order: CommitOrder) -> PublicationResult:
        """Wait for every receive; engines that verified serve, the others are quarantined.

        Raises:
            Refused: another publication is in flight, or none, or this one is not transferring.
            EngineError: the version reached no engine and is not committed.
        """
        for name in sorted(self._in_flight("COMMIT", order).waiting):
            work = self._roster.seat(name).work
            if work is not None:
                with contextlib.suppress(asyncio.CancelledError):  # of the work: its engine was lost
                    await asyncio.shield(work)  # has a deadline of its own
        flight = self._in_flight("COMMIT", order)
        for name in sorted(flight.verified & order.failures.keys()):  # has no sender any more
            self._roster.fleet = protocol.failed(self._roster.fleet, name, order.failures[name])
        async with self._steps.settling:
            flight = self._in_flight("COMMIT", order)
            self._roster.fleet = protocol.commit(self._roster.fleet, order.version, order.epoch)
            self._flight_is_over()
            return await self._serve(flight)

    async def _serve(self, flight: Flight) -> PublicationResult:
        """Resume those that verified; the rollouter learns of them when they run."""
        seats = [self._roster.seat(name) for name in sorted(flight.verified)]
        paused_s = dict(await asyncio.gather(*(self._steps.resume(seat) for seat in seats)))
        verification = {s.info.name: v for s in seats if (v := await self._probe(s)) is not None}
        serving = [seat for seat in seats if self._roster.holds(seat)]
        await self._roster.changed()
        if not serving:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(flight.failed.items()))
            raise EngineError(f"version {flight.version} reached no engine: {reasons or 'none is left'}")
        return PublicationResult(
            version=flight.version,
            committed=tuple(seat.info.name for seat in serving),
            failed=dict(flight.failed),
            paused_s={seat.info.name: paused_s[seat.info.name] for seat in serving if seat.served},
            verification=verification,
        )

    async def _probe(self, seat: Seat) -> EngineVerification | None:
        """Checksums, and the logprobs of the fixed prompts, for which the engine must answer."""
        if not self._probe_prompts or not self._roster.holds(seat):
            return None
        try:
            logprobs = [tuple(await seat.engine.logprobs(prompt)) for prompt in self._probe_prompts]
        except EngineError as error:
            self._steps.lose(seat, str(error))
            return None
        return EngineVerification(checksums=seat.checksums, logprobs=tuple(logprobs))

    # --- a version that engines have staged: `asyncrl.control.staging` ---

    async def check(self, publication: Publication) -> None:
        """Raise Refused where `prepare` would; nothing changes."""
        async with self._steps.trainers_turn():
            fleet = self._roster.fleet
            protocol.prepare(fleet, publication.version, publication.epoch, publication.plans)

    async def take_staged(self, version: PolicyVersion, staged: Mapping[str, Plan]) -> PublicationResult:
        """The whole flight of a version that engines hold beside their live weights, under today's epoch.

        Raises:
            Refused: another publication is in flight, or no engine that staged it is left.
            EngineError: the version reached no engine and is not committed.
        """
        async with self._steps.trainers_turn():
            before = self._roster.fleet
            plans = {name: plan for name, plan in staged.items() if before.members[name].plan == plan}
            flight = FlightName(version=version, epoch=before.epoch)
            self._roster.fleet = protocol.prepare(before, flight.version, flight.epoch, plans)
        await self._pause_all(flight, before)
        await self._transfer(flight, "take")
        return await self.commit(CommitOrder(version=flight.version, epoch=flight.epoch))

    async def abort(self, order: FlightName, reason: str) -> None:
        """End a flight without its trainer; see the protocol's invariant 4."""
        async with self._steps.settling:
            await self._abort(order, reason)

    async def _abort(self, order: FlightName, reason: str) -> None:
        flight = self._in_flight("ABORT", order)
        self._roster.fleet = protocol.abort(self._roster.fleet, order.version, order.epoch, reason)
        self._flight_is_over()
        waiting = [self._roster.seat(name) for name in sorted(flight.waiting)]
        for seat in waiting:
            seat.cancel()
        serving: Iterable[Seat] = (self._roster.seat(name) for name in sorted(flight.verified))
        if not flight.transferring:
            serving = (seat for seat in waiting if seat.served and seat.paused_at is not None)
        await asyncio.gather(*(self._steps.resume(seat) for seat in serving))
        await self._roster.changed()

    def _abort_later(self, order: FlightName, limit_s: float) -> None:
        reason = f"the trainer did not end the publication of version {order.version} within {limit_s:.0f} s"
        task = asyncio.ensure_future(self.abort(order, reason))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    def _flight_is_over(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _in_flight(self, what: str, order: FlightName) -> Flight:
        return protocol.in_flight(self._roster.fleet, what, order.version, order.epoch)

    def close(self) -> None:
        self._flight_is_over()
        for task in self._aborting:
            task.cancel()
