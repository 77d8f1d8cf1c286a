"""Looking into a live ring, repairing a damaged one, clearing an abandoned one away: `asyncrl ring PATH`.

`inspect` takes no lock and attaches nothing, so that it works on a ring whose lock is stuck; numbers that
change meanwhile may be off by a little.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncrl._C as _C
from asyncrl.ring.errors import MemberBusy
from asyncrl.ring.ring import Ring, RingStats

ROLES = ("producer", "reader", "observer")


@dataclass(frozen=True, slots=True)
class Participant:
    index: int
    name: str
    role: str
    pid: int  # in its own PID namespace
    alive: bool
    age_s: float  # since it attached
    puts: int
    gets: int


@dataclass(frozen=True, slots=True)
class RankLease:
    """What one rank of a group keeps in the ring."""

    group: str
    rank: int
    holder: int | None  # participant index
    pending: int  # records that it has not acknowledged
    leased: int  # records that it looks at
    num_bytes: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class RingReport:
    path: Path
    stats: RingStats
    participants: tuple[Participant, ...]
    leases: tuple[RankLease, ...]
    lock_owner: int | None  # participant that holds the metadata lock at this moment
    oldest_ready_s: float

    @property
    def abandoned(self) -> bool:
        """No participant is alive."""
        return not any(participant.alive for participant in self.participants)


def inspect(path: Path) -> RingReport:
    """Look into the ring in directory ``path``.

    Raises:
        RingMissing, NotARing, RingAbiMismatch, RingCorrupt.
    """
    raw: dict[str, Any] = _C.ring.inspect(os.fspath(path))
    participants = tuple(
        Participant(**{**entry, "role": ROLES[entry["role"]]}) for entry in raw["participants"]
    )
    leases = tuple(RankLease(**entry) for entry in raw["leases"])
    return RingReport(
        path=path,
        stats=RingStats(**raw["stats"]),
        participants=participants,
        leases=leases,
        lock_owner=raw["lock_owner"],
        oldest_ready_s=raw["oldest_ready_s"],
    )


def repair(path: Path) -> list[str]:
    """Restore a damaged header from its copy, and rebuild all tables from the slots. Records whose slots make
    no sense are dropped and counted. Returns what was done.

    Raises:
        RingCorrupt: the header and its copy are both damaged.
        LockTimeout: a stopped process holds the lock.
    """
    done = []
    if _C.ring.repair_header(os.fspath(path)):
        done.append("restored the header from its copy")
    ring = Ring.open(path, role="observer", name="repair")
    before = ring.stats().dropped_damaged
    ring.rebuild()
    after = ring.stats()
    done.append(f"rebuilt the tables: {after.num_slots - after.num_free} records kept")
    if after.dropped_damaged > before:
        done.append(f"dropped {after.dropped_damaged - before} damaged records")
    problem = ring.check()
    if problem:
        done.append(f"still inconsistent: {problem}")
    ring.detach()
    return done


def clear(path: Path) -> None:
    """Remove a ring that nobody has open.

    Raises:
        MemberBusy: a participant is alive; names it.
    """
    for participant in inspect(path).participants:
        if participant.alive:
            raise MemberBusy(
                f"{path}: {participant.name} (pid {participant.pid}) has the ring open;"
                " end it first, or use Ring.unlink"
            )
    Ring.unlink(path)


def render(report: RingReport) -> str:
    """The report as lines of text."""
    s = report.stats
    state = ("closed" if s.closed else "open") + (", abandoned" if report.abandoned else "")
    ready = f"{s.depth} ready ({s.ready_tokens} tokens, oldest {report.oldest_ready_s:.1f} s)"
    free = f"{s.num_free} of {s.num_slots} slots free"
    reads = f"{s.gets} gets, {s.acks} acks, {s.nacks} nacks"
    dropped = f"{s.dropped_stale} stale, {s.dropped_oldest} oldest, {s.dropped_evicted} evicted"
    lines = [
        f"{report.path}: {state}",
        f"  records   {ready}, {s.held} held, {s.claimed} being written, {free}",
        f"  bytes     {s.bytes_used} of {s.arena_bytes} used, largest record {s.max_record_bytes}",
        f"  counters  {s.puts} puts, {s.duplicates} duplicates, {reads}",
        f"  dropped   {dropped}, {s.dropped_group_removed} with their group, {s.dropped_damaged} damaged",
        f"  versions  at least {s.min_version}",
        f"  recovery  {s.recoveries} rebuilds, {s.steals} locks stolen, {s.reclaimed} claims taken back",
        f"  lock      {_owner(report)}",
    ]
    lines += [_participant_line(who) for who in report.participants]
    lines += [_lease_line(lease) for lease in report.leases]
    return "\n".join(lines)


def _participant_line(who: Participant) -> str:
    state = "alive" if who.alive else "dead"
    name = f"{who.name} (pid {who.pid}, {state}, {who.age_s:.0f} s)"
    return f"  {who.role:<9} {name}: {who.puts} puts, {who.gets} gets"


def _lease_line(lease: RankLease) -> str:
    holder = "not attached" if lease.holder is None else f"participant {lease.holder}"
    kept = f"{lease.pending} to acknowledge, {lease.leased} on loan, {lease.num_bytes} bytes"
    return f"  {lease.group}[{lease.rank}]  {holder}: {kept}, oldest {lease.oldest_s:.1f} s"


def describe_ring(path: Path) -> str:
    """What `asyncrl ring PATH` prints."""
    return render(inspect(path))


def _owner(report: RingReport) -> str:
    if report.lock_owner is None:
        return "free"
    for who in report.participants:
        if who.index == report.lock_owner:
            return f"held by {who.name} (pid {who.pid}, {'alive' if who.alive else 'dead'})"
    return f"held by participant {report.lock_owner}, which is gone"
