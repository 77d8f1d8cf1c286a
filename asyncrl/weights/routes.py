"""How the bytes of a bucket reach one engine rank: from their sender, or with the help of other replicas.

    p2p        sender --bucket--> this rank
    relay      sender --stripe i--> replica i; then each replica's rank sends its stripe to all others
    broadcast  sender --chunk--> replica 0 --> replica 1 --> ..., the next chunk behind it

Replicas are engines of one plan: the same rank of each needs the same bytes. A *link* joins them, rank by
rank: rank j of every replica is in one group, whose ranks are the replicas. Over a link every byte leaves the
trainer once, whatever the number of replicas.

All ranks of a link pass the same buckets on in the plan's order, and a sender is at most two buckets ahead,
so nobody waits in a circle. A replica that fails fails its whole link: the digests, which each rank has from
the senders themselves, show what was passed on wrong. This module runs inside the engine's process.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from asyncrl.weights.groups import join_at, reach_store
from asyncrl.weights.wire import (
    Deadline,
    WeightUpdateError,
    chunks,
    start_exchange,
    start_receive,
    start_send,
    stripe,
)

Linked = Literal["relay", "broadcast"]
"""The strategies that need a link; without one, buckets go p2p."""


@dataclass(frozen=True, slots=True)
class LinkOrder:
    """Join a link as replica ``replica`` of ``num_replicas``; the first trainer rank hosts its store."""

    number: int  # above NO_LINK
    strategy: Linked
    name: str
    host: str
    port: int
    replica: int
    num_replicas: int
    backend: str
    timeout_s: float


def ready_key(order_name: str, replica: int, tp_rank: int) -> str:
    """What a rank sets in the link's store once it has joined."""
    return f"{order_name}/{replica}/{tp_rank}"


class Link:
    """One engine rank's membership in a link; it joins on a thread, while the engine samples."""

    def __init__(self, order: LinkOrder, tp_rank: int, before: Link | None) -> None:
        """``before``, the link that this one replaces, is left first."""
        self.order = order
        self._tp_rank = tp_rank
        self._group: dist.ProcessGroup | None = None
        self._failure = ""
        self._thread = threading.Thread(target=self._join, args=(before,), name=order.name, daemon=True)
        self._thread.start()

    def _join(self, before: Link | None) -> None:
        order = self.order
        try:
            if before is not None:
                before.close()
            store = reach_store(order.host, order.port, order.timeout_s)
            where = order.replica, order.num_replicas, order.backend, order.timeout_s
            self._group = join_at(store, f"{order.name}-{self._tp_rank}", *where)
            store.set(ready_key(order.name, order.replica, self._tp_rank), "1")
        except RuntimeError as error:  # of torch: a replica or the store is not there
            self._failure = str(error).splitlines()[0]

    def group(self, deadline: Deadline) -> dist.ProcessGroup:
        """The group of the replicas' same ranks.

        Raises:
            WeightUpdateError: not all of them have joined.
        """
        self._thread.join(max(0.0, deadline.left_s))
        if self._group is None:
            raise WeightUpdateError(
                f"link {self.order.number}: {self._failure or 'a replica has not joined'}"
            )
        return self._group

    def close(self) -> None:
        """Leave it, once joining has ended one way or the other; that has a deadline."""
        self._thread.join()
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


class Route(Protocol):
    """One transfer's way of filling buckets. Buckets are begun and completed in the plan's order."""

    def begin(self, bucket_idx: int, sender: int, space: torch.Tensor) -> None:
        """Begin to fill ``space``, uint8, which the last but one bucket may have used."""
        ...

    def complete(self, bucket_idx: int) -> None:
        """Wait until the bucket is whole, and pass on what others need of it."""
        ...

    def finish(self) -> None:
        """Wait until all that was passed on has left."""
        ...


@dataclass(frozen=True, slots=True)
class _Coming:
    """A bucket, or its stripe, on its way to this rank."""

    sender: int
    space: torch.Tensor
    work: dist.Work | None  # None: it has no bytes


