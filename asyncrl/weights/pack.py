"""From a plan's buckets to the segment tables that `asyncrl._C` executes.

A sender's table reads its own parameters; a receiver's writes its own. Both key the digest of an element by
its position in the receiver's parameter, and both sum it per parameter of the receiver.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

import numpy as np

from asyncrl.weights.geometry import ModelError
from asyncrl.weights.layout import ShardLayout
from asyncrl.weights.plan import Bucket, TransferPlan

_F32_AS_BF16 = 5  # Op::kF32AsBf16 in csrc/reshard/index.h; plain copies are numbered by their element size


def sender_table(plan: TransferPlan, bucket: Bucket) -> array[int]:
    """Segments of one bucket, from the sender's parameters into the bucket."""
    return _table(plan, bucket, on_sender=True)


def receiver_instructions(plan: TransferPlan, receiver: int) -> bytes:
    """What an engine rank must know to receive, as JSON; `asyncrl.weights.receiver` reads it."""
    layout = plan.receivers[receiver]
    buckets = [
        {
            "sender": bucket.sender,
            "num_bytes": bucket.num_bytes,
            "segments": list(_table(plan, bucket, on_sender=False)),
        }
        for bucket in plan.buckets
        if bucket.receiver == receiver
    ]
    padding = [
        [shard_idx, first_padding_row(shard)]
        for shard_idx, shard in enumerate(layout.shards)
        if shard.num_padding
    ]
    instructions: dict[str, Any] = {
        "plan_hash": plan.plan_hash,
        "parameters": [shard.name for shard in layout.shards],
        "padding": padding,
        "buckets": buckets,
    }
    return json.dumps(instructions).encode()


def refuse_quantising(plan: TransferPlan) -> None:
    """The executor has no operation yet for fp8 blocks; their moves are those with a unit above 1, and those
    of the scales, whose source is a weight (`fp8`).

    Raises:
        ModelError: the plan has such moves.
    """
    if bool((plan.moves.unit > 1).any()):
        raise ModelError("the engine holds fp8 blocks, which cannot be written yet; serve it in bfloat16")


def first_padding_row(shard: ShardLayout) -> int:
    """Where the rows that no block fills begin; they are always the last ones."""
    filled = max((block.local_row + block.rows for block in shard.blocks), default=0)
    if (shard.rows - filled) * shard.cols != shard.num_padding:
        raise ModelError(f"{shard.name}: its blocks leave a hole; only trailing rows may be padding")
    return filled


def _table(plan: TransferPlan, bucket: Bucket, *, on_sender: bool) -> array[int]:
    """Fields of csrc/reshard/index.h's Segment, one after the other."""
    moves = plan.moves.take(np.arange(bucket.first_move, bucket.last_move))
    sender, receiver = plan.sender_columns[bucket.sender], plan.receiver_columns[bucket.receiver]
    target_stride = receiver.widths[moves.target_shard]
    position = moves.target_row * target_stride + moves.target_col
    if on_sender:
        shard, stride = moves.source_shard, sender.widths[moves.source_shard]
        offset = moves.source_row * stride + moves.source_col
        dtype_bytes = sender.element_bytes[shard]
    else:
        shard, stride, offset = moves.target_shard, target_stride, position
        dtype_bytes = receiver.element_bytes[shard]
    wire_bytes = moves.row_bytes // moves.cols
    sizes = moves.num_bytes
    columns = (
        *(shard, offset, stride, moves.rows, moves.cols, np.cumsum(sizes) - sizes),
        *(position, target_stride, moves.target_shard),
        np.where(dtype_bytes == wire_bytes, wire_bytes, _F32_AS_BF16),
    )
    return array("q", np.stack(columns, axis=1).tobytes())
