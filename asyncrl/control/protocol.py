"""The publication protocol as a pure state machine: no I/O, no clock; `asyncrl.control.publishing` drives it.

    register --> JOINING --joined--> (JOINING, knows its plan) --prepare--> PREPARED --commit--> SERVING(v)
                    ^                                              ^  |                            |
                    |                                              |  | failed                     |
                    '------ rejoin ------ QUARANTINED <------------|--'                            |
                                              |                    '---------- prepare ------------'
    any --lost--> LOST                        '-- failed again and again --> LOST

    JOINING, without a plan, or QUARANTINED --prepare_refill--> PREPARED --commit--> SERVING(v), no plan
                                                SERVING(v), no plan --rejoin, joined--> SERVING(v)

A flight brings one version to named engines: prepare -> begin_transfer -> verified | failed, each -> commit.
A *publication* brings the next version to every engine that serves, and to those that have joined; a
*catch-up* brings the committed version alone to engines that do not serve, from the trainer; a *refill*
brings it to one engine that has not joined, from another one that serves it and goes on serving. An engine
that was refilled serves without a plan: rejoin and joined give it one while it serves, and until then no
publication can be prepared, for it would leave that engine out.

A flight is named by its version and by the membership epoch under which it was prepared; every registration,
joining, failure, loss and end of a flight begins a new epoch, so that a trainer that has not seen the newest
membership is refused, and no two flights have the same name.

Invariants, in every state (`violations` lists those that are broken):

1. an engine serves only the committed version, whole and verified by all of its ranks: what began to receive
   and has not verified has no version, and serves nothing until a later flight brings it a whole one;
2. the committed version grows by one publication at a time, in order; none is skipped, none is repeated;
   what an engine serves strictly grows with every publication that it takes part in;
3. while version v is in flight, an engine that takes part is out of service, so that whoever serves is at
   the committed version, and after the commit nobody serves the one before: the bounded staleness holds;
4. a flight that is aborted before its transfer leaves every engine serving what it served; one that ends
   later leaves those serving that verified, and all that took no part;
5. at most one flight is under way, so that the source of a refill, which serves the committed version when
   the refill begins, holds it until the refill ends, if it does not drop out.

Every refusal is a `Refused` whose one line names both sides; the fleet is as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from asyncrl.control.messages import EngineStatus, Plan
from asyncrl.types import PolicyVersion

MAX_FAILURES = 2
"""Flights and joinings in a row that an engine may fail before it counts as lost."""


class Refused(RuntimeError):
    """A request that the state of the fleet does not allow; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Member:
    """One engine. ``version`` is the one that its weights are known to hold whole, else -1."""

    name: str
    incarnation: int
    status: EngineStatus = EngineStatus.JOINING
    version: PolicyVersion = -1
    plan: Plan | None = None  # agreed when it joined its weight group; None: in no group
    num_failures: int = 0  # in a row
    reason: str = ""  # why it is quarantined or lost


@dataclass(frozen=True, slots=True)
class Flight:
    """One version on its way; every engine that takes part is in exactly one of the last three."""

    version: PolicyVersion
    epoch: int
    transferring: bool = False
    waiting: frozenset[str] = frozenset()
    verified: frozenset[str] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)  # reasons
    source: str = ""  # of a refill: the engine from which the version comes

    def __str__(self) -> str:
        return f"version {self.version} (epoch {self.epoch})"


@dataclass(frozen=True, slots=True)
class Fleet:
    """All that the protocol knows; ``committed`` is -1 before the first publication."""

    committed: PolicyVersion = -1
    epoch: int = 0
    members: Mapping[str, Member] = field(default_factory=dict)
    flight: Flight | None = None

    def member(self, name: str) -> Member:
        if name not in self.members:
            raise Refused(f"no engine named {name}; there are {sorted(self.members)}")
        return self.members[name]

    def _with(self, *members: Member) -> Fleet:
        return replace(self, members={**self.members, **{member.name: member for member in members}})


# --- membership ---


def register(fleet: Fleet, name: str, incarnation: int) -> Fleet:
    """A new engine, or one that was started again, answers; its weights are not the trainer's."""
    known = fleet.members.get(name)
    if known is not None and incarnation <= known.incarnation:
        raise Refused(f"{name} was registered as start {known.incarnation}, again as start {incarnation}")
    if known is not None:
        fleet = _drop_out(fleet, name, f"{name} was started again")
    return replace(fleet._with(Member(name, incarnation)), epoch=fleet.epoch + 1)


def rejoin(fleet: Fleet, name: str) -> Fleet:
    """An engine is about to meet the trainer in a new weight group; one that was refilled serves on."""
    member = fleet.member(name)
    if member.status is EngineStatus.SERVING and member.plan is None:
        return fleet
    if member.status not in (EngineStatus.JOINING, EngineStatus.QUARANTINED):
        raise Refused(
            f"{name} is {member.status} and cannot join a weight group; one that is new, quarantined or was"
            " refilled can"
        )
    return fleet._with(replace(member, status=EngineStatus.JOINING, version=-1, plan=None))


