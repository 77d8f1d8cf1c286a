"""Names and rectangles of this rank's parameters, over all of its virtual pipeline chunks.

megatron numbers the layers of every chunk from 0, so the same name occurs once per chunk; a rank with
several chunks therefore prefixes each name by its chunk: ``chunk1.decoder.layers.0...``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from megatron.core import parallel_state as mpu

from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.layout import ShardLayout
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards
from megatron_ext.model import PolicyModel


def rank_parameters(chunks: Sequence[PolicyModel]) -> dict[str, torch.nn.Parameter]:
    """Every parameter of this rank by its chunk-unique name."""
    return {
        _unique(chunk_idx, len(chunks), name): parameter
        for chunk_idx, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def rank_layouts(geometry: ModelGeometry, chunks: Sequence[PolicyModel]) -> tuple[ShardLayout, ...]:
    """The rectangles of every parameter of this rank.

    Raises:
        ModelError: the layouts and the model disagree about a name or a shape.
    """
    layouts = tuple(
        dataclasses.replace(shard, name=_unique(chunk_idx, len(chunks), shard.name))
        for chunk_idx, chunk in enumerate(chunks)
        for shard in megatron_shards(geometry, chunk_coord(chunk))
    )
    expected = {shard.name: shard.shape for shard in layouts}
    actual = {name: tuple(parameter.shape) for name, parameter in rank_parameters(chunks).items()}
    if expected != actual:
        name = min(set(expected.items()) ^ set(actual.items()))[0]
        raise ModelError(
            f"parameter {name}: the layout says {expected.get(name)}, the model has {actual.get(name)}"
        )
    return layouts


def chunk_coord(chunk: PolicyModel) -> MegatronCoord:
    """Where a model chunk stands, as megatron numbered it."""
    return MegatronCoord(
        tp_size=mpu.get_tensor_model_parallel_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        layer_numbers=tuple(layer.layer_number for layer in chunk.decoder.layers),
        has_embedding=chunk.pre_process,
        has_output=chunk.post_process,
        padded_vocab=chunk.vocab_size,
    )


def _unique(chunk_idx: int, num_chunks: int, name: str) -> str:
    return name if num_chunks == 1 else f"chunk{chunk_idx}.{name}"
