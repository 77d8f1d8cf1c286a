"""Engines that hold weights as fp8 blocks: what travels, and when a sender may quantise.

    bfloat16 or float32 of the trainer -> float8_e4m3fn rows, and one float32 scale per 128 x 128 block

A block's scale needs the whole block, so a trainer rank can quantise only if every cut of both sides lies at
a multiple of 128, in the tensor and in the parameter; a tensor's own last rows and columns may fall short.
Scales are not planned: those of a move's blocks travel with the move, in its message (`moves`). The block at
(128 r, 128 c) of the engine's weight has its scale at (r, c) of the engine's scales.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from asyncrl.weights.geometry import ModelError
from asyncrl.weights.layout import Block, ShardLayout
from asyncrl.weights.tables import ELEMENT_BYTES, BlockTable, TensorName

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
FP8 = "float8_e4m3fn"
FP8_BYTES = ELEMENT_BYTES[FP8]
SCALE_BYTES = ELEMENT_BYTES["float32"]


def scale_shard(shard: ShardLayout) -> ShardLayout:
    """The engine's scales of a weight: ``<name>_scale_inv``, a 128th of its shape in both directions.

    Raises:
        ModelError: the engine's cut does not lie at multiples of 128.
    """
    blocks = []
    for block in shard.blocks:
        begins = (block.row, block.col, block.local_row, block.local_col)
        if any(begin % BLOCK for begin in begins):
            raise ModelError(
                f"{shard.name}: its cut does not lie at multiples of {BLOCK}, so it cannot be fp8 blocks;"
                " choose another TP size of the engine, or bfloat16"
            )
        row, col, local_row, local_col = (begin // BLOCK for begin in begins)
        rows, cols = -(-block.rows // BLOCK), -(-block.cols // BLOCK)
        name = f"{block.tensor}{SCALE_SUFFIX}"
        blocks.append(Block(name, row, col, rows, cols, local_row, local_col))
    shape = (*shard.shape[:-2], *(-(-size // BLOCK) for size in shard.shape[-2:]))
    return ShardLayout(f"{shard.name}{SCALE_SUFFIX}", shape, tuple(blocks), "float32")


def without_scales(receivers: BlockTable, scales: Collection[int]) -> BlockTable:
    """The receivers' blocks but those of the tensors ``scales``, which come with their weights."""
    return receivers.take(~np.isin(receivers.tensor, np.array(sorted(scales), dtype=np.int64)))


def scaled_tensors(tensors: Mapping[str, int]) -> dict[int, int]:
    """The numbers of the tensors that the engine holds as fp8 blocks, and of their scales."""
    return {
        tensors[name.removesuffix(SCALE_SUFFIX)]: number
        for name, number in tensors.items()
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in tensors
    }


def require_whole_blocks(senders: BlockTable, weights: Collection[int], name_of: TensorName) -> None:
    """Check that trainer ranks can quantise the tensors ``weights``, which the engine holds as fp8 blocks.

    Raises:
        ModelError: a trainer rank's cut of such a tensor does not lie at multiples of 128.
    """
    mine = senders.take(np.isin(senders.tensor, np.array(sorted(weights), dtype=np.int64)))
    aligned = _aligned(mine)
    if aligned.all():
        return
    at = int(np.argmin(aligned))
    rows, cols = (
        f"{begin[at]}:{begin[at] + size[at]}"
        for begin, size in ((mine.row, mine.rows), (mine.col, mine.cols))
    )
    raise ModelError(
        f"trainer rank {mine.rank[at]} holds rows {rows}, columns {cols} of"
        f" {name_of(int(mine.tensor[at]))}, not whole blocks of {BLOCK}, so it cannot quantise them;"
        " choose another trainer TP size, or bfloat16 engines"
    )


def _aligned(table: BlockTable) -> npt.NDArray[np.bool_]:
    """Whether each block begins at multiples of 128, and ends there or where its tensor ends."""
    whole = np.ones(len(table), dtype=bool)
    for begin in (table.row, table.col, table.local_row, table.local_col):
        whole &= begin % BLOCK == 0
    for begin, size in ((table.row, table.rows), (table.col, table.cols)):
        last = np.zeros(int(table.tensor.max(initial=0)) + 1, dtype=np.int64)
        np.maximum.at(last, table.tensor, begin + size)
        whole &= (size % BLOCK == 0) | (begin + size == last[table.tensor])
    return whole
