"""Which rectangles of Hugging Face tensors each parameter of an SGLang rank holds.

Names are those of `model.named_parameters()` on one tensor-parallel rank. The shapes here are what the model
and TP size imply; `check_manifest` compares them with the live engine's own, so nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.layout import (
    Block,
    ShardLayout,
    part_size,
    replicated,
    row_parallel,
    stacked,
    vocab_parallel,
)

VOCAB_MULTIPLE = 64
"""SGLang pads its vocabulary to a multiple of this (times TP where TP does not divide the result)."""


def engine_shards(geometry: ModelGeometry, tp_size: int, tp_rank: int) -> tuple[ShardLayout, ...]:
    """The layout of every parameter of one engine rank; a tied head is no parameter of its own.

    Raises:
        ModelError: the model cannot be cut so.
    """
    if not 0 <= tp_rank < tp_size:
        raise ModelError(f"engine tensor-parallel rank {tp_rank} of {tp_size}")
    vocabulary = (geometry.vocab_size, padded_vocab(geometry.vocab_size, tp_size), geometry.hidden_size)
    embedding = "model.embed_tokens.weight"
    shards = [vocab_parallel(embedding, embedding, *vocabulary, tp_size, tp_rank)]
    for layer_idx in range(geometry.num_layers):
        shards += _layer(geometry, tp_size, tp_rank, f"model.layers.{layer_idx}.")
    shards.append(replicated("model.norm.weight", "model.norm.weight", geometry.hidden_size))
    if not geometry.tied_embeddings:
        shards.append(vocab_parallel("lm_head.weight", "lm_head.weight", *vocabulary, tp_size, tp_rank))
    return tuple(shards)


def padded_vocab(vocab_size: int, tp_size: int) -> int:
    """The vocabulary as SGLang pads it."""
    padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if padded % tp_size == 0:
        return padded
    multiple = VOCAB_MULTIPLE * tp_size
    return -(-vocab_size // multiple) * multiple


def check_manifest(
    shards: tuple[ShardLayout, ...], manifest: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Compare the layout with the shapes that a live engine rank reported, `manifest`.

    Raises:
        ModelError: names the first parameter that is missing, unknown, or of another shape.
    """
    for shard in shards:
        if shard.name not in manifest:
            raise ModelError(f"{where} has no parameter {shard.name}: it serves another model")
        if tuple(manifest[shard.name]) != shard.shape:
            raise ModelError(
                f"{where}: {shard.name} has shape {tuple(manifest[shard.name])}, its layout {shard.shape};"
                " it serves another model, or pads heads or vocabulary (choose a TP size that divides them)"
            )
    unknown = sorted(set(manifest) - {shard.name for shard in shards})
    if unknown:
        raise ModelError(
            f"{where} has a parameter {unknown[0]} that no layout covers: it serves another model"
        )


def _layer(geometry: ModelGeometry, tp_size: int, tp_rank: int, prefix: str) -> list[ShardLayout]:
    hidden, ffn = geometry.hidden_size, geometry.ffn_hidden_size
    height = part_size(ffn, tp_size, "ffn_hidden_size")
    halves = [
        Block(f"{prefix}mlp.{half}_proj.weight", tp_rank * height, 0, height, hidden)
        for half in ("gate", "up")
    ]
    down = f"{prefix}mlp.down_proj.weight"
    norms = (f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight")
    return [
        replicated(norms[0], norms[0], hidden),
        *_attention(geometry, tp_size, tp_rank, f"{prefix}self_attn."),
        replicated(norms[1], norms[1], hidden),
        stacked(f"{prefix}mlp.gate_up_proj.weight", halves, hidden),
        row_parallel(down, down, hidden, ffn, tp_size, tp_rank),
    ]


def _attention(geometry: ModelGeometry, tp_size: int, tp_rank: int, prefix: str) -> list[ShardLayout]:
    hidden, dim = geometry.hidden_size, geometry.head_dim
    out = f"{prefix}o_proj.weight"
    shards = [
        stacked(
            f"{prefix}qkv_proj.weight", _qkv(geometry, tp_size, tp_rank, prefix, "weight", hidden), hidden
        ),
        row_parallel(out, out, hidden, geometry.num_heads * dim, tp_size, tp_rank),
    ]
    if geometry.attention_bias:
        bias = _qkv(geometry, tp_size, tp_rank, prefix, "bias", 1)
        shards.append(stacked(f"{prefix}qkv_proj.bias", bias, None))
    if geometry.qk_norm:
        norms = (f"{prefix}{part}_norm.weight" for part in ("q", "k"))
        shards += [replicated(norm, norm, dim) for norm in norms]
    return shards


def _qkv(
    geometry: ModelGeometry, tp_size: int, tp_rank: int, prefix: str, kind: str, cols: int
) -> list[Block]:
    """[local query heads, local key heads, local value heads]; fewer KV heads than ranks are replicated."""
    dim = geometry.head_dim
    q_rows = part_size(geometry.num_heads, tp_size, "attention heads") * dim
    if tp_size >= geometry.num_kv_heads:
        replicas = part_size(tp_size, geometry.num_kv_heads, "engine TP over key/value heads")
        kv_first, kv_rows = tp_rank // replicas * dim, dim
    else:
        kv_rows = part_size(geometry.num_kv_heads, tp_size, "key/value heads") * dim
        kv_first = tp_rank * kv_rows
    return [
        Block(f"{prefix}q_proj.{kind}", tp_rank * q_rows, 0, q_rows, cols),
        Block(f"{prefix}k_proj.{kind}", kv_first, 0, kv_rows, cols),
        Block(f"{prefix}v_proj.{kind}", kv_first, 0, kv_rows, cols),
    ]
