"""Which trainer ranks can give each part of what the engine needs: both sides' blocks, intersected.

    blocks of the trainer -> each tensor's grid of cells: between two edges every rank holds all or nothing
                          -> the ranks that hold a cell; equal sets of ranks are one *group*
    blocks of the engine  -> pieces: one cell's part of one block

Invariant: the pieces of a block are disjoint and cover it; what no rank holds is an error. All of it is
integer arithmetic on whole columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncrl.weights.fp8 import BLOCK, FP8_BYTES
from asyncrl.weights.geometry import ModelError
from asyncrl.weights.tables import SIZES, BlockTable, Ints, TensorName

_EDGE_BITS = 40
_EDGE_MASK = (1 << _EDGE_BITS) - 1
_COLUMN_BITS = 24


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Rectangles that one receiver needs and one group of ranks holds; int64 [number of pieces]."""

    block: Ints  # row of the receivers' table
    cell: Ints
    group: Ints
    row: Ints  # in the tensor
    col: Ints
    rows: Ints
    cols: Ints
    row_bytes: Ints  # of one row on the wire
    unit: Ints  # rows that must stay together: a block's, where the sender quantises


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """Who holds the cells: ``blocks[first[c] + i]`` is the row, in the senders' table, of the i-th rank of
    cell c's group; ``groups[g]`` are a group's ranks, ascending."""

    first: Ints
    blocks: Ints
    groups: tuple[Ints, ...]


def overlap(senders: BlockTable, receivers: BlockTable, name_of: TensorName) -> tuple[Pieces, Holders]:
    """Cut what the receivers need where its holders change.

    Of ranks that hold a cell in different dtypes only those with the widest count. ``name_of`` gives the name
    of a tensor's number.

    Raises:
        ModelError: no trainer rank holds something; names the first such rectangle.
    """
    grid = _Grid(senders)
    cells, holder_blocks = _incidence(grid, senders)
    keys, first, counts = _runs(cells)
    groups, group_of = _groups(senders.rank[holder_blocks], first, counts)
    block, r_idx, c_idx = grid.expand_receivers(receivers)
    key = grid.cell_key(receivers.tensor[block], r_idx, c_idx)
    top, bottom = grid.row_span(receivers, block, r_idx)
    left, right = grid.col_span(receivers, block, c_idx)
    at = np.minimum(np.searchsorted(keys, key), max(len(keys) - 1, 0))
    held = keys[at] == key if len(keys) else np.zeros(len(key), dtype=bool)
    if not held.all():
        missing = int(np.argmin(held))
        raise ModelError(
            f"no trainer rank holds rows {top[missing]}:{bottom[missing]}, columns"
            f" {left[missing]}:{right[missing]} of {name_of(int(receivers.tensor[block[missing]]))}"
        )
    source = SIZES[senders.dtype[holder_blocks[first[at]]]]
    wire = np.minimum(source, SIZES[receivers.dtype[block]])
    unit = np.where((wire == FP8_BYTES) & (source > FP8_BYTES), BLOCK, 1)
    row_bytes = (right - left) * wire
    pieces = Pieces(block, at, group_of[at], top, left, bottom - top, right - left, row_bytes, unit)
    return pieces, Holders(first, holder_blocks, groups)


class _Grid:
    """The edges of all senders' blocks, per tensor, along both directions."""

    def __init__(self, senders: BlockTable) -> None:
        self.row_edges = _edges(senders.tensor, senders.row, senders.rows)
        self.col_edges = _edges(senders.tensor, senders.col, senders.cols)

    def cell_key(self, tensor: Ints, r_idx: Ints, c_idx: Ints) -> Ints:
        """One number per cell: its interval of rows, and its interval of columns within the tensor."""
        first_col = np.searchsorted(self.col_edges, tensor << _EDGE_BITS)
        return (r_idx << _COLUMN_BITS) + (c_idx - first_col)

    def expand_receivers(self, table: BlockTable) -> tuple[Ints, Ints, Ints]:
        """Every (block, interval of rows, of columns) that a block meets; -1 lies before all edges."""
        r0, r1 = _met(self.row_edges, table.tensor, table.row, table.rows)
        c0, c1 = _met(self.col_edges, table.tensor, table.col, table.cols)
        return _expand(r0, r1, c0, c1)

    def row_span(self, table: BlockTable, block: Ints, r_idx: Ints) -> tuple[Ints, Ints]:
        return _span(self.row_edges, table.tensor[block], table.row[block], table.rows[block], r_idx)

    def col_span(self, table: BlockTable, block: Ints, c_idx: Ints) -> tuple[Ints, Ints]:
        return _span(self.col_edges, table.tensor[block], table.col[block], table.cols[block], c_idx)


