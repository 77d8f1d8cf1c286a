"""Random layouts of both sides, and a painter that knows nothing of the planner.

Each tensor is cut along a random grid; every cell goes to some trainer ranks, each at a place of its own, and
the engine cuts the same tensors along other grids. Every element of every tensor has a number of its own, so
a copy from a wrong place shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.weights.layout import Block, ShardLayout
from asyncrl.weights.moves import Moves
from asyncrl.weights.tables import RankLayout

Matrix = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    senders: tuple[RankLayout, ...]
    receivers: tuple[RankLayout, ...]
    holders: dict[str, npt.NDArray[np.bool_]]  # by tensor [ranks, rows, cols]
    numbers: dict[str, Matrix]  # by tensor, a number per element


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    num_senders, num_receivers = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    sent: list[list[ShardLayout]] = [[] for _ in range(num_senders)]
    taken: list[list[ShardLayout]] = [[] for _ in range(num_receivers)]
    holders, numbers, first = {}, {}, 0
    for tensor_idx in range(int(rng.integers(1, 5))):
        name = f"t{tensor_idx}"
        rows, cols = int(rng.integers(1, 40)), int(rng.integers(1, 12))
        numbers[name] = np.arange(first, first + rows * cols).reshape(rows, cols)
        first += rows * cols
        holders[name] = np.zeros((num_senders, rows, cols), dtype=bool)
        for row, col, height, width in _grid(rng, rows, cols):
            ranks = rng.choice(num_senders, int(rng.integers(1, num_senders + 1)), replace=False)
            for rank in ranks.tolist():
                holders[name][rank, row : row + height, col : col + width] = True
                for _ in range(1 + (rng.random() < 0.2)):  # a rank may hold the same twice
                    _place(rng, sent[rank], name, (row, col, height, width))
        for row, col, height, width in _grid(rng, rows, cols):
            for rank in range(num_receivers):
                if rng.random() < 0.6:
                    _place(rng, taken[rank], name, (row, col, height, width))
    if not any(taken):
        _place(rng, taken[0], "t0", (0, 0, 1, 1))
    return Case(_ranks(sent), _ranks(taken), holders, numbers)


def _ranks(shards: Sequence[list[ShardLayout]]) -> tuple[RankLayout, ...]:
    return tuple(RankLayout(tuple(held), ("float32",) * len(held)) for held in shards)


def _grid(rng: np.random.Generator, rows: int, cols: int) -> list[tuple[int, int, int, int]]:
    """Cells (row, col, height, width) of a random grid."""

    def spans(size: int) -> list[tuple[int, int]]:
        inner = rng.choice(np.arange(1, size), min(size - 1, int(rng.integers(0, 4))), replace=False)
        edges = [0, *sorted(inner.tolist()), size]
        return [(edges[idx], edges[idx + 1] - edges[idx]) for idx in range(len(edges) - 1)]

    columns = spans(cols)
    return [(row, col, height, width) for row, height in spans(rows) for col, width in columns]


def _place(
    rng: np.random.Generator, held: list[ShardLayout], tensor: str, cell: tuple[int, int, int, int]
) -> None:
    """A parameter around the cell, with padding on all sides."""
    row, col, height, width = cell
    above, left = int(rng.integers(0, 3)), int(rng.integers(0, 3))
    shape = (height + above + int(rng.integers(0, 3)), width + left + int(rng.integers(0, 3)))
    block = Block(tensor, row, col, height, width, above, left)
    held.append(ShardLayout(f"{tensor}.{len(held)}", shape, (block,)))


def paint(case: Case, moves: Moves) -> tuple[list[list[Matrix]], list[list[Matrix]]]:
    """Carry the moves out: the receivers' parameters, -1 where nothing arrived; how often each was hit."""
    sources = [[_filled(case, shard) for shard in layout.shards] for layout in case.senders]
    targets = [[np.full(shard.shape, -1) for shard in layout.shards] for layout in case.receivers]
    hits = [[np.zeros(shard.shape, dtype=np.int64) for shard in layout.shards] for layout in case.receivers]
    for move in np.stack(moves.columns(), axis=1).tolist():
        sender, receiver, s_shard, s_row, s_col, t_shard, t_row, t_col, rows, cols, _, _ = move
        given = sources[sender][s_shard][s_row : s_row + rows, s_col : s_col + cols]
        targets[receiver][t_shard][t_row : t_row + rows, t_col : t_col + cols] = given
        hits[receiver][t_shard][t_row : t_row + rows, t_col : t_col + cols] += 1
    return targets, hits


def expected(case: Case) -> list[list[Matrix]]:
    return [[_filled(case, shard) for shard in layout.shards] for layout in case.receivers]


def _filled(case: Case, shard: ShardLayout) -> Matrix:
    values = np.full(shard.shape, -1)
    for block in shard.blocks:
        cell = case.numbers[block.tensor][
            block.row : block.row + block.rows, block.col : block.col + block.cols
        ]
        values[
            block.local_row : block.local_row + block.rows, block.local_col : block.local_col + block.cols
        ] = cell
    return values


def least_possible_load(case: Case) -> float:
    """Over all sets of ranks: the bytes that are needed and held only inside, over their number."""
    num_ranks = len(case.senders)
    needed = []
    for layout in case.receivers:
        for shard in layout.shards:
            for block in shard.blocks:
                held = case.holders[block.tensor]
                cell = held[:, block.row : block.row + block.rows, block.col : block.col + block.cols]
                weights = 1 << np.arange(num_ranks)
                needed.append(np.tensordot(weights, cell.astype(np.int64), 1).ravel())
    masks = np.concatenate(needed)
    return max(
        4 * np.count_nonzero((masks & ~chosen) == 0) / bin(chosen).count("1")
        for chosen in range(1, 1 << num_ranks)
    )
