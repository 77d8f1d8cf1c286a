"""From the layouts of both sides to the copies of one publication. Pure integers, the same on every rank.

    layouts of all trainer ranks --> holders of every rectangle --+
    layout of each engine rank  --> blocks, cut where holders change --> an owner per piece (least loaded)
        --> pieces of a (sender, receiver) pair, cut into buckets --> one global order --> plan hash

Invariants: every element that a receiver's blocks name is written exactly once; a piece is sent in the
narrower of the two dtypes; senders and receivers meet their buckets in the same global order, so they cannot
deadlock.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from asyncrl.weights.geometry import ModelError
from asyncrl.weights.layout import Block, ShardLayout

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What one rank of either side holds; ``dtypes[i]`` is that of ``shards[i]``."""

    shards: tuple[ShardLayout, ...]
    dtypes: tuple[str, ...]

    def __post_init__(self) -> None:
        for shard, dtype in zip(self.shards, self.dtypes, strict=True):
            if dtype not in ELEMENT_BYTES:
                raise ModelError(f"{shard.name} is {dtype}; weights move as {' or '.join(ELEMENT_BYTES)}")


def encode_layout(layout: RankLayout) -> bytes:
    """As JSON, for the other ranks."""
    return json.dumps(dataclasses.asdict(layout)).encode()


def decode_layout(message: bytes) -> RankLayout:
    fields = json.loads(message)
    shards = tuple(
        ShardLayout(item["name"], tuple(item["shape"]), tuple(Block(**block) for block in item["blocks"]))
        for item in fields["shards"]
    )
    return RankLayout(shards, tuple(fields["dtypes"]))


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
class BucketPiece:
    """A piece and the byte offset in its bucket where it begins."""

    piece: Piece
    wire_offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message of a pair."""

    sender: int
    receiver: int
    num_bytes: int
    pieces: tuple[BucketPiece, ...]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Everything that moves from the trainer ranks to the ranks of one engine."""

    senders: tuple[RankLayout, ...]
    receivers: tuple[RankLayout, ...]
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
        ModelError: no trainer rank holds something that the engine needs, or a row exceeds a bucket.
    """
    pieces = assign_owners(senders, receivers, list(loads) if loads else [0] * len(senders))
    per_pair: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        per_pair.setdefault((piece.source.rank, piece.target.rank), []).append(piece)
    cut = {
        pair: _cut_buckets(pair, members, senders, receivers, bucket_bytes)
        for pair, members in per_pair.items()
    }
    buckets = _global_order(cut, len(senders), len(receivers))
    digest = hashlib.sha256(json.dumps([_describe(bucket) for bucket in buckets]).encode())
    for rank in (*senders, *receivers):
        digest.update(json.dumps([(shard.name, shard.shape) for shard in rank.shards]).encode())
        digest.update(json.dumps(rank.dtypes).encode())
    return TransferPlan(tuple(senders), tuple(receivers), tuple(buckets), digest.hexdigest())


def assign_owners(
    senders: Sequence[RankLayout], receivers: Sequence[RankLayout], loads: list[int]
) -> list[Piece]:
    """Cut what the receivers need into pieces and give each to the least loaded rank that holds it.

    Large pieces are given away first; ``loads`` is updated.
    """
    holders = _Holders(senders)
    open_pieces = [
        (candidates, target, rows, cols)
        for receiver, layout in enumerate(receivers)
        for shard_idx, shard in enumerate(layout.shards)
        for block in shard.blocks
        for candidates, target, rows, cols in holders.cut(block, receiver, shard_idx)
    ]
    open_pieces.sort(key=lambda item: -item[2] * item[3])  # stable, so the same on every rank
    pieces = []
    for candidates, target, rows, cols in open_pieces:
        source = min(candidates, key=lambda place: (loads[place.rank], place.rank))
        loads[source.rank] += rows * cols * _wire_bytes(senders, receivers, source, target)
        pieces.append(Piece(source, target, rows, cols))
    return pieces


class _Holders:
    """Which trainer ranks hold which rectangle of which Hugging Face tensor."""

    def __init__(self, senders: Sequence[RankLayout]) -> None:
        self._by_tensor: dict[str, dict[tuple[int, int, int, int], list[Place]]] = {}
        for rank, layout in enumerate(senders):
            for shard_idx, shard in enumerate(layout.shards):
                for block in shard.blocks:
                    key = (block.row, block.col, block.rows, block.cols)
                    held = self._by_tensor.setdefault(block.tensor, {}).setdefault(key, [])
                    held.append(Place(rank, shard_idx, block.local_row, block.local_col))

    def cut(
        self, block: Block, receiver: int, shard_idx: int
    ) -> Iterable[tuple[list[Place], Place, int, int]]:
        """(places that hold it, its target, rows, cols) of every piece of a receiver's block."""
        held = [
            (rectangle, places)
            for rectangle, places in self._by_tensor.get(block.tensor, {}).items()
            if _overlaps(rectangle, block)
        ]
        row_cuts = _cuts(block.row, block.rows, [(rect[0], rect[2]) for rect, _ in held])
        col_cuts = _cuts(block.col, block.cols, [(rect[1], rect[3]) for rect, _ in held])
        for top, bottom in pairwise(row_cuts):
            for left, right in pairwise(col_cuts):
                candidates = [
                    Place(place.rank, place.shard_idx, place.row + top - rect[0], place.col + left - rect[1])
                    for rect, places in held
                    if rect[0] <= top < rect[0] + rect[2] and rect[1] <= left < rect[1] + rect[3]
                    for place in places
                ]
                if not candidates:
                    raise ModelError(
                        f"no trainer rank holds rows {top}:{bottom}, columns {left}:{right} of {block.tensor}"
                    )
                local_row, local_col = block.local_row + top - block.row, block.local_col + left - block.col
                target = Place(receiver, shard_idx, local_row, local_col)
                yield candidates, target, bottom - top, right - left


