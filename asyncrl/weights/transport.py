"""Moving buckets between the trainer and engines: the group that they share, and the sender's loop.

    join_group:   TCP rendezvous hosted by the first trainer rank, as SGLang's init_weights_update_group
                  expects it; ranks 0..S-1 are the trainer's, S + r is rank r of the engine
    BucketSender: header to every receiver -> buckets in the plan's order, one packed while the last one
                  leaves -> digests. Where the engine holds an earlier version that this side has kept, a
                  bucket is told as what changed since, unless that is longer. Where the engine stages the
                  version, its ranks tell the first sender whether they have verified it

Engines that are linked have one sender together: a bucket is packed once, and leaves once, in stripes to all
of them or in chunks to the first; they pass it on (`routes`). Header, sizes and digests go to each.

Every wait is under a deadline; after any error the groups are broken and must be left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from asyncrl.weights.copies import BucketCopies
from asyncrl.weights.delivery import Delivery, Leaving, Target
from asyncrl.weights.groups import join_at
from asyncrl.weights.pack import sender_table
from asyncrl.weights.plan import Bucket, TransferPlan
from asyncrl.weights.routes import Linked
from asyncrl.weights.wire import (
    NO_BASE,
    NO_LINK,
    VERIFIED,
    WHOLE,
    Deadline,
    Header,
    WeightUpdateError,
    bytes_per_change,
    changes_between,
    chunks,
    staging,
    start_receive,
    stripe,
    transfer_device,
)


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """Where one engine is met: its name, its ranks, and the rendezvous that trainer rank 0 hosts.

    What its ranks hold is read from them, and must agree with ``tp_size`` and ``ep_size``.
    """

    name: str
    tp_size: int
    group_name: str
    master_address: str
    master_port: int
    ep_size: int = 1  # expert parallelism, a divisor of tp_size


def join_group(
    endpoint: EngineEndpoint, rank: int, num_senders: int, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Join the weight group of one engine as trainer rank ``rank``; returns when all members are there.

    Raises:
        WeightUpdateError: not all members came within ``timeout_s``.
    """
    world_size = num_senders + endpoint.tp_size
    timeout = timedelta(seconds=timeout_s)
    try:
        store = TCPStore(
            endpoint.master_address, endpoint.master_port, world_size, is_master=rank == 0, timeout=timeout
        )
        return join_at(store, endpoint.group_name, rank, world_size, backend, timeout_s)
    except RuntimeError as error:
        where = f"{endpoint.master_address}:{endpoint.master_port}"
        raise WeightUpdateError(
            f"engine {endpoint.name}: its {endpoint.tp_size} ranks and {num_senders} of the trainer did not"
            f" meet at {where} within {timeout_s:.0f} s: {str(error).splitlines()[0]}"
        ) from error


