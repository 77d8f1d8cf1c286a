"""Moving buckets between the trainer and one engine: the group that they share, and the sender's loop.

    join_group:   TCP rendezvous hosted by the first trainer rank, as SGLang's init_weights_update_group
                  expects it; ranks 0..S-1 are the trainer's, S + r is rank r of the engine
    BucketSender: header to every receiver -> buckets in the plan's order, one packed while the last one
                  leaves -> digests. Where the engine holds an earlier version that this side has kept, a
                  bucket is told as what changed since, unless that is longer. Where the engine stages the
                  version, its ranks tell the first sender whether they have verified it

Every wait is under a deadline; after any error the group is broken and must be left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from asyncrl.weights.groups import join_at
from asyncrl.weights.pack import sender_table
from asyncrl.weights.plan import Bucket, TransferPlan
from asyncrl.weights.receiver import BucketCopies
from asyncrl.weights.wire import (
    NO_BASE,
    VERIFIED,
    WHOLE,
    Deadline,
    WeightUpdateError,
    bytes_per_change,
    changes_between,
    header_of,
    staging,
    start_receive,
    start_send,
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


class BucketSender:
    """One trainer rank's part of a plan, ready to be sent again for every version.

    ``parameters`` stand for those of all versions: the same shapes, dtypes and device.
    """

    def __init__(
        self, plan: TransferPlan, rank: int, group: dist.ProcessGroup, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._plan = plan
        self._is_first = rank == 0
        self._group = group
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
    ) -> int:
        """Send this rank's buckets of one version; returns the bytes sent.

        Args:
            base: what every rank of the engine holds, to tell changes of.
            staged: the engine receives beside what it serves; the first sender waits until all of the
                engine's ranks have verified the version.

        Raises:
            WeightUpdateError: names the engine rank that did not take its part in time.
        """
        deadline = Deadline(timeout_s)
        receivers = sorted({bucket.receiver for bucket, _ in self._buckets})
        header = header_of(version.version, base.version if base else NO_BASE, self._plan.plan_hash)
        header = header.to(transfer_device(self._group))
        for receiver in receivers:
            self._send_now(receiver, header, "the header", deadline)
        num_bytes, digests = self._send_buckets(version.parameters, deadline, base)
        for receiver in receivers:
            self._send_now(receiver, digests[receiver], "digests", deadline)
        if staged and self._is_first:
            self._await_results(version.version, deadline)
        return num_bytes

    def _await_results(self, version: int, deadline: Deadline) -> None:
        for receiver in range(len(self._plan.receivers)):
            result = torch.zeros(1, dtype=torch.int64, device=transfer_device(self._group))
            work = start_receive(self._group, self._group_rank(receiver), result)
            deadline.wait(work, f"engine rank {receiver} verifying version {version}")
            if int(result) != VERIFIED:
                raise WeightUpdateError(f"engine rank {receiver} could not verify version {version}")

    def _send_buckets(
        self, parameters: Sequence[torch.Tensor], deadline: Deadline, base: Version | None
    ) -> tuple[int, list[torch.Tensor]]:
        """Returns the bytes sent and, per receiver, the digest of each of its parameters as far as this rank
        has them."""
        device = transfer_device(self._group)
        digests = [
            torch.zeros(len(layout.shards), dtype=torch.int64, device=device)
            for layout in self._plan.receivers
        ]
        largest = max((bucket.num_bytes for bucket, _ in self._buckets), default=0)
        spaces = staging(2, largest, device)
        before = staging(1, largest if base else 0, device)[0]
        leaving: list[tuple[dist.Work, str] | None] = []  # None: nothing changed, nothing is sent
        num_bytes = 0
        for bucket_idx, (bucket, copies) in enumerate(self._buckets):
            if bucket_idx >= 2:
                _finish(leaving[bucket_idx - 2], deadline)
            space = spaces[bucket_idx % 2, : bucket.num_bytes]
            copies.pack(parameters, space, digests[bucket.receiver])
            if base is not None:
                old = before[: bucket.num_bytes]
                copies.pack(base.parameters, old, torch.zeros_like(digests[bucket.receiver]))
                space = self._send_size(bucket, old, space, deadline)
            leaving.append(self._start(bucket, bucket_idx, space) if len(space) else None)
            num_bytes += len(space)
        for pending in leaving[-2:]:
            _finish(pending, deadline)
        return num_bytes, digests

    def _send_size(
        self, bucket: Bucket, old: torch.Tensor, new: torch.Tensor, deadline: Deadline
    ) -> torch.Tensor:
        """Announce the number of changes, or WHOLE; returns what must follow."""
        changes = changes_between(old, new)
        count = WHOLE if changes is None else len(changes) // bytes_per_change(len(new))
        size = torch.tensor([count], dtype=torch.int64, device=new.device)
        self._send_now(bucket.receiver, size, "the size of a bucket", deadline)
        return new if changes is None else changes

    def _start(self, bucket: Bucket, bucket_idx: int, space: torch.Tensor) -> tuple[dist.Work, str]:
        what = f"engine rank {bucket.receiver} taking bucket {bucket_idx}"
        return start_send(self._group, self._group_rank(bucket.receiver), space), what

    def _send_now(self, receiver: int, data: torch.Tensor, name: str, deadline: Deadline) -> None:
        work = start_send(self._group, self._group_rank(receiver), data)
        deadline.wait(work, f"engine rank {receiver} taking {name}")

    def _group_rank(self, receiver: int) -> int:
        return len(self._plan.senders) + receiver


def _finish(pending: tuple[dist.Work, str] | None, deadline: Deadline) -> None:
    if pending is not None:
        deadline.wait(*pending)