def _overlaps(rectangle: tuple[int, int, int, int], block: Block) -> bool:
    row, col, rows, cols = rectangle
    rows_meet = row < block.row + block.rows and block.row < row + rows
    return rows_meet and col < block.col + block.cols and block.col < col + cols


def _cuts(start: int, length: int, spans: Iterable[tuple[int, int]]) -> list[int]:
    """Sorted positions within [start, start + length] where a holder's span begins or ends."""
    ends = {start, start + length}
    for first, size in spans:
        ends.update(edge for edge in (first, first + size) if start < edge < start + length)
    return sorted(ends)


def wire_dtype(source: str, target: str) -> str:
    """The narrower of two dtypes."""
    return min(source, target, key=lambda dtype: (ELEMENT_BYTES[dtype], dtype))


def _wire_bytes(
    senders: Sequence[RankLayout], receivers: Sequence[RankLayout], source: Place, target: Place
) -> int:
    source_dtype = senders[source.rank].dtypes[source.shard_idx]
    target_dtype = receivers[target.rank].dtypes[target.shard_idx]
    return ELEMENT_BYTES[wire_dtype(source_dtype, target_dtype)]


def _cut_buckets(
    pair: tuple[int, int],
    pieces: list[Piece],
    senders: Sequence[RankLayout],
    receivers: Sequence[RankLayout],
    bucket_bytes: int,
) -> list[Bucket]:
    """Fill buckets of at most ``bucket_bytes``, cutting pieces between rows.

    Pieces whose rows are divisible by more bytes come first, so that each starts aligned to its own rows.
    """
    rows_of = [
        (piece, piece.cols * _wire_bytes(senders, receivers, piece.source, piece.target)) for piece in pieces
    ]
    rows_of.sort(key=lambda item: (-(item[1] & -item[1]), item[0].target.shard_idx, item[0].target.row))
    buckets: list[Bucket] = []
    filling: list[BucketPiece] = []
    used = 0
    for piece, row_bytes in rows_of:
        if row_bytes > bucket_bytes:
            raise ModelError(
                f"a row of {row_bytes} bytes exceeds the bucket of {bucket_bytes}; raise weights.bucket_mib"
            )
        done = 0
        while done < piece.rows:
            rows = min(piece.rows - done, (bucket_bytes - used) // row_bytes)
            if rows == 0:
                buckets.append(Bucket(*pair, used, tuple(filling)))
                filling, used = [], 0
                continue
            filling.append(BucketPiece(_rows_of(piece, done, rows), used))
            used += rows * row_bytes
            done += rows
    buckets.append(Bucket(*pair, used, tuple(filling)))
    return buckets


def _rows_of(piece: Piece, first: int, rows: int) -> Piece:
    source, target = piece.source, piece.target
    return Piece(
        Place(source.rank, source.shard_idx, source.row + first, source.col),
        Place(target.rank, target.shard_idx, target.row + first, target.col),
        rows,
        piece.cols,
    )


def _global_order(
    cut: dict[tuple[int, int], list[Bucket]], num_senders: int, num_receivers: int
) -> list[Bucket]:
    """Bucket k of all pairs before bucket k + 1 of any; in a turn every sender serves another receiver."""
    order = []
    for bucket_idx in range(max(map(len, cut.values()), default=0)):
        for turn in range(num_receivers):
            for sender in range(num_senders):
                buckets = cut.get((sender, (sender + turn) % num_receivers), [])
                order += buckets[bucket_idx : bucket_idx + 1]
    return order


def _describe(bucket: Bucket) -> list[int]:
    numbers = [bucket.sender, bucket.receiver, bucket.num_bytes]
    for item in bucket.pieces:
        source, target = item.piece.source, item.piece.target
        numbers += [source.shard_idx, source.row, source.col, target.shard_idx, target.row, target.col]
        numbers += [item.piece.rows, item.piece.cols, item.wire_offset]
    return numbers
