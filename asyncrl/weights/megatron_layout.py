"""Which rectangles of Hugging Face tensors each parameter of a Megatron model chunk holds.

Names are those of `named_parameters()` of a `GPTModel` built from the local (not Transformer Engine) layer
spec. Layers are numbered as Megatron numbers them (`layer.layer_number`, from 1), so that uneven, virtual
and custom pipeline splits need no arithmetic here.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.layout import (
    Block,
    ShardLayout,
    cut_rows,
    head_tensor,
    part_size,
    replicated,
    row_parallel,
    stacked,
    vocab_parallel,
)


@dataclass(frozen=True, slots=True)
class MegatronCoord:
    """Where one model chunk stands: its tensor-parallel cut and its piece of the pipeline.

    ``layer_numbers[i]`` is Megatron's own, 1-based ``layer_number`` of ``decoder.layers[i]``.
    ``has_embedding`` and ``has_output`` are the chunk's ``pre_process`` and ``post_process``.
    ``padded_vocab`` is the vocabulary that the model was built with, at least the model's own.
    """

    tp_size: int
    tp_rank: int
    layer_numbers: tuple[int, ...]
    has_embedding: bool
    has_output: bool
    padded_vocab: int


def megatron_shards(geometry: ModelGeometry, coord: MegatronCoord) -> tuple[ShardLayout, ...]:
    """The layout of every parameter of one model chunk.

    A tied head is a parameter of its own (``output_layer.weight``) only on a chunk that has the output but
    not the embedding; it then maps to the embedding tensor.

    Raises:
        ModelError: the model cannot be cut so, or a layer number lies outside the model.
    """
    _check(geometry, coord)
    shards: list[ShardLayout] = []
    if coord.has_embedding:
        shards.append(
            _vocabulary(geometry, coord, "embedding.word_embeddings.weight", "model.embed_tokens.weight")
        )
    for local_idx, layer_number in enumerate(coord.layer_numbers):
        shards += _layer(geometry, coord, f"decoder.layers.{local_idx}.", f"model.layers.{layer_number - 1}.")
    if coord.has_output:
        shards.append(replicated("decoder.final_layernorm.weight", "model.norm.weight", geometry.hidden_size))
        if not (geometry.tied_embeddings and coord.has_embedding):
            shards.append(_vocabulary(geometry, coord, "output_layer.weight", head_tensor(geometry)))
    return tuple(shards)


def _check(geometry: ModelGeometry, coord: MegatronCoord) -> None:
    if not 0 <= coord.tp_rank < coord.tp_size:
        raise ModelError(f"tensor-parallel rank {coord.tp_rank} of {coord.tp_size}")
    outside = [number for number in coord.layer_numbers if not 1 <= number <= geometry.num_layers]
    if outside:
        raise ModelError(f"layer number {outside[0]} outside 1..{geometry.num_layers} (numbers start at 1)")
    if coord.padded_vocab < geometry.vocab_size:
        raise ModelError(
            f"padded vocabulary {coord.padded_vocab} is smaller than the vocabulary {geometry.vocab_size}"
        )


def _vocabulary(geometry: ModelGeometry, coord: MegatronCoord, name: str, tensor: str) -> ShardLayout:
    return vocab_parallel(
        name,
        tensor,
        geometry.vocab_size,
        coord.padded_vocab,
        geometry.hidden_size,
        coord.tp_size,
        coord.tp_rank,
    )


def _layer(geometry: ModelGeometry, coord: MegatronCoord, local: str, hf: str) -> list[ShardLayout]:
    hidden, tp_size, tp_rank = geometry.hidden_size, coord.tp_size, coord.tp_rank
    shards = [replicated(f"{local}input_layernorm.weight", f"{hf}input_layernorm.weight", hidden)]
    shards += _attention(geometry, coord, f"{local}self_attention.", f"{hf}self_attn.")
    shards.append(
        replicated(f"{local}pre_mlp_layernorm.weight", f"{hf}post_attention_layernorm.weight", hidden)
    )
    height = part_size(geometry.ffn_hidden_size, tp_size, "ffn_hidden_size")
    halves = (
        Block(f"{hf}mlp.{half}_proj.weight", tp_rank * height, 0, height, hidden) for half in ("gate", "up")
    )
    shards.append(stacked(f"{local}mlp.linear_fc1.weight", halves, hidden))
    shards.append(
        row_parallel(
            f"{local}mlp.linear_fc2.weight",
            f"{hf}mlp.down_proj.weight",
            hidden,
            geometry.ffn_hidden_size,
            tp_size,
            tp_rank,
        )
    )
    return shards


def _attention(geometry: ModelGeometry, coord: MegatronCoord, local: str, hf: str) -> list[ShardLayout]:
    hidden, tp_size, tp_rank = geometry.hidden_size, coord.tp_size, coord.tp_rank
    q_rows = geometry.num_heads * geometry.head_dim
    shards = [
        stacked(f"{local}linear_qkv.weight", _grouped_qkv(geometry, coord, hf, "weight", hidden), hidden),
        row_parallel(f"{local}linear_proj.weight", f"{hf}o_proj.weight", hidden, q_rows, tp_size, tp_rank),
    ]
    if geometry.attention_bias:
        shards.append(stacked(f"{local}linear_qkv.bias", _grouped_qkv(geometry, coord, hf, "bias", 1), None))
    if geometry.qk_norm:
        shards += [
            replicated(f"{local}{part}_layernorm.weight", f"{hf}{part}_norm.weight", geometry.head_dim)
            for part in ("q", "k")
        ]
    return shards


def _grouped_qkv(geometry: ModelGeometry, coord: MegatronCoord, hf: str, kind: str, cols: int) -> list[Block]:
    """This rank's rows of the fused projection, which holds, per key/value head, [its query heads, k, v].

    With more tensor-parallel ranks than key/value heads Megatron cuts straight through a group, so the whole
    stack is laid out first and then cut.
    """
    dim = geometry.head_dim
    q_rows = geometry.num_heads // geometry.num_kv_heads * dim
    whole = []
    for kv_head in range(geometry.num_kv_heads):
        whole.append(Block(f"{hf}q_proj.{kind}", kv_head * q_rows, 0, q_rows, cols))
        whole.append(Block(f"{hf}k_proj.{kind}", kv_head * dim, 0, dim, cols))
        whole.append(Block(f"{hf}v_proj.{kind}", kv_head * dim, 0, dim, cols))
    part_size(geometry.num_heads, coord.tp_size, "attention heads")
    total = geometry.num_kv_heads * (q_rows + 2 * dim)
    height = part_size(total, coord.tp_size, "rows of the fused qkv projection")
    return cut_rows(whole, coord.tp_rank * height, (coord.tp_rank + 1) * height)
