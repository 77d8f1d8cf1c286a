"""One rank of a reader group.

All ranks of a group (the ranks of one data-parallel replica) read the same records in the same batches in the
same order, each at its own pace and without talking to each other. A rank that is killed and joins again gets
its unacknowledged batches once more, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import asyncrl._C as _C
from asyncrl.ring.batch import Batch
from asyncrl.ring.errors import RingClosed

if TYPE_CHECKING:
    from asyncrl.ring.ring import Ring

AckMode = Literal["release", "step", "checkpoint"]


class Group:
    """Membership of one rank.

    ``ack`` says when a batch counts as consumed: "release" when the ``with`` block ends without an error,
    "step" when `Batch.ack` is called, "checkpoint" when `commit` is called after `Batch.ack`: only once the
    checkpoint that contains the update is durable.
    """

    def __init__(
        self, ring: Ring, session: Any, name: str, rank: int, size: int, ack: AckMode, resume_at: int
    ):
        self._ring = ring
        self._ack_on_release = ack == "release"
        self._reader = _C.ring.GroupReader(session, name, rank, size, resume_at)
        self._uncommitted: list[Any] = []  # leases, in the order of `Batch.ack`
        self._note = self._uncommitted.append if ack == "checkpoint" else None
        self.name = name
        self.rank = rank
        self.size = size

    def get_batch(self, count: int = 0, *, max_tokens: int = 0, timeout: float) -> Batch:
        """The next batch: ``count`` records, or as many as fit in ``max_tokens`` tokens (at least one).

        If another rank was first, the batch is the one that it took, whatever ``count`` says here. After
        `Ring.close` the last batch may be shorter.

        Raises:
            RingTimeout: fewer are ready after ``timeout`` seconds; names the producers.
            RingClosed: the ring is closed and drained.
        """
        _check_want(count, max_tokens)
        return Batch(self._reader.get(count, max_tokens, timeout), self._ack_on_release, self._note)

    async def aget_batch(self, count: int = 0, *, max_tokens: int = 0, timeout: float) -> Batch:
        """`get_batch` for asyncio; burns no thread while it waits."""
        _check_want(count, max_tokens)
        waiter = self._ring.waiter()
        deadline = time.monotonic() + timeout
        while True:
            event = waiter.prepare()
            lease = self._reader.try_get(count, max_tokens)
            remaining = deadline - time.monotonic()
            if lease is None and remaining <= 0:
                lease = self._reader.get(count, max_tokens, 0.0)  # raises, with the reasons
            if lease is not None:
                return Batch(lease, self._ack_on_release, self._note)
            await waiter.wait(event, remaining)

    def batches(self, count: int = 0, *, max_tokens: int = 0, timeout: float) -> Iterator[Batch]:
        """Batches until the ring is closed and drained."""
        while True:
            try:
                batch = self.get_batch(count, max_tokens=max_tokens, timeout=timeout)
            except RingClosed:
                return
            yield batch

    def commit(self) -> None:
        """Acknowledge everything noted by `Batch.ack` since the last commit (mode "checkpoint")."""
        while self._uncommitted:
            self._uncommitted[0].ack()
            self._uncommitted.pop(0).release_when_unused()

    def ack_through(self, position: int) -> None:
        """Acknowledge everything before ``position`` (a `Batch.end`), in one step, never half done."""
        self._reader.ack(0, position)
        for lease in self._uncommitted:
            if lease.end <= position:
                lease.release_when_unused()
        self._uncommitted[:] = [lease for lease in self._uncommitted if lease.end > position]

    @property
    def length(self) -> int:
        """Number of records that the group has taken so far."""
        position: int = self._reader.length()
        return position

    def leave(self) -> None:
        """Give the rank up. Raises `ViewsAlive` while batches are on loan."""
        self._reader.leave()


def _check_want(count: int, max_tokens: int) -> None:
    if (count > 0) == (max_tokens > 0):
        raise ValueError(f"say either count or max_tokens, got count = {count}, max_tokens = {max_tokens}")
