"""From the layouts of both sides to the copies of one publication. Pure integers, the same on every rank.

    RankLayouts of both sides -> `tables` -> `overlap` -> `moves`: owners, messages -> plan hash

Invariants: every element that a receiver's blocks name is written exactly once; a rectangle is sent in the
narrower of the two dtypes; senders and receivers meet their buckets in the same global order, so they cannot
deadlock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.weights import moves as movement
from asyncrl.weights.fp8 import SCALE_SUFFIX, require_whole_blocks, scaled_tensors, without_scales
from asyncrl.weights.moves import Messages, Moves
from asyncrl.weights.overlap import overlap
from asyncrl.weights.tables import (
    ELEMENT_BYTES,
    Ints,
    RankLayout,
    decode_layout,
    encode_layout,
    number_tensors,
    table_of,
)

__all__ = ["ELEMENT_BYTES", "RankLayout", "decode_layout", "encode_layout"]


@dataclass(frozen=True, slots=True)
class Place:
    """A rectangle's upper left element in a parameter of a rank."""

    rank: int
    shard_idx: int
    row: int
    col: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle that one sender owns and one receiver needs."""

    source: Place
    target: Place
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message of a pair; it carries moves [first_move, last_move) of the plan back to back, then the
    scales of those that quantise."""

    sender: int
    receiver: int
    num_bytes: int
    first_move: int
    last_move: int


@dataclass(frozen=True, slots=True, eq=False)
class ShardColumns:
    """Of one rank's parameters, seen as matrices; int64 [parameters]."""

    widths: Ints  # columns
    element_bytes: Ints
    scales: Ints  # the index of the parameter that holds its fp8 scales, or -1

    @staticmethod
    def of(layout: RankLayout) -> ShardColumns:
        widths = [shard.cols for shard in layout.shards]
        sizes = [ELEMENT_BYTES[dtype] for dtype in layout.dtypes]
        places = {shard.name: idx for idx, shard in enumerate(layout.shards)}
        scales = [places.get(f"{shard.name}{SCALE_SUFFIX}", -1) for shard in layout.shards]
        return ShardColumns(*(np.array(column, dtype=np.int64) for column in (widths, sizes, scales)))


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Everything that moves from the trainer ranks to the ranks of one engine."""

    senders: tuple[RankLayout, ...]
    receivers: tuple[RankLayout, ...]
    sender_columns: tuple[ShardColumns, ...]
    receiver_columns: tuple[ShardColumns, ...]
    moves: Moves
    buckets: tuple[Bucket, ...]  # in the order in which both ends meet them
    plan_hash: str

    def sent_bytes(self) -> list[int]:
        """Per trainer rank."""
        totals = [0] * len(self.senders)
        for bucket in self.buckets:
            totals[bucket.sender] += bucket.num_bytes
        return totals

    def total_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)


def plan_transfer(
    senders: Sequence[RankLayout],
    receivers: Sequence[RankLayout],
    bucket_bytes: int,
    loads: Sequence[int] | None = None,
) -> TransferPlan:
    """Plan one engine's publication; ``loads[i]`` bytes are already planned for trainer rank i.

    Raises:
        ModelError: no trainer rank holds something that the engine needs, or a row exceeds half a bucket.
    """
    whole = _moves(senders, receivers, list(loads) if loads else [0] * len(senders))
    counts = movement.limit_messages(whole, bucket_bytes)
    moves, messages = movement.cut_messages(whole, counts, len(receivers))
    bounds = messages.first.tolist()
    columns = (messages.sender.tolist(), messages.receiver.tolist(), messages.num_bytes.tolist())
    buckets = tuple(map(Bucket, *columns, bounds[:-1], bounds[1:]))
    described = [
        json.dumps([[(shard.name, shard.shape) for shard in rank.shards], rank.dtypes])
        for rank in (*senders, *receivers)
    ]
    return TransferPlan(
        tuple(senders),
        tuple(receivers),
        tuple(map(ShardColumns.of, senders)),
        tuple(map(ShardColumns.of, receivers)),
        moves,
        buckets,
        hash_of(moves, messages, described),
    )


def assign_owners(
    senders: Sequence[RankLayout], receivers: Sequence[RankLayout], loads: Sequence[int]
) -> list[Piece]:
    """Cut what the receivers need into pieces and give each to a rank that holds it, evenly."""
    moves = _moves(senders, receivers, loads)
    return [
        Piece(Place(sender, *source), Place(receiver, *target), rows, cols)
        for sender, receiver, source, target, rows, cols in zip(
            moves.sender.tolist(),
            moves.receiver.tolist(),
            _rows(moves.source_shard, moves.source_row, moves.source_col),
            _rows(moves.target_shard, moves.target_row, moves.target_col),
            moves.rows.tolist(),
            moves.cols.tolist(),
            strict=True,
        )
    ]


def _moves(senders: Sequence[RankLayout], receivers: Sequence[RankLayout], loads: Sequence[int]) -> Moves:
    tensors = number_tensors((senders, receivers))
    names = list(tensors)
    sender_table, receiver_table = table_of(senders, tensors), table_of(receivers, tensors)
    scaled = scaled_tensors(tensors)
    require_whole_blocks(sender_table, scaled.keys(), names.__getitem__)
    receiver_table = without_scales(receiver_table, scaled.values())
    pieces, holders = overlap(sender_table, receiver_table, names.__getitem__)
    planned = np.array(loads, dtype=np.int64)
    return movement.assign_owners(pieces, holders, sender_table, receiver_table, planned)


def _rows(*columns: Ints) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def hash_of(moves: Moves, messages: Messages, described: Iterable[str]) -> str:
    """SHA-256 over every column of the plan, and over what it was made for."""
    digest = hashlib.sha256()
    for column in (*moves.columns(), messages.sender, messages.receiver, messages.round, messages.first):
        digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    for text in described:
        digest.update(text.encode())
    return digest.hexdigest()
