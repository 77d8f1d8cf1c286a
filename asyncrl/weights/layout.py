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
    hidden, ffn = geometry.hidden_size, geometry.ffn_hidden_size
    q_rows, kv_rows = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if geometry.attention_bias:
        layer |= {"self_attn.q_proj.bias": (q_rows,)}
        layer |= {"self_attn.k_proj.bias": (kv_rows,), "self_attn.v_proj.bias": (kv_rows,)}
    if geometry.qk_norm:
        layer |= {"self_attn.q_norm.weight": (geometry.head_dim,)}
        layer |= {"self_attn.k_norm.weight": (geometry.head_dim,)}
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (geometry.vocab_size, hidden)}
    for layer_idx in range(geometry.num_layers):
        tensors |= {f"model.layers.{layer_idx}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not geometry.tied_embeddings:
        tensors["lm_head.weight"] = (geometry.vocab_size, hidden)
    return tensors


def head_tensor(geometry: ModelGeometry) -> str:
    """The Hugging Face tensor that the output head multiplies by."""
    return "model.embed_tokens.weight" if geometry.tied_embeddings else "lm_head.weight"


def replicated(name: str, tensor: str, num_rows: int) -> ShardLayout:
    """A 1-D parameter that every tensor-parallel rank holds whole."""
    return ShardLayout(name, (num_rows,), (Block(tensor, 0, 0, num_rows, 1),))


def stacked(name: str, parts: Iterable[Block], cols: int | None) -> ShardLayout:
    """Blocks below each other, in order, from local column 0; `cols` None makes a 1-D parameter."""
    blocks, local_row = [], 0
    for part in parts:
        blocks.append(Block(part.tensor, part.row, part.col, part.rows, part.cols, local_row, 0))
        local_row += part.rows
    return ShardLayout(name, (local_row,) if cols is None else (local_row, cols), tuple(blocks))


def row_parallel(name: str, tensor: str, rows: int, cols: int, tp_size: int, tp_rank: int) -> ShardLayout:
    """A projection whose input dimension, the columns, is cut."""
    width = part_size(cols, tp_size, tensor)
    return ShardLayout(name, (rows, width), (Block(tensor, 0, tp_rank * width, rows, width),))


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
        raise ModelError(f"{what}: {total} cannot be cut into {parts} equal parts; choose another TP size")
    return total // parts
