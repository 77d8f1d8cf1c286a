"""Parallel sizes of both sides as a user writes them, and where each rank stands.

    "tp=4,pp=4,cp=2,ep=16" -> TrainerSplit -> the coordinates of every rank      "tp=32,ep=8" -> EngineSplit

Trainer ranks are numbered as Megatron numbers them by default: tensor, context, data, pipeline, fastest
first; for experts, expert-tensor, expert, expert-data within each pipeline stage (`parallel_state.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.layout import layer_table
from asyncrl.weights.megatron_layout import MegatronCoord

VOCAB_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class TrainerSplit:
    """Sizes of every kind of trainer parallelism; dp 0 is the smallest that fits the others.

    ``layers`` names the layers of each virtual stage, dealt to the pipeline ranks in turn; empty means equal
    stages, or, where the layers do not come out even, those whose largest stage has the fewest parameters.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 0
    ep: int = 1
    etp: int = 1
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ModelError(f"trainer {name} = {getattr(self, name)}; use 1 or more")
        if self.vpp > 1 and self.pp == 1:
            raise ModelError(f"trainer vpp = {self.vpp} needs pp > 1")
        if self.stage_ranks % (self.ep * self.etp):
            raise ModelError(
                f"trainer: a pipeline stage has tp {self.tp} x cp {self.cp} x dp {self.dp} ="
                f" {self.stage_ranks} ranks, which ep {self.ep} x etp {self.etp} does not divide; choose dp ="
                f" {self._fitting_dp()} or a multiple"
            )

    def _fitting_dp(self) -> int:
        dense = self.tp * self.cp
        return math.lcm(dense, self.ep * self.etp) // dense

    @property
    def stage_ranks(self) -> int:
        return self.tp * self.cp * (self.dp or self._fitting_dp())

    @property
    def world_size(self) -> int:
        return self.stage_ranks * self.pp

    def padded_vocab(self, vocab_size: int) -> int:
        """As Megatron pads it."""
        multiple = VOCAB_MULTIPLE * self.tp
        return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class EngineSplit:
    """Sizes of one engine: all of its ranks cut dense parameters, ``ep`` groups of them hold experts."""

    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1 or self.tp % self.ep:
            raise ModelError(f"engine tp = {self.tp}, ep = {self.ep}: ep must divide tp, both 1 or more")


def trainer_split(text: str) -> TrainerSplit:
    """Parse for example ``tp=4,pp=4,ep=16`` or ``pp=2,layers=3/5``."""
    values = _parse(text, "--trainer", [field.name for field in fields(TrainerSplit)])
    layers = values.pop("layers", "")
    numbers = {name: _number(name, value, "--trainer") for name, value in values.items()}
    stages = tuple(_number("layers", part, "--trainer") for part in layers.split("/")) if layers else ()
    return TrainerSplit(layers=stages, **numbers)


def engine_split(text: str) -> EngineSplit:
    """Parse for example ``tp=32,ep=8``."""
    values = _parse(text, "--engine", [field.name for field in fields(EngineSplit)])
    return EngineSplit(**{name: _number(name, value, "--engine") for name, value in values.items()})


def _parse(text: str, option: str, known: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals or name not in known or name in values:
            raise ModelError(f"{option}: {item!r} is not one of {', '.join(f'{name}=N' for name in known)}")
        values[name] = value
    return values


def _number(name: str, value: str, option: str) -> int:
    if not value.isdigit():
        raise ModelError(f"{option}: {name}={value} is not a number")
    return int(value)


@lru_cache(maxsize=16)
def stage_sizes(geometry: ModelGeometry, split: TrainerSplit) -> tuple[int, ...]:
    """Layers of each virtual stage, in the order of the model.

    Raises:
        ModelError: the layers that the split names do not add up, or there are fewer layers than stages.
    """
    num_stages = split.pp * split.vpp
    if split.layers:
        if len(split.layers) != num_stages or sum(split.layers) != geometry.num_layers:
            raise ModelError(
                f"trainer layers = {'/'.join(map(str, split.layers))}: {num_stages} stages (pp x vpp) must"
                f" hold {geometry.num_layers} layers together"
            )
        return split.layers
    if geometry.num_layers < num_stages:
        raise ModelError(
            f"trainer pp {split.pp} x vpp {split.vpp}: more stages than the model has layers,"
            f" {geometry.num_layers}"
        )
    if geometry.num_layers % num_stages == 0:
        return (geometry.num_layers // num_stages,) * num_stages
    return _fewest_parameters(geometry, num_stages)


def _fewest_parameters(geometry: ModelGeometry, num_stages: int) -> tuple[int, ...]:
    """Contiguous stages, each of one layer or more, whose largest is as small as can be."""
    vocabulary = geometry.vocab_size * geometry.hidden_size
    weights = [_layer_elements(geometry, idx) for idx in range(geometry.num_layers)]
    weights[0] += vocabulary
    weights[-1] += vocabulary
    low, high = max(weights), sum(weights)
    while low < high:
        limit = (low + high) // 2
        if len(_filled(weights, limit)) <= num_stages:
            high = limit
        else:
            low = limit + 1
    sizes = _filled(weights, low)
    while len(sizes) < num_stages:  # split the longest; no stage grows
        longest = max(range(len(sizes)), key=lambda idx: sizes[idx])
        half = sizes[longest] // 2
        sizes[longest : longest + 1] = [half, sizes[longest] - half]
    return tuple(sizes)


def _layer_elements(geometry: ModelGeometry, layer_idx: int) -> int:
    num_experts = geometry.moe.num_experts if geometry.moe else 0
    return sum(
        math.prod(shape) * (num_experts if "{expert}" in name else 1)
        for name, shape in layer_table(geometry, layer_idx).tensors.items()
    )


def _filled(weights: Sequence[int], limit: int) -> list[int]:
    """Lengths of runs, each filled as far as the limit allows."""
    sizes, used = [0], 0
    for weight in weights:
        if used + weight > limit:
            sizes.append(0)
            used = 0
        sizes[-1] += 1
        used += weight
    return sizes


def rank_chunks(geometry: ModelGeometry, split: TrainerSplit, rank: int) -> tuple[MegatronCoord, ...]:
    """The model chunks of one trainer rank, one per virtual stage; experts in grouped TE modules."""
    sizes = stage_sizes(geometry, split)
    pp_rank, in_stage = divmod(rank, split.stage_ranks)
    chunks = []
    for stage in range(pp_rank, len(sizes), split.pp):
        first = sum(sizes[:stage])
        chunks.append(
            MegatronCoord(
                tp_size=split.tp,
                tp_rank=in_stage % split.tp,
                layer_numbers=tuple(range(first + 1, first + sizes[stage] + 1)),
                has_embedding=stage == 0,
                has_output=stage == len(sizes) - 1,
                padded_vocab=split.padded_vocab(geometry.vocab_size),
                ep_size=split.ep,
                ep_rank=in_stage // split.etp % split.ep,
                etp_size=split.etp,
                etp_rank=in_stage % split.etp,
                transformer_engine=True,
                grouped_experts=True,
            )
        )
    return tuple(chunks)