def joined(fleet: Fleet, name: str, plan: Plan) -> Fleet:
    """Trainer and engine have agreed on a plan."""
    member = fleet.member(name)
    joining = member.status in (EngineStatus.JOINING, EngineStatus.SERVING)
    if not joining or member.plan is not None:
        raise Refused(f"{name} is {member.status} and was not joining a weight group")
    return replace(fleet._with(replace(member, plan=plan)), epoch=fleet.epoch + 1)


def failed(fleet: Fleet, name: str, reason: str, *, counts: bool = True) -> Fleet:
    """An engine could not join, pause, receive or verify; its weights may be partly new.

    It does not count where another engine, from which it was to be refilled, is the cause.
    """
    member = fleet.member(name)
    if member.status is EngineStatus.LOST:
        raise Refused(f"{name} is lost already ({member.reason}), then failed: {reason}")
    num_failures = member.num_failures + counts
    gone = num_failures > MAX_FAILURES
    out = replace(
        member,
        status=EngineStatus.LOST if gone else EngineStatus.QUARANTINED,
        version=-1,
        plan=None,
        num_failures=num_failures,
        reason=f"{reason} ({num_failures} failures in a row)" if gone else reason,
    )
    return replace(_drop_out(fleet, name, reason)._with(out), epoch=fleet.epoch + 1)


def lost(fleet: Fleet, name: str, incarnation: int, reason: str) -> Fleet:
    """An engine's process is gone; told again, or of an earlier incarnation, nothing changes."""
    member = fleet.member(name)
    if member.incarnation != incarnation or member.status is EngineStatus.LOST:
        return fleet
    gone = replace(member, status=EngineStatus.LOST, version=-1, plan=None, reason=reason)
    return replace(_drop_out(fleet, name, reason)._with(gone), epoch=fleet.epoch + 1)


def _drop_out(fleet: Fleet, name: str, reason: str) -> Fleet:
    """Take an engine out of the flight, if it takes part."""
    flight = fleet.flight
    if flight is None or name not in flight.waiting | flight.verified:
        return fleet
    out = replace(
        flight,
        waiting=flight.waiting - {name},
        verified=flight.verified - {name},
        failed={**flight.failed, name: reason},
    )
    return replace(fleet, flight=out)


# --- one flight ---


def prepare(fleet: Fleet, version: PolicyVersion, epoch: int, plans: Mapping[str, Plan]) -> Fleet:
    """Begin to bring ``version`` to the engines of ``plans``, which are out of service from now on."""
    for refusal in _refusals(fleet, version, epoch, plans):
        raise Refused(refusal)
    members = [replace(fleet.members[name], status=EngineStatus.PREPARED) for name in plans]
    return replace(fleet._with(*members), flight=Flight(version, epoch, waiting=frozenset(plans)))


def prepare_refill(fleet: Fleet, name: str, source: str) -> Fleet:
    """Begin to bring the committed version to one engine from another, which goes on serving it."""
    member, giver = fleet.member(name), fleet.member(source)
    flight = Flight(fleet.committed, fleet.epoch, waiting=frozenset({name}), source=source)
    what = f"a refill of {name} from {source} with {flight}"
    if fleet.flight is not None:
        raise Refused(f"{what} cannot be prepared while {fleet.flight} is in flight")
    if fleet.committed < 0:
        raise Refused(f"{what} cannot be prepared before a version is published")
    if member.status not in (EngineStatus.JOINING, EngineStatus.QUARANTINED) or member.plan is not None:
        joined = "has a plan, so the trainer brings it the version" if member.plan else "needs no version"
        raise Refused(f"{what} is not for {name}, which is {member.status} and {joined}")
    if giver.status is not EngineStatus.SERVING:
        raise Refused(f"{what} cannot come from {source}, which is {giver.status}: {giver.reason}")
    return replace(fleet._with(replace(member, status=EngineStatus.PREPARED)), flight=flight)


def _refusals(fleet: Fleet, version: PolicyVersion, epoch: int, plans: Mapping[str, Plan]) -> Iterator[str]:
    if fleet.flight is not None:
        yield f"version {version} (epoch {epoch}) cannot be prepared while {fleet.flight} is in flight"
    serving = {name for name, m in fleet.members.items() if m.status is EngineStatus.SERVING}
    repeated = sorted(serving & set(plans))
    if version < fleet.committed or (version == fleet.committed and repeated):
        yield f"version {version} was already published (now {fleet.committed}: {', '.join(repeated)})"
    if 0 <= fleet.committed < version - 1:
        yield f"version {version} would skip version {fleet.committed + 1}; {fleet.committed} is served"
    if epoch != fleet.epoch:
        yield (
            f"version {version} was prepared under membership epoch {epoch}, the engines are at epoch"
            f" {fleet.epoch}; look at the engines again"
        )
    if version > fleet.committed and serving - set(plans):
        yield f"version {version} leaves out {', '.join(sorted(serving - set(plans)))}, which serve"
    for name, plan in plans.items():
        member = fleet.member(name)
        if member.plan is None:
            yield f"{name} is {member.status} and has no plan for version {version}: {member.reason}"
        elif plan != member.plan:
            yield f"version {version} for {name} follows {plan}, it agreed on {member.plan}"
    if not plans:
        out = "; ".join(f"{m.name} is {m.status}: {m.reason}" for m in fleet.members.values())
        yield f"version {version} has no engine to go to ({out or 'none has registered'})"


