"""The engines of a run as their owners: who registered, who meets the trainer in which weight group.

    EngineActor --register--> a seat: client, weight group, work in progress
    launcher    --lost------> the seat is given up, whatever the engine was doing
    trainer     --join------> leave the old weight group, join the new one, agree on a plan --> joined
                              (an engine that was refilled serves meanwhile)

A seat belongs to one incarnation of an engine, so that what is still under way for an earlier one can be told
apart. The fleet (`asyncrl.control.protocol`) decides; it changes before anything follows from the change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from asyncrl.control import protocol
from asyncrl.control.messages import EngineInfo, EngineLost, EngineStatus, Joined, JoinOrder, LinkOrder
from asyncrl.control.protocol import Fleet
from asyncrl.engines.base import Engine, EngineError, ReplicaLink, WeightGroup

EngineFactory = Callable[[EngineInfo], Engine]

MARGIN_S = 5.0
"""How much longer than its own deadline an engine may take to say that it missed it."""


@dataclass(slots=True, eq=False)
class Seat:
    """One incarnation of an engine."""

    info: EngineInfo
    engine: Engine
    group: str = ""  # the weight group that it is in
    work: asyncio.Task[None] | None = None  # joining, or receiving from the trainer
    taking: asyncio.Task[None] | None = None  # from another engine
    paused_at: float | None = None
    served: bool = False  # when the flight under way was prepared
    checksums: tuple[dict[str, str], ...] = field(default_factory=tuple)

    def cancel(self) -> None:
        for task in (self.work, self.taking):
            if task is not None:
                task.cancel()
        self.work = self.taking = None


class Roster:
    """Not thread-safe: one event loop owns it. ``changed`` is told after every change of the fleet."""

    def __init__(
        self, make_engine: EngineFactory, timeout_s: float, changed: Callable[[], Awaitable[None]]
    ) -> None:
        self._make_engine = make_engine
        self._timeout_s = timeout_s  # of joining
        self._seats: dict[str, Seat] = {}
        self.changed = changed
        self.fleet = Fleet()

    def infos(self) -> tuple[EngineInfo, ...]:
        """All engines as the protocol sees them, by name."""
        return tuple(
            self._seats[name].info.model_copy(
                update={
                    "status": m.status,
                    "policy_version": m.version,
                    "joined": m.plan is not None,
                    "reason": m.reason,
                }
            )
            for name, m in sorted(self.fleet.members.items())
        )

    def seat(self, name: str) -> Seat:
        return self._seats[name]

    def holds(self, seat: Seat) -> bool:
        """Whether an incarnation is still the one that is known by its name, and not lost."""
        name = seat.info.name
        lost = self.fleet.members[name].status is EngineStatus.LOST
        return self._seats[name] is seat and not lost

    async def register(self, info: EngineInfo) -> None:
        """An engine answers. Raises Refused for an incarnation that is known."""
        self.fleet = protocol.register(self.fleet, info.name, info.incarnation)
        before = self._seats.get(info.name)
        self._seats[info.name] = Seat(info, self._make_engine(info))
        if before is not None:
            before.cancel()
            await before.engine.close()
        await self.changed()

    async def lost(self, report: EngineLost) -> None:
        """An engine's process is gone; a report of an earlier incarnation changes nothing."""
        if report.name not in self._seats:
            return
        before = self.fleet
        self.fleet = protocol.lost(before, report.name, report.incarnation, report.reason)
        if self.fleet is not before:
            seat = self._seats[report.name]
            seat.cancel()
            await seat.engine.close()
            await self.changed()

    async def join(self, order: JoinOrder) -> None:
        """Start the engine's side of a meeting; the trainer's ranks join meanwhile, then `joined`."""
        self.fleet = protocol.rejoin(self.fleet, order.engine)
        seat = self._seats[order.engine]
        seat.cancel()
        seat.work = asyncio.ensure_future(self._join(seat, order.group))
        await self.changed()

    async def _join(self, seat: Seat, group: WeightGroup) -> None:
        await leave_group(seat)
        seat.group = group.name
        await seat.engine.join_weight_group(group, self._timeout_s)
        await seat.engine.receive_weights("connect", group.name, 0, "", self._timeout_s)

    async def joined(self, report: Joined, put_out: Callable[[str, str], Awaitable[None]]) -> str:
        """Wait for the engine's side; returns why it has not joined, or an empty string.

        ``put_out`` takes an engine out of service that serves without a plan and has failed to get one.
        """
        member = self.fleet.member(report.engine)
        seat = self._seats[report.engine]
        work = seat.work
        if work is None:
            return f"{member.name} is {member.status}, not joining a weight group ({member.reason})"
        if report.failure:
            work.cancel()
        reason = await outcome(work, 2 * self._timeout_s + MARGIN_S, f"{member.name} did not join")
        now = self.fleet.member(member.name)
        joins = now.status in (EngineStatus.JOINING, EngineStatus.SERVING)
        if not joins or not self.holds(seat) or seat.work is not work:
            return f"{now.name} was lost while it joined: {now.reason}"
        seat.work = None
        reason = report.failure or reason or ("" if report.plan else "the trainer named no plan")
        if reason and now.status is EngineStatus.SERVING:
            await put_out(member.name, reason)
        elif reason or report.plan is None:
            self.fleet = protocol.failed(self.fleet, member.name, reason)
        else:
            self.fleet = protocol.joined(self.fleet, member.name, report.plan)
        await self.changed()
        return reason

    async def link(self, order: LinkOrder) -> dict[str, str]:
        """Let engines begin to join a link; returns those that did not, and why."""
        shared = order.model_dump(exclude={"engines"})
        links = [
            ReplicaLink(**shared, replica=replica, num_replicas=len(order.engines))
            for replica in range(len(order.engines))
        ]
        seats = [self._seats[name] for name in order.engines]
        begun = [
            outcome(
                asyncio.ensure_future(seat.engine.link_replicas(seat.group, link)),
                self._timeout_s,
                f"{seat.info.name} did not begin to join link {order.number}",
            )
            for seat, link in zip(seats, links, strict=True)
        ]
        reasons = zip(order.engines, await asyncio.gather(*begun), strict=True)
        return {name: reason for name, reason in reasons if reason}

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats.values())

    async def close(self) -> None:
        for seat in self:
            seat.cancel()
            await seat.engine.close()


async def leave_group(seat: Seat) -> None:
    """Let an engine leave its weight group, which is broken, or whose senders are gone."""
    if seat.group:
        with contextlib.suppress(EngineError):  # what matters is the next one
            await seat.engine.leave_weight_group(seat.group)
    seat.group = ""  # not where the engine did not answer: it may be in it still


async def outcome(work: asyncio.Task[None], timeout_s: float, what: str) -> str:
    """Why ``work`` failed, or an empty string; it is cancelled after ``timeout_s`` seconds."""
    try:
        await asyncio.wait({work}, timeout=timeout_s)
        if not work.done():
            return f"{what} within {timeout_s:.0f} s"
    finally:
        work.cancel()  # without effect where it is done
    if work.cancelled():
        return f"{what}: given up"
    error = work.exception()
    if error is not None and not isinstance(error, EngineError):
        raise error
    return str(error) if error is not None else ""
