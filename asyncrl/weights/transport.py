"""Moving buckets between the trainer and one engine: the group that they share, and the sender's loop.

    join_group:   TCP rendezvous hosted by the first trainer rank, as SGLang's init_weights_update_group
                  expects it; ranks 0..S-1 are the trainer's, S + r is rank r of the engine
    BucketSender: header to every receiver -> buckets in the plan's order, one packed while the last one
                  leaves -> digests

Every wait is under a deadline; after any error the group is broken and must be left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    _new_process_group_helper,
    _world,
)

from asyncrl.weights.pack import sender_table
from asyncrl.weights.plan import Bucket, TransferPlan
from asyncrl.weights.receiver import (
    BucketCopies,
    Deadline,
    WeightUpdateError,
    header_of,
    staging_pair,
    start_send,
    transfer_device,
)


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """Where one engine is met: its name, its ranks, and the rendezvous that trainer rank 0 hosts."""

    name: str
    tp_size: int
    group_name: str
    master_address: str
    master_port: int


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
        group: dist.ProcessGroup
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(endpoint.group_name, store),
            group_name=GroupName(endpoint.group_name),
            timeout=timeout,
        )
    except RuntimeError as error:
        where = f"{endpoint.master_address}:{endpoint.master_port}"
        raise WeightUpdateError(
            f"engine {endpoint.name}: its {endpoint.tp_size} ranks and {num_senders} of the trainer did not"
            f" meet at {where} within {timeout_s:.0f} s: {str(error).splitlines()[0]}"
        ) from error
    # Point-to-point calls look a group's ranks up here; a group beside the default one is not in it.
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


class BucketSender:
    """One trainer rank's part of a plan, ready to be sent again for every version."""

    def __init__(
        self, plan: TransferPlan, rank: int, group: dist.ProcessGroup, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._plan = plan
        self._group = group
        self._buckets = [
            (bucket, self._copies(bucket, parameters)) for bucket in plan.buckets if bucket.sender == rank
        ]

    def _copies(self, bucket: Bucket, parameters: Sequence[torch.Tensor]) -> BucketCopies:
        num_digests = len(self._plan.receivers[bucket.receiver].shards)
        return BucketCopies(sender_table(self._plan, bucket), parameters, bucket.num_bytes, num_digests)

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def send(self, version: int, timeout_s: float) -> int:
        """Send this rank's buckets of one version; returns the bytes sent.

        Raises:
            WeightUpdateError: names the engine rank that did not take its part in time.
        """
        deadline = Deadline(timeout_s)
        receivers = sorted({bucket.receiver for bucket, _ in self._buckets})
        header = header_of(version, self._plan.plan_hash).to(transfer_device(self._group))
        for receiver in receivers:
            self._send_now(receiver, header, "the header", deadline)
        digests = self._send_buckets(deadline)
        for receiver in receivers:
            self._send_now(receiver, digests[receiver], "digests", deadline)
        return sum(bucket.num_bytes for bucket, _ in self._buckets)

    def _send_buckets(self, deadline: Deadline) -> list[torch.Tensor]:
        """Returns, per receiver, the digest of each of its parameters as far as this rank sent it."""
        device = transfer_device(self._group)
        digests = [
            torch.zeros(len(layout.shards), dtype=torch.int64, device=device)
            for layout in self._plan.receivers
        ]
        largest = max((bucket.num_bytes for bucket, _ in self._buckets), default=0)
        staging = staging_pair(largest, device)
        leaving: list[tuple[dist.Work, str]] = []
        for bucket_idx, (bucket, copies) in enumerate(self._buckets):
            if bucket_idx >= 2:
                deadline.wait(*leaving[bucket_idx - 2])
            space = staging[bucket_idx % 2, : bucket.num_bytes]
            copies.pack(space, digests[bucket.receiver])
            leaving.append(self._start(bucket, bucket_idx, space))
        for pending in leaving[-2:]:
            deadline.wait(*pending)
        return digests

    def _start(self, bucket: Bucket, bucket_idx: int, space: torch.Tensor) -> tuple[dist.Work, str]:
        what = f"engine rank {bucket.receiver} taking bucket {bucket_idx}"
        return start_send(self._group, self._group_rank(bucket.receiver), space), what

    def _send_now(self, receiver: int, data: torch.Tensor, name: str, deadline: Deadline) -> None:
        work = start_send(self._group, self._group_rank(receiver), data)
        deadline.wait(work, f"engine rank {receiver} taking {name}")

    def _group_rank(self, receiver: int) -> int:
        return len(self._plan.senders) + receiver
