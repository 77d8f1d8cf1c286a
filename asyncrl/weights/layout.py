"""Every parameter of every side, described as rectangles over canonical Hugging Face tensors.

A `ShardLayout` says which rectangles of which Hugging Face tensors make up one local parameter. Loading,
exporting and publishing are all copies through intersections of such rectangles, so this is the one place
where a name, a fused projection or a tensor-parallel cut is known. Pure arithmetic over integers.

Matrices: a 1-D tensor of N elements is N rows of 1 column; an [E, R, C] parameter is [E * R, C], its experts
below each other. Blocks of one shard never overlap; what no block covers is padding, and is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from asyncrl.weights.families import BY_NAME
from asyncrl.weights.family import LayerTable
from asyncrl.weights.geometry import ModelError, ModelGeometry


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [row, row + rows) x columns [col, col + cols) of a Hugging Face tensor, and their local place."""

    tensor: str
    row: int
    col: int
    rows: int
    cols: int
    local_row: int = 0
    local_col: int = 0


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One local parameter: its own name and shape, and the blocks that fill it."""

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    dtype: str = ""  # fixed for this parameter, for example float32; empty means the model's own

    @property
    def rows(self) -> int:
        return matrix_shape(self.shape)[0]

    @property
    def cols(self) -> int:
        return matrix_shape(self.shape)[1]

    @property
    def num_padding(self) -> int:
        """Elements that no block fills."""
        return self.rows * self.cols - sum(block.rows * block.cols for block in self.blocks)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The (rows, columns) under which a tensor of this shape is cut."""
    if len(shape) == 1:
        return shape[0], 1
    return math.prod(shape[:-1]), shape[-1]


def hf_tensors(geometry: ModelGeometry) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, in file order; a tied head is no tensor."""
    hidden = geometry.hidden_size
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (geometry.vocab_size, hidden)}
    for layer_idx in range(geometry.num_layers):
        for name, shape in layer_table(geometry, layer_idx).tensors.items():
            experts = range(geometry.moe.num_experts) if geometry.moe and "{expert}" in name else (0,)
            for expert in experts:
                tensors[f"model.layers.{layer_idx}.{name.replace('{expert}', str(expert))}"] = shape
    tensors["model.norm.weight"] = (hidden,)
    if not geometry.tied_embeddings:
        tensors["lm_head.weight"] = (geometry.vocab_size, hidden)
    return tensors


def layer_table(geometry: ModelGeometry, layer_idx: int) -> LayerTable:
    """The family's table of a layer; layers of one kind share it."""
    return _layer_table(geometry, 0 if geometry.moe is None else layer_idx)


@lru_cache(maxsize=1024)
def _layer_table(geometry: ModelGeometry, layer_idx: int) -> LayerTable:
    return BY_NAME[geometry.family].layer(geometry, layer_idx)


def head_tensor(geometry: ModelGeometry) -> str:
    """The Hugging Face tensor that the output head multiplies by."""
    return "model.embed_tokens.weight" if geometry.tied_embeddings else "lm_head.weight"


def replicated(name: str, tensor: str, num_rows: int) -> ShardLayout:
    """A 1-D parameter that every tensor-parallel rank holds whole."""
    return ShardLayout(name, (num_rows,), (Block(tensor, 0, 0, num_rows, 1),))


def vocab_parallel(
    name: str, tensor: str, vocab_size: int, padded_vocab: int, hidden_size: int, tp_size: int, tp_rank: int
) -> ShardLayout:
    """Rows of an embedding or head; those past `vocab_size` are padding and belong to no block."""
    height = part_size(padded_vocab, tp_size, f"padded vocabulary of {tensor}")
    first = tp_rank * height
    held = min(first + height, vocab_size) - first
    blocks = (Block(tensor, first, 0, held, hidden_size),) if held > 0 else ()
    return ShardLayout(name, (height, hidden_size), blocks)


def cut_rows(blocks: Iterable[Block], first: int, last: int) -> list[Block]:
    """Of blocks that lie below each other, what falls on the stack's rows [first, last)."""
    kept, top = [], 0
    for block in blocks:
        begin, end = max(first, top), min(last, top + block.rows)
        if begin < end:
            kept.append(Block(block.tensor, block.row + begin - top, block.col, end - begin, block.cols))
        top += block.rows
    return kept


def part_size(total: int, parts: int, what: str) -> int:
    """total / parts, or a `ModelError` that names what cannot be cut."""
    if total % parts:
        raise ModelError(f"{what}: {total} cannot be cut into {parts} equal parts; choose a divisor")
    return total // parts