def _edges(tensor: Ints, start: Ints, length: Ints) -> Ints:
    base = tensor << _EDGE_BITS
    return np.unique(np.concatenate((base + start, base + start + length)))


def _met(edges: Ints, tensor: Ints, start: Ints, length: Ints) -> tuple[Ints, Ints]:
    """The intervals [i, j) of ``edges`` that a stretch meets; interval i lies from edge i to edge i + 1."""
    base = tensor << _EDGE_BITS
    first = np.searchsorted(edges, base + start, side="right") - 1
    return first, np.searchsorted(edges, base + start + length, side="left")


def _expand(r0: Ints, r1: Ints, c0: Ints, c1: Ints) -> tuple[Ints, Ints, Ints]:
    """For each i, every pair of [r0[i], r1[i]) x [c0[i], c1[i]), with i in front."""
    num_cols = c1 - c0
    counts = (r1 - r0) * num_cols
    index = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = num_cols[index]
    return index, r0[index] + within // width, c0[index] + within % width


def _span(edges: Ints, tensor: Ints, start: Ints, length: Ints, idx: Ints) -> tuple[Ints, Ints]:
    """An interval's part of a stretch of the tensor; edges of other tensors do not cut."""
    base = tensor << _EDGE_BITS
    lower = np.where(idx >= 0, edges[np.maximum(idx, 0)] if len(edges) else 0, base)
    above = np.minimum(idx + 1, len(edges) - 1)
    upper = np.where(idx + 1 < len(edges), edges[above] if len(edges) else 0, base + _EDGE_MASK)
    return np.maximum(lower - base, start), np.minimum(upper - base, start + length)


def _incidence(grid: _Grid, senders: BlockTable) -> tuple[Ints, Ints]:
    """(cell key, sender's block) for every cell that a block covers, by cell, then rank; one per rank."""
    base = senders.tensor << _EDGE_BITS
    bounds = [
        np.searchsorted(edges, base + position)
        for edges, start, length in (
            (grid.row_edges, senders.row, senders.rows),
            (grid.col_edges, senders.col, senders.cols),
        )
        for position in (start, start + length)
    ]
    block, r_idx, c_idx = _expand(*bounds)
    key = grid.cell_key(senders.tensor[block], r_idx, c_idx)
    rank, size = senders.rank[block], SIZES[senders.dtype[block]]
    order = np.lexsort((block, rank, -size, key))
    key, rank, size, block = key[order], rank[order], size[order], block[order]
    _, first, counts = _runs(key)
    widest = size == np.repeat(size[first], counts)
    again = np.zeros(len(key), dtype=bool)
    again[1:] = (key[1:] == key[:-1]) & (rank[1:] == rank[:-1])
    kept = widest & ~again
    return key[kept], block[kept]


def _runs(values: Ints) -> tuple[Ints, Ints, Ints]:
    """Of sorted values: the distinct ones, where each begins, how often each occurs."""
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1]))) if len(values) else values
    return values[starts], starts, np.diff(np.append(starts, len(values)))


def _groups(ranks: Ints, first: Ints, counts: Ints) -> tuple[tuple[Ints, ...], Ints]:
    """The distinct sets of ranks, and which of them holds each cell."""
    numbers: dict[bytes, int] = {}
    members: list[Ints] = []
    group_of = np.empty(len(first), dtype=np.int64)
    for cell, (start, count) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        held_by = ranks[start : start + count]
        group = numbers.setdefault(held_by.tobytes(), len(members))
        if group == len(members):
            members.append(held_by)
        group_of[cell] = group
    return tuple(members), group_of
