"""From a plan's buckets to the segment tables that `asyncrl._C` executes.

A sender's table reads its own parameters; a receiver's writes its own. Both key the digest of an element by
its position in the receiver's parameter, and both sum it per parameter of the receiver.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.weights.fp8 import BLOCK, FP8_BYTES
from asyncrl.weights.geometry import ModelError
from asyncrl.weights.layout import ShardLayout
from asyncrl.weights.moves import Moves, scales_begin
from asyncrl.weights.plan import Bucket, TransferPlan
from asyncrl.weights.tables import Ints

_COPY4, _F32_AS_BF16 = 4, 5
_AS_FP8 = {4: 9, 2: 10}
"""Values of Op in csrc/reshard/index.h; plain copies are numbered by their element size, operations that
quantise by that of the parameter."""


def sender_table(plan: TransferPlan, bucket: Bucket) -> tuple[array[int], array[int]]:
    """Segments of one bucket, from the sender's parameters into the bucket; and the scales of those that
    quantise, as csrc/reshard/index.h's BlockScales."""
    moves = _moves_of(plan, bucket)
    sender = plan.sender_columns[bucket.sender]
    stride = sender.widths[moves.source_shard]
    offset = moves.source_row * stride + moves.source_col
    element = sender.element_bytes[moves.source_shard]
    segments = _segments(plan, bucket, moves, moves.source_shard, offset, stride, element)
    quantised, wire, place = _scales(plan, bucket, moves)
    scales = np.stack((quantised, wire, place.position, place.stride, place.shard), axis=1)
    return array("q", segments.tobytes()), array("q", scales.tobytes())


def receiver_table(plan: TransferPlan, bucket: Bucket) -> array[int]:
    """Segments of one bucket, from the bucket into the receiver's parameters."""
    moves = _moves_of(plan, bucket)
    receiver = plan.receiver_columns[bucket.receiver]
    stride = receiver.widths[moves.target_shard]
    offset = moves.target_row * stride + moves.target_col
    element = receiver.element_bytes[moves.target_shard]
    segments = _segments(plan, bucket, moves, moves.target_shard, offset, stride, element)
    quantised, wire, place = _scales(plan, bucket, moves)
    blocks = (-(-moves.rows[quantised] // BLOCK), -(-moves.cols[quantised] // BLOCK))
    columns = (place.shard, place.position, place.stride, *blocks, wire, place.position, place.stride)
    scales = np.stack((*columns, place.shard, np.full(len(wire), _COPY4)), axis=1)
    return array("q", np.concatenate((segments, scales)).tobytes())


def receiver_instructions(plan: TransferPlan, receiver: int) -> bytes:
    """What an engine rank must know to receive, as JSON; `asyncrl.weights.receiver` reads it."""
    layout = plan.receivers[receiver]
    buckets = [
        {
            "sender": bucket.sender,
            "num_bytes": bucket.num_bytes,
            "segments": list(receiver_table(plan, bucket)),
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


def _moves_of(plan: TransferPlan, bucket: Bucket) -> Moves:
    return plan.moves.take(np.arange(bucket.first_move, bucket.last_move))


def _segments(
    plan: TransferPlan, bucket: Bucket, moves: Moves, shard: Ints, offset: Ints, stride: Ints, element: Ints
) -> Ints:
    """Fields of csrc/reshard/index.h's Segment, [moves, fields]; ``element`` bytes in the parameter."""
    target_stride = plan.receiver_columns[bucket.receiver].widths[moves.target_shard]
    position = moves.target_row * target_stride + moves.target_col
    wire_element = moves.row_bytes // moves.cols
    cast = np.where(wire_element == FP8_BYTES, np.where(element == 4, _AS_FP8[4], _AS_FP8[2]), _F32_AS_BF16)
    op = np.where(element == wire_element, wire_element, cast)
    begins = np.cumsum(moves.plain_bytes) - moves.plain_bytes
    columns = (shard, offset, stride, moves.rows, moves.cols, begins, position, target_stride)
    return np.stack((*columns, moves.target_shard, op), axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class _ScalePlaces:
    """Where scales go in the receiver's parameters; int64 [moves that quantise]."""

    shard: Ints
    position: Ints  # of the first one, in elements
    stride: Ints


def _scales(plan: TransferPlan, bucket: Bucket, moves: Moves) -> tuple[Ints, Ints, _ScalePlaces]:
    """The moves that quantise, where the scales of each begin in the bucket, and where they go."""
    receiver = plan.receiver_columns[bucket.receiver]
    sizes = moves.scale_bytes
    begin = int(scales_begin(moves.plain_bytes.sum(), sizes.sum()))
    quantised = np.flatnonzero(moves.unit > 1)
    wire = begin + (np.cumsum(sizes) - sizes)[quantised]
    shard = receiver.scales[moves.target_shard[quantised]]
    stride = receiver.widths[shard]
    row, col = moves.target_row[quantised] // BLOCK, moves.target_col[quantised] // BLOCK
    return quantised, wire, _ScalePlaces(shard, row * stride + col, stride)
