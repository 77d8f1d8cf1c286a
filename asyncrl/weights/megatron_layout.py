"""Which rectangles of Hugging Face tensors each parameter of a Megatron model chunk holds.

Names are those of `GPTModel.named_parameters()`, plus the router's buffer ``expert_bias``. Layers are
numbered as Megatron numbers them (`layer.layer_number`, from 1), so that uneven, virtual and custom pipeline
splits need no arithmetic here. Experts are numbered as Megatron does: local expert i of expert-parallel rank
r is expert r E / EP + i (`transformer/moe/moe_layer.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.weights.cuts import LayerTensors, expert_shard, row_shard
from asyncrl.weights.family import Row
from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.layout import (
    ShardLayout,
    head_tensor,
    layer_table,
    part_size,
    replicated,
    vocab_parallel,
)


@dataclass(frozen=True, slots=True)
class MegatronCoord:
    """Where one model chunk stands: its cuts, its piece of the pipeline, and how its modules are named.

    ``layer_numbers[i]`` is Megatron's own, 1-based ``layer_number`` of ``decoder.layers[i]``.
    ``has_embedding`` and ``has_output`` are the chunk's ``pre_process`` and ``post_process``.
    ``padded_vocab`` is the vocabulary that the model was built with, at least the model's own.
    ``etp`` cuts each expert as ``tp`` cuts everything else. ``transformer_engine``: the layer spec that the
    model was built from, else the local one. ``grouped_experts``: TEGroupedMLP, else SequentialMLP.
    """

    tp_size: int
    tp_rank: int
    layer_numbers: tuple[int, ...]
    has_embedding: bool
    has_output: bool
    padded_vocab: int
    ep_size: int = 1
    ep_rank: int = 0
    etp_size: int = 1
    etp_rank: int = 0
    transformer_engine: bool = False
    grouped_experts: bool = False


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
        shards += megatron_layer(geometry, coord, f"decoder.layers.{local_idx}.", layer_number - 1)
    if coord.has_output:
        shards.append(replicated("decoder.final_layernorm.weight", "model.norm.weight", geometry.hidden_size))
        if not (geometry.tied_embeddings and coord.has_embedding):
            shards.append(_vocabulary(geometry, coord, "output_layer.weight", head_tensor(geometry)))
    return tuple(shards)


def _check(geometry: ModelGeometry, coord: MegatronCoord) -> None:
    places = (("tensor", coord.tp_rank, coord.tp_size), ("expert", coord.ep_rank, coord.ep_size))
    for name, rank, size in (*places, ("expert-tensor", coord.etp_rank, coord.etp_size)):
        if not 0 <= rank < size:
            raise ModelError(f"{name}-parallel rank {rank} of {size}")
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


def megatron_layer(
    geometry: ModelGeometry, coord: MegatronCoord, local: str, layer_idx: int
) -> list[ShardLayout]:
    """One layer, counted from 0; ``local`` is the prefix of its parameters."""
    table = layer_table(geometry, layer_idx)
    layer = LayerTensors(geometry, f"model.layers.{layer_idx}.", table.tensors)
    shards: list[ShardLayout] = []
    for row in table.megatron:
        if row.has_experts:
            shards += _experts(coord, local, row, layer)
            continue
        name, cut = row.name, row.cut
        if coord.transformer_engine:
            name, cut = row.te or name, row.te_cut or cut
        shards.append(row_shard(local + name, row, cut, layer, coord.tp_size, coord.tp_rank))
    return shards


def _experts(coord: MegatronCoord, local: str, row: Row, layer: LayerTensors) -> list[ShardLayout]:
    moe = layer.geometry.moe
    num_experts = moe.num_experts if moe else 0
    num_local = part_size(num_experts, coord.ep_size, "experts over expert parallelism")
    name = row.grouped if coord.grouped_experts else row.name
    return [
        expert_shard(
            local + name.replace("{expert}", str(local_expert)),
            row,
            layer,
            (coord.ep_rank * num_local + local_expert,),
            coord.etp_size,
            coord.etp_rank,
            stacked=False,
        )
        for local_expert in range(num_local)
    ]
