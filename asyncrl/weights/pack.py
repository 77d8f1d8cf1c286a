"""From a plan's buckets to the segment tables that `asyncrl._C` executes.

A sender's table reads its own parameters; a receiver's writes its own. Both key the digest of an element by
its position in the receiver's parameter, and both sum it per parameter of the receiver.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from typing import Any

from asyncrl.weights.geometry import ModelError
from asyncrl.weights.layout import ShardLayout
from asyncrl.weights.plan import ELEMENT_BYTES, Bucket, Place, RankLayout, TransferPlan, wire_dtype

_F32_AS_BF16 = 5  # Op::kF32AsBf16 in csrc/reshard/index.h; plain copies are numbered by their element size


def sender_table(plan: TransferPlan, bucket: Bucket) -> array[int]:
    """Segments of one bucket, from the sender's parameters into the bucket."""
    return array("q", _table(plan, bucket, on_sender=True))


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


def first_padding_row(shard: ShardLayout) -> int:
    """Where the rows that no block fills begin; they are always the last ones."""
    filled = max((block.local_row + block.rows for block in shard.blocks), default=0)
    if (shard.rows - filled) * shard.cols != shard.num_padding:
        raise ModelError(f"{shard.name}: its blocks leave a hole; only trailing rows may be padding")
    return filled


def _table(plan: TransferPlan, bucket: Bucket, *, on_sender: bool) -> Iterable[int]:
    """Fields of csrc/reshard/index.h's Segment, one after the other."""
    sender, receiver = plan.senders[bucket.sender], plan.receivers[bucket.receiver]
    for item in bucket.pieces:
        source, target = item.piece.source, item.piece.target
        dtypes = sender.dtypes[source.shard_idx], receiver.dtypes[target.shard_idx]
        local, layout, dtype = (source, sender, dtypes[0]) if on_sender else (target, receiver, dtypes[1])
        yield local.shard_idx
        yield _element(local, layout)
        yield layout.shards[local.shard_idx].cols
        yield item.piece.rows
        yield item.piece.cols
        yield item.wire_offset
        yield _element(target, receiver)
        yield receiver.shards[target.shard_idx].cols
        yield target.shard_idx
        yield _op(dtype, wire_dtype(*dtypes))


def _element(place: Place, layout: RankLayout) -> int:
    return place.row * layout.shards[place.shard_idx].cols + place.col


def _op(local: str, wire: str) -> int:
    return ELEMENT_BYTES[wire] if local == wire else _F32_AS_BF16
