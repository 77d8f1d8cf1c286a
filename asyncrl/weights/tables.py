"""Layouts as columns of integers: one row per block, over all ranks of one side, so that numpy plans.

    RankLayout of every rank (what live ranks report)             --+
    ModelGeometry and parallel sizes, a layer of each kind once,    +--> BlockTable
        repeated over the layers (`model_tables`)                 --+

Tensors are numbered by a mapping that both sides share; dtypes by their place in ``DTYPES``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.weights.geometry import ModelError
from asyncrl.weights.layout import Block, ShardLayout

Ints = npt.NDArray[np.int64]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
"""What trainer and engine may hold, and what travels."""
DTYPES = tuple(ELEMENT_BYTES)
TensorName = Callable[[int], str]
"""The name of a tensor's number."""
SIZES: Ints = np.array([ELEMENT_BYTES[dtype] for dtype in DTYPES], dtype=np.int64)


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
        ShardLayout(
            item["name"],
            tuple(item["shape"]),
            tuple(Block(**block) for block in item["blocks"]),
            item["dtype"],
        )
        for item in fields["shards"]
    )
    return RankLayout(shards, tuple(fields["dtypes"]))


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Blocks of one side; every column is int64 [number of blocks]."""

    rank: Ints
    shard: Ints  # index among the rank's parameters
    dtype: Ints  # index into DTYPES
    tensor: Ints
    row: Ints  # of the block's first element in the tensor
    col: Ints
    rows: Ints
    cols: Ints
    local_row: Ints  # and in the parameter, seen as a matrix
    local_col: Ints

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> BlockTable:
        """The rows that ``index`` selects, in its order."""
        return BlockTable(*(column[index] for column in self.columns()))

    def columns(self) -> tuple[Ints, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def joined(tables: Iterable[BlockTable]) -> BlockTable:
    """Tables below each other."""
    columns = zip(*(table.columns() for table in tables), strict=True)
    return BlockTable(*(np.concatenate(column) for column in columns))


def number_tensors(sides: Iterable[Sequence[RankLayout]]) -> dict[str, int]:
    """Every tensor that a block names, numbered as it is met first."""
    names: dict[str, int] = {}
    for layouts in sides:
        for layout in layouts:
            for shard in layout.shards:
                for block in shard.blocks:
                    names.setdefault(block.tensor, len(names))
    return names


def table_of(layouts: Sequence[RankLayout], tensors: Mapping[str, int]) -> BlockTable:
    """The blocks of every rank, rank by rank, in the order of its parameters."""
    rows = [
        (rank, *row)
        for rank, layout in enumerate(layouts)
        for row in shard_rows(layout.shards, [DTYPES.index(dtype) for dtype in layout.dtypes], tensors)
    ]
    return table_from_rows(rows)


def shard_rows(
    shards: Sequence[ShardLayout], dtypes: Sequence[int], tensors: Mapping[str, int]
) -> Iterable[tuple[int, ...]]:
    """What `BlockTable` holds of each block of one rank, but the rank."""
    for shard_idx, shard in enumerate(shards):
        for block in shard.blocks:
            place = (block.row, block.col, block.rows, block.cols, block.local_row, block.local_col)
            yield shard_idx, dtypes[shard_idx], tensors[block.tensor], *place


def table_from_rows(rows: Sequence[tuple[int, ...]]) -> BlockTable:
    matrix = np.array(rows, dtype=np.int64).reshape(len(rows), len(dataclasses.fields(BlockTable)))
    return table_from_columns(*matrix.T)


def table_from_columns(*columns: Ints) -> BlockTable:
    """In the order of the fields."""
    return BlockTable(*(np.ascontiguousarray(column) for column in columns))
