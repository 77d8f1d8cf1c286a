"""The arithmetic of cuts: a row of a family's table, and a rank, to the rectangles that the rank holds.

    Row, shapes of its parts, (size, rank) of the group that cuts it -> blocks below each other -> ShardLayout

All cuts are equal; one that does not come out even is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.weights.family import Cut, Row
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.layout import Block, ShardLayout, cut_rows, matrix_shape, part_size


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Hugging Face tensors of one layer: their common prefix, and shapes by the name behind it."""

    geometry: ModelGeometry
    prefix: str
    shapes: Mapping[str, tuple[int, ...]]


def row_shard(name: str, row: Row, cut: Cut, layer: LayerTensors, size: int, rank: int) -> ShardLayout:
    """The parameter ``name``, one row without experts, on rank ``rank`` of the ``size`` that cut it.

    Raises:
        ModelError: the row cannot be cut so.
    """
    blocks = _cut(row.parts, cut, layer, size, rank)
    is_vector = len(layer.shapes[row.parts[0]]) == 1
    height, width = blocks[-1].local_row + blocks[-1].rows, blocks[0].cols
    return ShardLayout(name, (height,) if is_vector else (height, width), tuple(blocks), row.dtype)


def expert_shard(
    name: str, row: Row, layer: LayerTensors, experts: Sequence[int], size: int, rank: int, *, stacked: bool
) -> ShardLayout:
    """Like `row_shard`, for the named experts below each other; ``stacked``: [experts, rows, columns]."""
    blocks: list[Block] = []
    height = 0
    for expert in experts:
        one = _cut(row.parts, row.cut, layer, size, rank, expert)
        blocks += [_moved(block, block.local_row + height) for block in one]
        height = blocks[-1].local_row + blocks[-1].rows
    width = blocks[0].cols
    shape = (len(experts), height // len(experts), width) if stacked else (height, width)
    return ShardLayout(name, shape, tuple(blocks), row.dtype)


def _cut(
    parts: Sequence[str], cut: Cut, layer: LayerTensors, size: int, rank: int, expert: int = 0
) -> list[Block]:
    whole = []
    for part in parts:
        rows, cols = matrix_shape(layer.shapes[part])
        whole.append(Block(layer.prefix + part.replace("{expert}", str(expert)), 0, 0, rows, cols))
    if cut is Cut.WHOLE:
        held = whole
    elif cut is Cut.ROWS:
        held = [_rows_of(block, size, rank) for block in whole]
    elif cut is Cut.COLS:
        held = [_cols_of(block, size, rank) for block in whole]
    elif cut is Cut.GROUPED_QKV:
        held = _grouped_qkv(whole, layer.geometry, size, rank)
    else:
        held = _qkv_heads(whole, layer.geometry, size, rank)
    below, height = [], 0
    for block in held:
        below.append(_moved(block, height))
        height += block.rows
    return below


def _moved(block: Block, local_row: int) -> Block:
    return Block(block.tensor, block.row, block.col, block.rows, block.cols, local_row, 0)


def _rows_of(block: Block, size: int, rank: int) -> Block:
    rows = part_size(block.rows, size, f"rows of {block.tensor}")
    return Block(block.tensor, rank * rows, 0, rows, block.cols)


def _cols_of(block: Block, size: int, rank: int) -> Block:
    cols = part_size(block.cols, size, f"columns of {block.tensor}")
    return Block(block.tensor, 0, rank * cols, block.rows, cols)


def _grouped_qkv(whole: Sequence[Block], geometry: ModelGeometry, size: int, rank: int) -> list[Block]:
    """With more ranks than key/value heads Megatron cuts straight through a group, so the whole stack is laid
    out first and then cut."""
    dim, cols = geometry.head_dim, whole[0].cols
    part_size(geometry.num_heads, size, "attention heads")
    heights = (geometry.num_heads // geometry.num_kv_heads * dim, dim, dim)
    stack = [
        Block(block.tensor, kv_head * height, 0, height, cols)
        for kv_head in range(geometry.num_kv_heads)
        for block, height in zip(whole, heights, strict=True)
    ]
    height = part_size(sum(block.rows for block in whole), size, "rows of the fused qkv projection")
    return cut_rows(stack, rank * height, (rank + 1) * height)


def _qkv_heads(whole: Sequence[Block], geometry: ModelGeometry, size: int, rank: int) -> list[Block]:
    """[local query heads, local key heads, local value heads]."""
    dim = geometry.head_dim
    rows = part_size(geometry.num_heads, size, "attention heads") * dim
    first = rank * rows
    if size >= geometry.num_kv_heads:
        replicas = part_size(size, geometry.num_kv_heads, "engine TP over key/value heads")
        kv_first, kv_rows = rank // replicas * dim, dim
    else:
        kv_rows = part_size(geometry.num_kv_heads, size, "key/value heads") * dim
        kv_first = rank * kv_rows
    spans = ((first, rows), (kv_first, kv_rows), (kv_first, kv_rows))
    return [
        Block(block.tensor, start, 0, height, block.cols)
        for block, (start, height) in zip(whole, spans, strict=True)
    ]