class Direct:
    """Every bucket comes whole from its sender."""

    def __init__(self, trainer: dist.ProcessGroup, deadline: Deadline) -> None:
        self._trainer = trainer
        self._deadline = deadline
        self._coming: dict[int, _Coming] = {}

    def begin(self, bucket_idx: int, sender: int, space: torch.Tensor) -> None:
        work = start_receive(self._trainer, sender, space) if len(space) else None
        self._coming[bucket_idx] = _Coming(sender, space, work)

    def complete(self, bucket_idx: int) -> None:
        coming = self._coming.pop(bucket_idx)
        if coming.work is not None:
            what = f"waiting for bucket {bucket_idx} of sender {coming.sender}"
            self._deadline.wait(coming.work, what)

    def finish(self) -> None:
        """Nothing is passed on."""


class Relay:
    """This replica's stripe comes from the sender, those of the others from them."""

    def __init__(self, trainer: dist.ProcessGroup, link: Link, deadline: Deadline) -> None:
        self._trainer = trainer
        self._replicas = link.group(deadline)
        self._own, self._count = link.order.replica, link.order.num_replicas
        self._deadline = deadline
        self._coming: dict[int, _Coming] = {}

    def begin(self, bucket_idx: int, sender: int, space: torch.Tensor) -> None:
        part = stripe(space, self._own, self._count)
        work = start_receive(self._trainer, sender, part) if len(part) else None
        self._coming[bucket_idx] = _Coming(sender, space, work)

    def complete(self, bucket_idx: int) -> None:
        coming = self._coming.pop(bucket_idx)
        if coming.work is not None:
            what = f"waiting for stripe {self._own} of bucket {bucket_idx} of sender {coming.sender}"
            self._deadline.wait(coming.work, what)
        stripes = {replica: stripe(coming.space, replica, self._count) for replica in range(self._count)}
        own = stripes.pop(self._own)
        sends = dict.fromkeys(stripes, own) if len(own) else {}
        receives = {replica: part for replica, part in stripes.items() if len(part)}
        for work in start_exchange(self._replicas, sends, receives):
            self._deadline.wait(work, f"exchanging bucket {bucket_idx} with the other replicas")

    def finish(self) -> None:
        """Every exchange is complete when its bucket is."""


class Broadcast:
    """Chunks come from the replica before, or from the sender, and are passed on to the replica after."""

    def __init__(self, trainer: dist.ProcessGroup, link: Link, deadline: Deadline) -> None:
        self._trainer = trainer
        self._replicas = link.group(deadline)
        self._own, self._last = link.order.replica, link.order.num_replicas - 1
        self._deadline = deadline
        self._coming: dict[int, list[_Coming]] = {}
        self._leaving: dict[int, list[dist.Work]] = {}

    def begin(self, bucket_idx: int, sender: int, space: torch.Tensor) -> None:
        self._await_passing(bucket_idx - 2)  # it shares its space with this one
        upstream = (self._replicas, self._own - 1) if self._own else (self._trainer, sender)
        self._coming[bucket_idx] = [
            _Coming(sender, chunk, start_receive(*upstream, chunk)) for chunk in chunks(space)
        ]

    def complete(self, bucket_idx: int) -> None:
        leaving = self._leaving.setdefault(bucket_idx, [])
        for coming in self._coming.pop(bucket_idx):
            giver = f"replica {self._own - 1}" if self._own else f"sender {coming.sender}"
            assert coming.work is not None, "no chunk is empty"
            self._deadline.wait(coming.work, f"waiting for bucket {bucket_idx} of {giver}")
            if self._own < self._last:
                leaving.append(start_send(self._replicas, self._own + 1, coming.space))

    def finish(self) -> None:
        for bucket_idx in sorted(self._leaving):
            self._await_passing(bucket_idx)

    def _await_passing(self, bucket_idx: int) -> None:
        for work in self._leaving.pop(bucket_idx, ()):
            self._deadline.wait(work, f"replica {self._own + 1} taking bucket {bucket_idx}")


def route_over(
    trainer: dist.ProcessGroup, link: Link | None, number: int, deadline: Deadline
) -> Relay | Broadcast:
    """The route that the senders announce by the number of a link.

    Raises:
        WeightUpdateError: this rank is not in that link.
    """
    if link is None or link.order.number != number:
        known = "no link" if link is None else f"link {link.order.number}"
        raise WeightUpdateError(f"the senders send over link {number}, this rank is in {known}")
    return (Relay if link.order.strategy == "relay" else Broadcast)(trainer, link, deadline)
