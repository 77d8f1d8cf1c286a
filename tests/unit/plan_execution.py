"""A whole plan carried out in one process, through the tables and executors that real ranks use."""

from __future__ import annotations

import json
from array import array

import torch

from asyncrl.weights.pack import receiver_instructions, sender_table
from asyncrl.weights.plan import TransferPlan
from asyncrl.weights.receiver import BucketCopies


def transfer(
    plan: TransferPlan, sources: list[list[torch.Tensor]]
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Run a plan: the receivers' parameters, and per receiver the digests of sender and receiver side."""
    targets = [
        [
            torch.full(shard.shape, 9.0).to(getattr(torch, dtype))
            for shard, dtype in zip(layout.shards, layout.dtypes, strict=True)
        ]
        for layout in plan.receivers
    ]
    digests = [[torch.zeros(len(parts), dtype=torch.int64) for _ in range(2)] for parts in targets]
    instructions = [json.loads(receiver_instructions(plan, rank)) for rank in range(len(targets))]
    for parts, told in zip(targets, instructions, strict=True):
        for shard_idx, first_row in told["padding"]:
            parts[shard_idx][first_row:] = 0
    queues = [iter(told["buckets"]) for told in instructions]
    for bucket in plan.buckets:
        receiver, space = bucket.receiver, torch.empty(bucket.num_bytes, dtype=torch.uint8)
        num_digests = len(targets[receiver])
        table, scales = sender_table(plan, bucket)
        copies = BucketCopies(table, sources[bucket.sender], bucket.num_bytes, num_digests, scales)
        copies.pack(sources[bucket.sender], space, digests[receiver][0])
        told = next(queues[receiver])
        assert (told["sender"], told["num_bytes"]) == (bucket.sender, bucket.num_bytes)
        copies = BucketCopies(array("q", told["segments"]), targets[receiver], bucket.num_bytes, num_digests)
        copies.unpack(targets[receiver], space, digests[receiver][1])
    return targets, digests
