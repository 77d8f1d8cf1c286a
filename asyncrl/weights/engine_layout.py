"""Which rectangles of Hugging Face tensors each parameter of an SGLang rank holds.

Names are those of `model.named_parameters()` on one tensor-parallel rank. The shapes here are what the model
and the parallel sizes imply; `check_manifest` compares them with the live engine's own: nothing is assumed.

Of E experts under expert parallelism ep of tp, rank j holds E / ep, from the (j // m E / ep)-th on, and of
each the part j % m of m = tp / ep (SGLang's `runtime_context.py`: moe_ep_rank, moe_tp_rank).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from asyncrl.weights.cuts import LayerTensors, expert_shard, row_shard
from asyncrl.weights.family import Row
from asyncrl.weights.fp8 import FP8, scale_shard
from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.layout import ShardLayout, layer_table, part_size, replicated, vocab_parallel

VOCAB_MULTIPLE = 64
"""SGLang pads its vocabulary to a multiple of this (times TP where TP does not divide the result)."""


def engine_shards(
    geometry: ModelGeometry, tp_size: int, tp_rank: int, ep_size: int = 1, *, fp8: bool = False
) -> tuple[ShardLayout, ...]:
    """The layout of every parameter of one engine rank; a tied head is no parameter of its own.

    ``fp8``: the matrices of layers are fp8 blocks, each followed by its scales (`fp8.scale_shard`).

    Raises:
        ModelError: the model cannot be cut so.
    """
    if tp_size % ep_size:
        raise ModelError(f"engine ep {ep_size} does not divide its tp {tp_size}; choose a divisor")
    if not 0 <= tp_rank < tp_size:
        raise ModelError(f"engine tensor-parallel rank {tp_rank} of {tp_size}")
    vocabulary = (geometry.vocab_size, padded_vocab(geometry.vocab_size, tp_size), geometry.hidden_size)
    embedding = "model.embed_tokens.weight"
    shards = [vocab_parallel(embedding, embedding, *vocabulary, tp_size, tp_rank)]
    for layer_idx in range(geometry.num_layers):
        shards += engine_layer(geometry, layer_idx, tp_size, tp_rank, ep_size, fp8=fp8)
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


def engine_layer(
    geometry: ModelGeometry, layer_idx: int, tp_size: int, tp_rank: int, ep_size: int, *, fp8: bool = False
) -> list[ShardLayout]:
    """One layer, counted from 0."""
    table = layer_table(geometry, layer_idx)
    layer = LayerTensors(geometry, f"model.layers.{layer_idx}.", table.tensors)
    shards: list[ShardLayout] = []
    for row in table.engine:
        if row.has_experts:
            shard = _experts(layer, row, tp_size, tp_rank, ep_size)
        else:
            shard = row_shard(layer.prefix + row.name, row, row.cut, layer, tp_size, tp_rank)
        if fp8 and len(shard.shape) > 1 and not row.never_fp8:
            shards += [dataclasses.replace(shard, dtype=FP8), scale_shard(shard)]
        else:
            shards.append(shard)
    return shards


def _experts(layer: LayerTensors, row: Row, tp_size: int, tp_rank: int, ep_size: int) -> ShardLayout:
    moe, moe_tp = layer.geometry.moe, tp_size // ep_size
    num_local = part_size(moe.num_experts if moe else 0, ep_size, "experts over engine ep")
    first = tp_rank // moe_tp * num_local
    experts = range(first, first + num_local)
    name = layer.prefix + row.name
    return expert_shard(name, row, layer, experts, moe_tp, tp_rank % moe_tp, stacked=True)
