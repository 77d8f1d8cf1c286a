"""The ring's handle: create, open, put, groups, statistics, life and death.

    rollout processes --put--> [ring: shared memory] --get_batch--> ranks of one data-parallel replica

A record that was put is delivered to every rank of the group at least once, and never again once that rank
has acknowledged it, whichever process is killed at whichever instruction. Producers wait while the ring is
full; readers hold a batch as long as they like without stopping producers, as long as there is room.

A handle may be used by any thread of the process that opened it. A forked child opens its own.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import asyncrl._C as _C
from asyncrl.ring.codec import FORMAT, sample_values
from asyncrl.ring.errors import WrongRole
from asyncrl.ring.group import AckMode, Group
from asyncrl.ring.waiting import FifoWaiter
from asyncrl.types import PolicyVersion, Sample

Role = Literal["producer", "reader", "observer"]
WhenFull = Literal["block", "fail", "drop_oldest"]
Key = tuple[str | int, int]
"""(producer uid, sequence number): a pair is published at most once, however often it is put."""

_ROLES = {"producer": _C.ring.Role.PRODUCER, "reader": _C.ring.Role.READER, "observer": _C.ring.Role.OBSERVER}
_WHEN_FULL = {
    "block": _C.ring.WhenFull.BLOCK,
    "fail": _C.ring.WhenFull.FAIL,
    "drop_oldest": _C.ring.WhenFull.DROP_OLDEST,
}


@dataclass(frozen=True, slots=True)
class RingStats:
    """Counts since creation; a crash may leave a counter one short, never a record."""

    depth: int  # records that wait for a reader
    ready_tokens: int
    held: int  # records delivered and not yet acknowledged by all, or still looked at
    claimed: int  # records that are being written
    num_slots: int
    num_free: int
    arena_bytes: int
    bytes_used: int
    max_record_bytes: int
    puts: int
    duplicates: int  # puts whose key had been published
    gets: int  # deliveries, counted per rank
    acks: int
    nacks: int  # deliveries that ended without an acknowledgement
    reclaimed: int  # claims taken back from dead producers
    recoveries: int
    steals: int
    dropped_stale: int
    dropped_oldest: int
    dropped_evicted: int
    dropped_group_removed: int
    dropped_damaged: int
    min_version: PolicyVersion | None
    closed: bool

    @property
    def dropped(self) -> int:
        return (
            self.dropped_stale
            + self.dropped_oldest
            + self.dropped_evicted
            + self.dropped_group_removed
            + self.dropped_damaged
        )


class Ring:
    """One participant's handle. Make one with `create` or `open`."""

    def __init__(self, path: Path, role: Role, session: Any, when_full: WhenFull, checksum: bool) -> None:
        self.path = path
        self.role = role
        self._session = session
        self._when_full = _WHEN_FULL[when_full]
        self._producer = _C.ring.Producer(session, FORMAT, self._when_full, checksum)
        self._checksum = checksum
        self._waiter: FifoWaiter | None = None

    @staticmethod
    def create(
        path: Path,
        *,
        arena_bytes: int,
        num_slots: int,
        max_record_bytes: int | None = None,
        num_participants: int = 256,
        num_groups: int = 8,
        num_producers: int = 64,
        key_window: int = 65536,
    ) -> Ring:
        """Make the ring in the new directory ``path`` (on tmpfs or hugetlbfs) and open it as an observer.

        Args:
            arena_bytes: room for records, rounded up to pages. All of it is allocated and touched now.
            num_slots: most records at a time.
            max_record_bytes: largest record; default: half the arena.
            key_window: how far behind a producer's newest key a duplicate is still recognised.

        Raises:
            RingExists, RingNoSpace, ValueError.
        """
        _C.ring.create(
            os.fspath(path),
            arena_bytes=arena_bytes,
            num_slots=num_slots,
            max_record_bytes=max_record_bytes or 0,
            num_participants=num_participants,
            num_groups=num_groups,
            num_producers=num_producers,
            key_window=key_window,
        )
        return Ring.open(path, role="observer", name="creator")

    @staticmethod
    def open(
        path: Path,
        role: Role,
        name: str,
        *,
        when_full: WhenFull = "block",
        checksum: bool = False,
        lock_timeout: float = 10.0,
    ) -> Ring:
        """Attach to a ring. ``name`` appears in every message that concerns this participant.

        Args:
            when_full: what a put does without room: wait, raise `RingFull`, or drop the oldest ready records.
                To spill to a file instead, wrap a ring opened with "fail" in a `SpillingProducer`.
            checksum: store a CRC-32C with every record, for `Record.verify`.
            lock_timeout: seconds until a stopped owner of the metadata lock is an error.

        Raises:
            RingMissing, NotARing, RingAbiMismatch, RingCorrupt, RingLimit.
        """
        session = _C.ring.Session.attach(os.fspath(path), _ROLES[role], name)
        session.set_lock_timeout(lock_timeout)
        return Ring(path, role, session, when_full, checksum)

    @staticmethod
    def unlink(path: Path) -> None:
        """Remove the ring's files. Processes that have it open keep it until they detach."""
        _C.ring.unlink(os.fspath(path))

    # ---- producers -------------------------------------------------------------------------------

    def put(
        self, sample: Sample, *, version: PolicyVersion | None = None, key: Key | None = None, timeout: float
    ) -> bool:
        """Publish a sample; when this returns, it will be delivered.

        Args:
            version: what staleness is judged by; default: the sample's oldest and newest versions.
            key: makes the put idempotent over crashes and restarts of the producer.
            timeout: seconds to wait for room.

        Returns:
            False when the key had been published before, so that nothing was put.

        Raises:
            RingTimeout: no room; names who holds it.
            RingClosed, RingFull, RecordTooLarge, RecordStale, KeyTooOld, LockTimeout.
        """
        self._require("producer")
        if key is None and version is not None:
            published: int = self._producer.put_as([sample_values(sample)], version, timeout)
        else:
            published = self._producer.put([_record(sample, version, key)], timeout)
        return published == 1

    def put_many(
        self,
        samples: Sequence[Sample],
        *,
        version: PolicyVersion | None = None,
        keys: Sequence[Key | None] | None = None,
        timeout: float,
    ) -> int:
        """`put` for many; returns how many were new. After an error the first ones may be published, so give
        keys and put all again."""
        if keys is None and version is not None:
            self._require("producer")
            published: int = self._producer.put_as(list(map(sample_values, samples)), version, timeout)
        else:
            published = self._producer.put(self._records(samples, version, keys), timeout)
        return published

    async def aput(
        self, sample: Sample, *, version: PolicyVersion | None = None, key: Key | None = None, timeout: float
    ) -> bool:
        """`put` for asyncio; burns no thread while it waits."""
        return await self.aput_many((sample,), version=version, keys=(key,), timeout=timeout) == 1

    async def aput_many(
        self,
        samples: Sequence[Sample],
        *,
        version: PolicyVersion | None = None,
        keys: Sequence[Key | None] | None = None,
        timeout: float,
    ) -> int:
        """`put_many` for asyncio."""
        outgoing = self._outgoing(samples, version, keys)
        waiter = self.waiter()
        deadline = time.monotonic() + timeout
        waited = False
        try:
            while True:
                event = waiter.prepare()
                if outgoing.try_put(waited):
                    published: int = outgoing.num_published
                    return published
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    outgoing.put(0.0)  # raises, with the reasons
                await waiter.wait(event, remaining)
                waited = True
        finally:
            if waited:
                outgoing.give_up()

    def _outgoing(
        self, samples: Sequence[Sample], version: PolicyVersion | None, keys: Sequence[Key | None] | None
    ) -> Any:
        records = self._records(samples, version, keys)
        outgoing = _C.ring.Outgoing(self._session, FORMAT, self._when_full, self._checksum)
        for record in records:
            outgoing.add(*record)
        return outgoing

    def _records(
        self, samples: Sequence[Sample], version: PolicyVersion | None, keys: Sequence[Key | None] | None
    ) -> list[tuple[Any, ...]]:
        self._require("producer")
        if keys is None:
            return [_record(sample, version, None) for sample in samples]
        return [_record(sample, version, key) for sample, key in zip(samples, keys, strict=True)]

    # ---- readers -----------------------------------------------------------------------------------

    def group(
        self, name: str, *, rank: int = 0, size: int = 1, ack: AckMode = "step", resume_at: int = 0
    ) -> Group:
        """Join a reader group as ``rank`` of ``size``; the first to join makes it.

        Args:
            ack: see `Group`.
            resume_at: a `Batch.end` from a checkpoint: everything before it counts as acknowledged.

        Raises:
            NotAMember: a rank outside the group, or another size.
            MemberBusy: a live process has the rank.
        """
        self._require("reader")
        return Group(self, self._session, name, rank, size, ack, resume_at)

    def remove_group(self, name: str) -> None:
        """Remove a group that has no live member. What nobody acknowledged can be read by others."""
        self._session.remove_group(name)

    # ---- everybody ---------------------------------------------------------------------------------

    def set_min_version(self, version: PolicyVersion) -> None:
        """Refuse records below ``version``; readers skip the ready ones, which are counted."""
        self._session.set_min_version(version)

    def evict(self, version: PolicyVersion) -> int:
        """The same, and drop the ready ones now. Held records stay. Returns how many were dropped."""
        dropped: int = self._session.evict(version)
        return dropped

    def stats(self) -> RingStats:
        return RingStats(**self._session.stats())

    def check(self) -> str:
        """An empty string, or what is inconsistent in the ring's tables."""
        found: str = self._session.check()
        return found

    def rebuild(self) -> None:
        """Rebuild all tables from the slots, as after a death. For repair; nothing needs it otherwise."""
        self._session.rebuild()

    def close(self) -> None:
        """End the stream: puts raise `RingClosed`, readers drain what is ready and then get `RingClosed`."""
        self._session.close()

    def detach(self) -> None:
        """Leave the ring. Raises `ViewsAlive` while batches are on loan to this handle."""
        self._session.detach()
        if self._waiter is not None:
            self._waiter.close()
            self._waiter = None

    def _require(self, role: Role) -> None:
        if self.role != role:
            raise WrongRole(
                f'{self.path}: opened as {self.role}; Ring.open(path, role="{role}", ...) can do this'
            )

    def waiter(self) -> FifoWaiter:
        """The running loop's waiter on this handle. One loop at a time."""
        loop = asyncio.get_running_loop()
        if self._waiter is not None and self._waiter.loop is not loop:
            self._waiter.close()
            self._waiter = None
        if self._waiter is None:
            self._waiter = FifoWaiter(self._session.open_wake_fifo(), loop)
        return self._waiter


def _record(sample: Sample, version: PolicyVersion | None, key: Key | None) -> tuple[Any, ...]:
    """Its values, oldest and newest version, key as three numbers or None."""
    oldest = sample.min_version if version is None else version
    newest = sample.max_version if version is None else version
    numbers = (*_uid_words(key[0]), key[1]) if key is not None else None
    return sample_values(sample), oldest, newest, numbers


@functools.lru_cache(maxsize=1024)
def _uid_words(uid: str | int) -> tuple[int, int]:
    """128 bits that stand for a producer uid."""
    if isinstance(uid, int):
        if not 0 <= uid < 1 << 128:
            raise ValueError(f"a producer uid is a string or an int of 128 bits, got {uid}")
        return uid & (1 << 64) - 1, uid >> 64
    digest = hashlib.blake2b(uid.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
