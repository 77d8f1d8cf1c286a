"""How the bytes of a bucket reach one engine rank: from their sender, or with the help of other replicas.

    p2p        sender --bucket--> this rank
    relay      sender --stripe i--> replica i; then each replica's rank sends its stripe to all others
    broadcast  sender --chunk--> replica 0 --> replica 1 --> ..., the next chunk behind it

Replicas are engines of one plan: the same rank of each needs the same bytes. A *link* joins them, rank by
rank: rank j of every replica is in one group, whose ranks are the replicas. Over a link every byte leaves the
trainer once, whatever the number of replicas.

All ranks of a link pass the same buckets on in the plan's order, and a sender is at most two buckets ahead,
so nobody waits in a circle. A replica that fails fails its whole link: whoever notices leaves it, so that the
others notice too, and takes only what the senders still send, so that they do not wait for a replica that is
well. The digests, which each rank has from the senders themselves, show what was passed on wrong. This module
runs inside the engine's process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
        self._leaving = threading.Lock()
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
        """Leave it, once joining has ended one way or the other; that has a deadline. Any thread may."""
        self._thread.join()
        with self._leaving:
            group, self._group = self._group, None
            self._failure = self._failure or "it was left"
        if group is not None:
            dist.destroy_process_group(group)


class Route(Protocol):
    """One transfer's way of filling buckets. Buckets are begun and completed in the plan's order."""

    def begin(self, bucket_idx: int, sender: int, space: torch.Tensor) -> None:
        """Begin to fill ``space``, uint8, which the last but one bucket may have used."""
        ...

    def complete(self, bucket_idx: int) -> bool:
        """Wait for the bucket, and pass on what others need of it; returns whether it is whole.

        Raises:
            WeightUpdateError: a sender did not send it.
        """
        ...

    def finish(self) -> str:
        """Wait until all that was passed on has left; returns which replica failed, if one did, and how."""
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

    def complete(self, bucket_idx: int) -> bool:
        coming = self._coming.pop(bucket_idx)
        if coming.work is not None:
            what = f"waiting for bucket {bucket_idx} of sender {coming.sender}"
            self._deadline.wait(coming.work, what)
        return True

    def finish(self) -> str:
        return ""


class _Replicas:
    """The same ranks of other engines, until one of them fails."""

    def __init__(self, link: Link, deadline: Deadline) -> None:
        self.own, self.count = link.order.replica, link.order.num_replicas
        self.failure = ""
        self._link = link
        self._group: dist.ProcessGroup | None = link.group(deadline)

    def attempt(self, action: Callable[[dist.ProcessGroup], None]) -> bool:
        """Do something with them, unless one has failed; where that fails, leave them.

        Returns whether all is well. Connections are closed with the last reference to their group, so no
        caller may keep works of one that has failed.
        """
        if self._group is None:
            return False
        try:
            action(self._group)
        except WeightUpdateError as error:
            self.failure, self._group = str(error), None
            self._link.close()
        return not self.failure


class Relay:
    """This replica's stripe comes from the sender, those of the others from them."""

    def __init__(self, trainer: dist.ProcessGroup, link: Link, deadline: Deadline) -> None:
        self._trainer = trainer
        self._replicas = _Replicas(link, deadline)
        self._deadline = deadline
        self._coming: dict[int, _Coming] = {}

    def begin(self, bucket_idx: int, sender: int, space: torch.Tensor) -> None:
        part = stripe(space, self._replicas.own, self._replicas.count)
        work = start_receive(self._trainer, sender, part) if len(part) else None
        self._coming[bucket_idx] = _Coming(sender, space, work)

    def complete(self, bucket_idx: int) -> bool:
        coming = self._coming.pop(bucket_idx)
        if coming.work is not None:
            own = self._replicas.own
            what = f"waiting for stripe {own} of bucket {bucket_idx} of sender {coming.sender}"
            self._deadline.wait(coming.work, what)
        return self._replicas.attempt(lambda group: self._exchange(group, bucket_idx, coming.space))

    def _exchange(self, group: dist.ProcessGroup, bucket_idx: int, space: torch.Tensor) -> None:
        count = self._replicas.count
        stripes = {replica: stripe(space, replica, count) for replica in range(count)}
        own = stripes.pop(self._replicas.own)
        sends = dict.fromkeys(stripes, own) if len(own) else {}
        receives = {replica: part for replica, part in stripes.items() if len(part)}
        for work in start_exchange(group, sends, receives):
            self._deadline.wait(work, f"exchanging bucket {bucket_idx} with the other replicas")

    def finish(self) -> str:
        return self._replicas.failure


class Broadcast:
    """Chunks come from the replica before, or from the sender, and are passed on to the replica after."""

    def __init__(self, trainer: dist.ProcessGroup, link: Link, deadline: Deadline) -> None:
        self._trainer = trainer
        self._replicas = _Replicas(link, deadline)
        self._is_first = self._replicas.own == 0
        self._is_last = self._replicas.own == self._replicas.count - 1
        self._deadline = deadline
        self._coming: dict[int, list[_Coming]] = {}
        self._leaving: dict[int, list[dist.Work]] = {}

    def begin(self, bucket_idx: int, sender: int, space: torch.Tensor) -> None:
        # It shares its space with the last but one.
        self._with_replicas(lambda _: self._await_passing(bucket_idx - 2))
        coming: list[_Coming] = []

        def start(group: dist.ProcessGroup, giver: int) -> None:
            coming.extend(_Coming(sender, part, start_receive(group, giver, part)) for part in chunks(space))

        if self._is_first:
            start(self._trainer, sender)
        elif not self._with_replicas(lambda group: start(group, self._replicas.own - 1)):
            coming.clear()
        self._coming[bucket_idx] = coming

    def complete(self, bucket_idx: int) -> bool:
        for coming in self._coming.pop(bucket_idx):
            if self._is_first:
                self._await(coming, bucket_idx, f"sender {coming.sender}")
                self._with_replicas(partial(self._pass_on, bucket_idx, coming))
            else:
                self._with_replicas(partial(self._take, bucket_idx, coming))
        return not self._replicas.failure

    def finish(self) -> str:
        def await_all(_: dist.ProcessGroup) -> None:
            for bucket_idx in sorted(self._leaving):
                self._await_passing(bucket_idx)

        self._with_replicas(await_all)
        return self._replicas.failure

    def _with_replicas(self, action: Callable[[dist.ProcessGroup], None]) -> bool:
        if self._replicas.attempt(action):
            return True
        self._leaving.clear()
        if not self._is_first:
            self._coming = {bucket_idx: [] for bucket_idx in self._coming}
        return False

    def _take(self, bucket_idx: int, coming: _Coming, group: dist.ProcessGroup) -> None:
        self._await(coming, bucket_idx, f"replica {self._replicas.own - 1}")
        self._pass_on(bucket_idx, coming, group)

    def _await(self, coming: _Coming, bucket_idx: int, giver: str) -> None:
        assert coming.work is not None, "no chunk is empty"
        self._deadline.wait(coming.work, f"waiting for bucket {bucket_idx} of {giver}")

    def _pass_on(self, bucket_idx: int, coming: _Coming, group: dist.ProcessGroup) -> None:
        if not self._is_last:
            work = start_send(group, self._replicas.own + 1, coming.space)
            self._leaving.setdefault(bucket_idx, []).append(work)

    def _await_passing(self, bucket_idx: int) -> None:
        for work in self._leaving.pop(bucket_idx, ()):
            self._deadline.wait(work, f"replica {self._replicas.own + 1} taking bucket {bucket_idx}")


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