@dataclass(frozen=True, slots=True)
class Version:
    """The parameters of one version, in the order of the sender's layouts."""

    version: int
    parameters: Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class LinkedBy:
    """How engines pass buckets on to each other: see `routes`."""

    number: int
    strategy: Linked


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sent of a version."""

    num_bytes: int  # which each engine has in the end
    failures: Mapping[str, str]  # of a staged version: engine -> why it did not verify it


class BucketSender:
    """One trainer rank's part of a plan, ready to be sent again for every version.

    Args:
        targets: one engine, or the replicas of a link in their order.
        parameters: stand for those of all versions: the same shapes, dtypes and device.
        link: how the replicas are joined; None for one engine.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        targets: Sequence[Target],
        parameters: Sequence[torch.Tensor],
        link: LinkedBy | None = None,
    ) -> None:
        self._plan = plan
        self._is_first = rank == 0
        self._targets = tuple(targets)
        self._link = link
        self._device = transfer_device(targets[0].group)
        self._buckets = [
            (bucket, self._copies(bucket, parameters)) for bucket in plan.buckets if bucket.sender == rank
        ]

    def _copies(self, bucket: Bucket, parameters: Sequence[torch.Tensor]) -> BucketCopies:
        num_digests = len(self._plan.receivers[bucket.receiver].shards)
        segments, scales = sender_table(self._plan, bucket)
        return BucketCopies(segments, parameters, bucket.num_bytes, num_digests, scales)

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def send(
        self, version: Version, timeout_s: float, base: Version | None = None, *, staged: bool = False
    ) -> Sent:
        """Send this rank's buckets of one version.

        Args:
            base: what every rank of the engines holds, to tell changes of.
            staged: the engines receive beside what they serve; the first sender waits until all of their
                ranks have verified the version.

        Raises:
            WeightUpdateError: names the engine's rank that did not take its part in time.
        """
        deadline = Deadline(timeout_s)
        delivery = Delivery(self._targets, deadline)
        receivers = sorted({bucket.receiver for bucket, _ in self._buckets})
        number = self._link.number if self._link else NO_LINK
        header = Header(version.version, base.version if base else NO_BASE, number, self._plan.plan_hash)
        for receiver in receivers:
            self._send_to_all(receiver, header.encode().to(self._device), "the header", delivery)
        num_bytes, digests = self._send_buckets(version.parameters, delivery, base)
        for receiver in receivers:
            self._send_to_all(receiver, digests[receiver], "digests", delivery)
        delivery.require_all()
        failures: dict[str, str] = {}
        if staged and self._is_first:
            for target in self._targets:
                try:
                    self._await_results(target, version.version, deadline)
                except WeightUpdateError as error:
                    failures[target.engine] = str(error)
        return Sent(num_bytes, failures)

    def _await_results(self, target: Target, version: int, deadline: Deadline) -> None:
        for receiver in range(len(self._plan.receivers)):
            who = f"rank {receiver} of {target.engine}"
            result = torch.zeros(1, dtype=torch.int64, device=self._device)
            work = start_receive(target.group, self._group_rank(receiver), result)
            deadline.wait(work, f"{who} verifying version {version}")
            if int(result) != VERIFIED:
                raise WeightUpdateError(f"{who} could not verify version {version}")

    def _send_buckets(
        self, parameters: Sequence[torch.Tensor], delivery: Delivery, base: Version | None
    ) -> tuple[int, list[torch.Tensor]]:
        """Returns the bytes sent and, per receiver, the digest of each of its parameters as far as this rank
        has them."""
        digests = [
            torch.zeros(len(layout.shards), dtype=torch.int64, device=self._device)
            for layout in self._plan.receivers
        ]
        largest = max((bucket.num_bytes for bucket, _ in self._buckets), default=0)
        spaces = staging(2, largest, self._device)
        before = staging(1, largest if base else 0, self._device)[0]
        leaving: list[list[Leaving]] = []
        num_bytes = 0
        for bucket_idx, (bucket, copies) in enumerate(self._buckets):
            if bucket_idx >= 2:
                delivery.end(leaving[bucket_idx - 2])
            space = spaces[bucket_idx % 2, : bucket.num_bytes]
            copies.pack(parameters, space, digests[bucket.receiver])
            if base is not None:
                old = before[: bucket.num_bytes]
                copies.pack(base.parameters, old, torch.zeros_like(digests[bucket.receiver]))
                space = self._send_size(bucket, old, space, delivery)
            leaving.append(self._start(bucket, bucket_idx, space, delivery))
            num_bytes += len(space)
        for pending in leaving[-2:]:
            delivery.end(pending)
        return num_bytes, digests

    def _send_size(
        self, bucket: Bucket, old: torch.Tensor, new: torch.Tensor, delivery: Delivery
    ) -> torch.Tensor:
        """Announce the number of changes, or WHOLE; returns what must follow, which may be nothing."""
        changes = changes_between(old, new)
        count = WHOLE if changes is None else len(changes) // bytes_per_change(len(new))
        size = torch.tensor([count], dtype=torch.int64, device=new.device)
        self._send_to_all(bucket.receiver, size, "the size of a bucket", delivery)
        return new if changes is None else changes

    def _start(
        self, bucket: Bucket, bucket_idx: int, space: torch.Tensor, delivery: Delivery
    ) -> list[Leaving]:
        """Begin to send a bucket, as `routes` has it arrive; no empty parts."""
        first, count = self._targets[0], len(self._targets)
        if self._link is None:
            parts = [(first, space)]
        elif self._link.strategy == "broadcast":
            parts = [(first, chunk) for chunk in chunks(space)]
        else:
            parts = [(target, stripe(space, idx, count)) for idx, target in enumerate(self._targets)]
        leaving: list[Leaving] = []
        for target, part in parts:
            if len(part):
                what = f"rank {bucket.receiver} of {target.engine} taking bucket {bucket_idx}"
                leaving += delivery.begin(target, self._group_rank(bucket.receiver), part, what)
        return leaving

    def _send_to_all(self, receiver: int, data: torch.Tensor, name: str, delivery: Delivery) -> None:
        """To the same rank of every engine."""
        for target in self._targets:
            what = f"rank {receiver} of {target.engine} taking {name}"
            delivery.end(delivery.begin(target, self._group_rank(receiver), data, what))

    def _group_rank(self, receiver: int) -> int:
        return len(self._plan.senders) + receiver