def begin_transfer(fleet: Fleet, version: PolicyVersion, epoch: int) -> Fleet:
    """The engines that take part begin to receive; until they verify, their weights may be partly new."""
    flight = in_flight(fleet, "TRANSFER", version, epoch)
    if flight.transferring:
        raise Refused(f"TRANSFER of {flight} came again; it is under way")
    receiving = [replace(fleet.members[name], version=-1) for name in flight.waiting]
    return replace(fleet._with(*receiving), flight=replace(flight, transferring=True))


def verified(fleet: Fleet, version: PolicyVersion, epoch: int, name: str) -> Fleet:
    """All ranks of an engine have verified the whole version."""
    flight = in_flight(fleet, f"{name}'s verification", version, epoch)
    if not flight.transferring or name not in flight.waiting:
        raise Refused(f"{name} verified {flight}, which it was not receiving")
    member = replace(fleet.members[name], version=version)
    after = replace(flight, waiting=flight.waiting - {name}, verified=flight.verified | {name})
    return replace(fleet._with(member), flight=after)


def commit(fleet: Fleet, version: PolicyVersion, epoch: int) -> Fleet:
    """End a flight: the engines that verified serve it. It is committed if there is at least one."""
    flight = in_flight(fleet, "COMMIT", version, epoch)
    if not flight.transferring or flight.waiting:
        waiting = ", ".join(sorted(flight.waiting))
        raise Refused(f"COMMIT of {flight} came before {waiting or 'its transfer'} was through")
    serving = [
        replace(
            fleet.members[name],
            status=EngineStatus.SERVING,
            # The trainer has yet to reach an engine that was refilled; one that it never can is to be lost.
            num_failures=fleet.members[name].num_failures if flight.source else 0,
            reason="",
        )
        for name in flight.verified
    ]
    committed = version if flight.verified else fleet.committed
    return replace(fleet._with(*serving), committed=committed, epoch=fleet.epoch + 1, flight=None)


def abort(fleet: Fleet, version: PolicyVersion, epoch: int, reason: str) -> Fleet:
    """End a flight that its trainer will not end: see invariant 4."""
    flight = in_flight(fleet, "ABORT", version, epoch)
    if flight.transferring:
        for name in sorted(flight.waiting):
            fleet = failed(fleet, name, reason)
        return commit(fleet, version, epoch)
    back = []
    for name in flight.waiting:
        member = fleet.members[name]
        holds = member.version == fleet.committed and member.version >= 0
        status, why = (EngineStatus.SERVING, "") if holds else (EngineStatus.JOINING, reason)
        back.append(replace(member, status=status, reason=why))
    return replace(fleet._with(*back), epoch=fleet.epoch + 1, flight=None)


def in_flight(fleet: Fleet, what: str, version: PolicyVersion, epoch: int) -> Flight:
    """The flight that ``what`` is about; raises Refused where another is under way, or none."""
    flight = fleet.flight
    if flight is None:
        _refuse_late(what, version, epoch, f"no publication was prepared (now version {fleet.committed})")
    if (flight.version, flight.epoch) != (version, epoch):
        _refuse_late(what, version, epoch, f"{flight} is in flight")
    return flight


def _refuse_late(what: str, version: PolicyVersion, epoch: int, now: str) -> NoReturn:
    raise Refused(f"{what} of version {version} (epoch {epoch}) came, but {now}")


# --- what must hold ---


def violations(fleet: Fleet) -> list[str]:
    """One line for every invariant that a state breaks by itself."""
    found = []
    flight = fleet.flight
    taking_part = flight.waiting | flight.verified if flight else frozenset[str]()
    for member in fleet.members.values():
        if member.status is EngineStatus.SERVING and member.version != fleet.committed:
            found.append(f"{member.name} serves {member.version}, {fleet.committed} is committed")
        if (member.status is EngineStatus.PREPARED) != (member.name in taking_part):
            found.append(f"{member.name} is {member.status}, in flight: {sorted(taking_part)}")
        if member.status in (EngineStatus.QUARANTINED, EngineStatus.LOST) and member.version >= 0:
            found.append(f"{member.name} is {member.status} and still vouches for {member.version}")
    if flight and flight.source:
        giver = fleet.members[flight.source]
        if giver.status is EngineStatus.PREPARED or flight.version != fleet.committed:
            found.append(f"{flight} is a refill from {giver.name}, which is {giver.status}")
    if flight and flight.version not in (fleet.committed, fleet.committed + 1) and fleet.committed >= 0:
        found.append(f"{flight} is in flight after version {fleet.committed}")
    return found
