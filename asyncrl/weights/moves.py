"""Who sends what to whom: pieces given to owners, cut into messages, in one order for both ends.

    Pieces, Holders --+  every group's pieces lie on a line, receiver after receiver; each of its ranks owns
    loads             |  the next stretch, as long as its share (`balance`), cut between rows
                      +--> Moves -- a pair's moves lie on a line, cut into equal messages --> Messages

Because an owner's stretch is contiguous, it serves few receivers. Message b of a pair's m belongs to round
b n / m of n: in every round every pair moves the same share of its bytes, so that no link waits for another.
Both ends go through the messages in the same order (round, then turn, then sender), so they cannot deadlock.

Where the sender quantises, a move brings its blocks' scales with it, in the same message (`fp8`): after all
rows of the message, from the next multiple of four bytes on. Lines are cut as if there were none; they are
one 4096th of the bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from asyncrl.weights.balance import share_bytes
from asyncrl.weights.fp8 import SCALE_BYTES
from asyncrl.weights.geometry import ModelError
from asyncrl.weights.overlap import Holders, Pieces
from asyncrl.weights.tables import BlockTable, Ints

_PHASE_BITS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Rectangles that one rank sends and another writes; every column is int64 [number of moves]."""

    sender: Ints
    receiver: Ints
    source_shard: Ints
    source_row: Ints
    source_col: Ints
    target_shard: Ints
    target_row: Ints
    target_col: Ints
    rows: Ints
    cols: Ints
    row_bytes: Ints  # of one row on the wire
    unit: Ints  # rows that must stay together; above 1 the sender quantises, in blocks of unit x unit

    def __len__(self) -> int:
        return len(self.sender)

    @property
    def plain_bytes(self) -> Ints:
        """On the wire, without the scales."""
        return self.rows * self.row_bytes

    @property
    def scale_bytes(self) -> Ints:
        """Of the blocks that a move quantises, on the wire."""
        blocks = -(-self.rows // self.unit) * -(-self.cols // self.unit)
        return np.where(self.unit > 1, SCALE_BYTES * blocks, 0)

    @property
    def num_bytes(self) -> Ints:
        return self.plain_bytes + self.scale_bytes

    def columns(self) -> tuple[Ints, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def take(self, index: Ints) -> Moves:
        """The moves that ``index`` selects, in its order."""
        return Moves(*(column[index] for column in self.columns()))

    def row_parts(self, index: Ints, first: Ints, rows: Ints) -> Moves:
        """Rows [first[i], first[i] + rows[i]) of move index[i]."""
        picked = self.take(index)
        return dataclasses.replace(
            picked, source_row=picked.source_row + first, target_row=picked.target_row + first, rows=rows
        )


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """One message per pair and round, in the order in which both ends meet them; int64 [messages].

    Message i carries moves [first[i], first[i + 1]) back to back, then their scales; ``first`` has one entry
    more.
    """

    sender: Ints
    receiver: Ints
    round: Ints
    num_bytes: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.sender)


def group_bytes(pieces: Pieces, num_groups: int) -> list[int]:
    """Wire bytes that each group alone holds."""
    totals = np.zeros(num_groups, dtype=np.int64)
    np.add.at(totals, pieces.group, pieces.rows * pieces.row_bytes)
    return [int(total) for total in totals]


def assign_owners(
    pieces: Pieces, holders: Holders, senders: BlockTable, receivers: BlockTable, loads: Ints
) -> Moves:
    """Give every piece, or rows of it, to one of the ranks that hold it; ``loads`` [senders] is what they
    send already, in bytes."""
    block = pieces.block
    order = np.lexsort((receivers.shard[block], receivers.rank[block], pieces.group))
    sizes = (pieces.rows * pieces.row_bytes)[order]
    starts = np.cumsum(sizes) - sizes
    totals = group_bytes(pieces, len(holders.groups))
    shares = share_bytes(holders.groups, totals, loads)
    # The stretches of all groups' ranks, on the line of all groups; each begins where the last one ends.
    stretches = np.concatenate([np.zeros(0, dtype=np.int64), *shares])
    cuts = np.cumsum(stretches)
    line = (pieces.rows[order], pieces.row_bytes[order], pieces.unit[order])
    index, first, rows, owner = _cut_line(starts, *line, cuts)
    piece = order[index]
    sizes_of_groups = np.array([len(members) for members in holders.groups], dtype=np.int64)
    first_owner = np.cumsum(sizes_of_groups) - sizes_of_groups
    source = holders.blocks[holders.first[pieces.cell[piece]] + owner - first_owner[pieces.group[piece]]]
    target = block[piece]
    row = pieces.row[piece] + first
    return Moves(
        sender=senders.rank[source],
        receiver=receivers.rank[target],
        source_shard=senders.shard[source],
        source_row=senders.local_row[source] + row - senders.row[source],
        source_col=senders.local_col[source] + pieces.col[piece] - senders.col[source],
        target_shard=receivers.shard[target],
        target_row=receivers.local_row[target] + row - receivers.row[target],
        target_col=receivers.local_col[target] + pieces.col[piece] - receivers.col[target],
        rows=rows,
        cols=pieces.cols[piece],
        row_bytes=pieces.row_bytes[piece],
        unit=pieces.unit[piece],
    )


def _cut_line(
    starts: Ints, rows: Ints, row_bytes: Ints, unit: Ints, cuts: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut rectangles that lie on a line at ``cuts``, ascending bytes, each moved to the unit before it.

    Returns (rectangle, first row, rows, number of cuts at or before it) of every part.
    """
    at = np.searchsorted(starts, cuts, side="right") - 1
    row = np.minimum((cuts - starts[at]) // row_bytes[at], rows[at])
    row = np.where(row < rows[at], row // unit[at] * unit[at], row)
    inside = (row > 0) & (row < rows[at])
    moved = starts[at] + row * row_bytes[at]
    index = np.concatenate((np.arange(len(starts)), at[inside]))
    first = np.concatenate((np.zeros(len(starts), dtype=np.int64), row[inside]))
    order = np.lexsort((first, index))
    index, first = index[order], first[order]
    again = np.zeros(len(index), dtype=bool)
    again[1:] = (index[1:] == index[:-1]) & (first[1:] == first[:-1])
    index, first = index[~again], first[~again]
    last = np.append(first[1:], 0)
    ends_piece = np.append(index[1:] != index[:-1], True)
    part_rows = np.where(ends_piece, rows[index], last) - first
    passed = np.searchsorted(moved, starts[index] + first * row_bytes[index], side="right")
    return index, first, part_rows, passed


def limit_messages(moves: Moves, largest: int) -> Ints:
    """How many messages each pair needs so that none exceeds ``largest`` bytes, by `pairs_of` order.

    Raises:
        ModelError: a row is more than half of that.
    """
    pair, num_pairs = pairs_of(moves)
    totals, longest = np.zeros(num_pairs, dtype=np.int64), np.zeros(num_pairs, dtype=np.int64)
    np.add.at(totals, pair, moves.plain_bytes)
    np.maximum.at(longest, pair, moves.row_bytes * moves.unit)
    row = int(longest.max(initial=0))
    if 2 * row > largest:
        raise ModelError(
            f"a row of {row} bytes exceeds half the bucket of {largest}; raise weights.bucket_mib"
        )
    room = np.full(num_pairs, largest, dtype=np.int64)
    if bool((moves.unit > 1).any()):  # room for the largest share of scales that any move has
        scales, plain = moves.scale_bytes, moves.plain_bytes
        most = int(np.argmax(scales / plain))
        room = (room - SCALE_BYTES) * plain[most] // (plain[most] + scales[most])
    counts: Ints = -(-totals // np.maximum(room - longest, 1))
    return counts


def scales_begin(plain: Ints, scales: Ints) -> Ints:
    """Where the scales of messages begin, after ``plain`` bytes of rows."""
    begin: Ints = np.where(scales > 0, -(-plain // SCALE_BYTES) * SCALE_BYTES, plain)
    return begin


def pairs_of(moves: Moves) -> tuple[Ints, int]:
    """The number of each move's pair, ascending by sender, then receiver; and how many pairs there are."""
    key = (moves.sender << 32) + moves.receiver
    distinct, pair = np.unique(key, return_inverse=True)
    return pair.reshape(-1).astype(np.int64), len(distinct)


def message_rounds(counts: Ints) -> tuple[Ints, Ints, Ints]:
    """(pair, number within the pair, round) of every message, where pair p has ``counts[p]``.

    Pairs with fewer messages than there are rounds begin at different rounds, so that they do not meet.
    """
    pair = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(pair)) - np.repeat(np.cumsum(counts) - counts, counts)
    num_rounds = int(counts.max(initial=1))
    phase = (pair * 40503) & ((1 << _PHASE_BITS) - 1)
    return pair, number, ((number << _PHASE_BITS) + phase) * num_rounds // (counts[pair] << _PHASE_BITS)


def cut_messages(moves: Moves, counts: Ints, num_receivers: int) -> tuple[Moves, Messages]:
    """Cut every pair's moves, between rows, into ``counts[pair]`` messages of equal size.

    In a message, rows that are divisible by more bytes come first, so that each starts aligned to its own.
    """
    pair, num_pairs = pairs_of(moves)
    alignment = moves.row_bytes & -moves.row_bytes
    order = np.lexsort((moves.target_col, moves.target_row, moves.target_shard, -alignment, pair))
    moves, pair = moves.take(order), pair[order]
    sizes = moves.plain_bytes
    starts = np.cumsum(sizes) - sizes
    totals = np.zeros(num_pairs, dtype=np.int64)
    np.add.at(totals, pair, sizes)
    pair_starts = np.cumsum(totals) - totals
    cut_pair, number, when = message_rounds(counts)
    cuts = pair_starts[cut_pair] + totals[cut_pair] * number // counts[cut_pair]
    index, first, rows, passed = _cut_line(starts, moves.rows, moves.row_bytes, moves.unit, cuts)
    message = passed - 1  # a cut lies at the start of every message, that of each pair's first included
    parts = moves.row_parts(index, first, rows)
    turn = (parts.receiver - parts.sender) % max(num_receivers, 1)
    order = np.lexsort((message, parts.sender, turn, when[message]))
    parts, message = parts.take(order), message[order]
    begins = np.flatnonzero(np.append(True, message[1:] != message[:-1])) if len(message) else message
    total = message
    if len(message):
        scales = np.add.reduceat(parts.scale_bytes, begins)
        total = scales_begin(np.add.reduceat(parts.plain_bytes, begins), scales) + scales
    return parts, Messages(
        sender=parts.sender[begins],
        receiver=parts.receiver[begins],
        round=when[message[begins]],
        num_bytes=total,
        first=np.append(begins, len(message)),
    )
