"""Block tables of whole models from their sizes alone, fast enough for 10^12 parameters on 10^3 ranks.

A layer is laid out once per kind and place, as the live path does it, and its rows are repeated over the
layers of that kind with other tensor numbers. Tensors are numbered in the order of `hf_tensors`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from asyncrl.weights.engine_layout import engine_layer, engine_shards
from asyncrl.weights.fp8 import FP8, SCALE_SUFFIX
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.layout import ShardLayout, hf_tensors, layer_table
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_layer, megatron_shards
from asyncrl.weights.splits import EngineSplit, TrainerSplit, rank_chunks
from asyncrl.weights.tables import DTYPES, BlockTable, Ints, shard_rows, table_from_columns

SHARD, DTYPE, TENSOR = 0, 1, 2
"""Columns of a rank's rows: those of `BlockTable` without the rank."""


class TensorNumbers:
    """Numbers of a model's tensors: 0 is the embedding, ``first[i]`` the first of layer i."""

    def __init__(self, geometry: ModelGeometry) -> None:
        self.geometry = geometry
        self._num_experts = geometry.moe.num_experts if geometry.moe else 0
        sizes = [self._num_tensors(layer_idx) for layer_idx in range(geometry.num_layers)]
        self.first = tuple(accumulate(sizes, initial=1))
        layers = range(geometry.num_layers)
        self._first_moe = next((idx for idx in layers if geometry.is_moe_layer(idx)), 0)
        self._first_dense = next((idx for idx in layers if not geometry.is_moe_layer(idx)), 0)

    def _num_tensors(self, layer_idx: int) -> int:
        names = layer_table(self.geometry, layer_idx).tensors
        return sum(self._num_experts if "{expert}" in name else 1 for name in names)

    def alike(self, layer_idx: int) -> int:
        """The first layer of the same kind."""
        return self._first_moe if self.geometry.is_moe_layer(layer_idx) else self._first_dense

    def of_layer(self, layer_idx: int) -> dict[str, int]:
        """Name and number of one layer's tensors."""
        names: list[str] = []
        for name in layer_table(self.geometry, layer_idx).tensors:
            experts = range(self._num_experts) if "{expert}" in name else (0,)
            names += [name.replace("{expert}", str(expert)) for expert in experts]
        first, prefix = self.first[layer_idx], f"model.layers.{layer_idx}."
        numbers = {f"{prefix}{name}": first + idx for idx, name in enumerate(names)}
        return numbers | {f"{name}{SCALE_SUFFIX}": self.scale_of(at) for name, at in numbers.items()}

    def scale_of(self, number: int) -> int:
        """The number of a weight's fp8 scales."""
        return number + self.first[-1] + 2

    def of_ends(self) -> dict[str, int]:
        """Of the tensors outside the layers."""
        last = self.first[-1]
        return {"model.embed_tokens.weight": 0, "model.norm.weight": last, "lm_head.weight": last + 1}

    def name(self, number: int) -> str:
        """The tensor of a number; slow, for messages."""
        if number >= self.scale_of(0):
            return f"{self.name(number - self.scale_of(0))}{SCALE_SUFFIX}"
        return list(hf_tensors(self.geometry))[number]


class _RankRows:
    """Rows of one rank after another, each layer laid out once per kind and place."""

    def __init__(self, numbers: TensorNumbers, dtype: str) -> None:
        self._numbers = numbers
        self._dtype = dtype
        self._templates: dict[tuple[int, object], tuple[Ints, int]] = {}
        self._columns: list[Ints] = []
        self._ranks: list[Ints] = []

    def add_ends(self, rank: int, shards: Sequence[ShardLayout], first_shard: int) -> int:
        """Parameters outside the layers; returns the number of the next parameter."""
        self._add(rank, self._rows(shards, self._numbers.of_ends()), first_shard, 0)
        return first_shard + len(shards)

    def add_layer(
        self, rank: int, layer_idx: int, place: object, make: Callable[[int], list[ShardLayout]], first: int
    ) -> int:
        """A layer; ``make`` lays out the first layer of its kind, the same for every equal ``place``."""
        alike = self._numbers.alike(layer_idx)
        if (alike, place) not in self._templates:
            shards = make(alike)
            rows = self._rows(shards, self._numbers.of_layer(alike))
            self._templates[alike, place] = rows, len(shards)
        rows, num_shards = self._templates[alike, place]
        self._add(rank, rows, first, self._numbers.first[layer_idx] - self._numbers.first[alike])
        return first + num_shards

    def table(self) -> BlockTable:
        rows = np.concatenate(self._columns)
        return table_from_columns(np.concatenate(self._ranks), *rows.T)

    def _rows(self, shards: Sequence[ShardLayout], tensors: dict[str, int]) -> Ints:
        dtypes = [DTYPES.index(shard.dtype or self._dtype) for shard in shards]
        rows = list(shard_rows(shards, dtypes, tensors))
        return np.array(rows, dtype=np.int64).reshape(len(rows), 9)

    def _add(self, rank: int, rows: Ints, first_shard: int, tensor_shift: int) -> None:
        moved = rows.copy()
        moved[:, SHARD] += first_shard
        moved[:, TENSOR] += tensor_shift
        self._columns.append(moved)
        self._ranks.append(np.full(len(rows), rank, dtype=np.int64))


def engine_table(numbers: TensorNumbers, split: EngineSplit, dtype: str) -> BlockTable:
    """All ranks of one engine, whose parameters are ``dtype`` where the family does not fix another.

    Of an fp8 engine the matrices of layers are fp8 blocks, everything else is bfloat16.

    Raises:
        ModelError: the model cannot be cut so.
    """
    geometry, rows = numbers.geometry, _RankRows(numbers, "bfloat16" if dtype == FP8 else dtype)
    outside = dataclasses.replace(geometry, num_layers=0)
    for rank in range(split.tp):
        ends = engine_shards(outside, split.tp, rank, split.ep)
        shard = rows.add_ends(rank, ends[:1], 0)
        for layer_idx in range(geometry.num_layers):

            def make(alike: int, rank: int = rank) -> list[ShardLayout]:
                return engine_layer(geometry, alike, split.tp, rank, split.ep, fp8=dtype == FP8)

            shard = rows.add_layer(rank, layer_idx, rank, make, shard)
        rows.add_ends(rank, ends[1:], shard)
    return rows.table()


def trainer_table(numbers: TensorNumbers, split: TrainerSplit, dtype: str) -> BlockTable:
    """All trainer ranks, whose parameters are ``dtype`` where the family does not fix another.

    Raises:
        ModelError: the model cannot be cut so.
    """
    geometry, rows = numbers.geometry, _RankRows(numbers, dtype)
    for rank in range(split.world_size):
        shard = 0
        for chunk in rank_chunks(geometry, split, rank):
            place = dataclasses.replace(chunk, layer_numbers=(), has_embedding=False, has_output=False)
            outside = megatron_shards(geometry, dataclasses.replace(chunk, layer_numbers=()))
            num_before = int(chunk.has_embedding)
            shard = rows.add_ends(rank, outside[:num_before], shard)
            for number in chunk.layer_numbers:

                def make(alike: int, place: MegatronCoord = place) -> list[ShardLayout]:
                    return megatron_layer(geometry, place, "", alike)

                shard = rows.add_layer(rank, number - 1, place, make, shard)
            shard = rows.add_ends(rank, outside[num_before:], shard)
    return rows.table()
