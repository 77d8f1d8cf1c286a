"""All ranks of a trainer and of an engine in one process: layouts and tensors of any parallel split."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from asyncrl.weights.engine_layout import engine_shards
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.layout import ShardLayout
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards
from asyncrl.weights.plan import RankLayout
from tests.moe_reference import ExpertCut
from tests.shard_reference import Tensors, megatron_tensors


@dataclass(frozen=True)
class Trainer:
    """A split; ``stages`` holds the layers of each virtual stage, dealt to pipeline ranks in turn."""

    tp: int
    stages: tuple[int, ...]
    pp: int
    dp: int = 1
    padded_vocab: int = 128
    ep: int = 1
    etp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


def trainer_ranks(
    geometry: ModelGeometry, trainer: Trainer, model: Tensors, dtype: torch.dtype = torch.float32
) -> list[tuple[RankLayout, list[torch.Tensor]]]:
    """Layout and parameters of every rank, in Megatron's order: tensor, then data, then pipeline ranks."""
    ranks = []
    num_in_stage = trainer.tp * trainer.dp
    for rank in range(trainer.world_size):
        tp_rank, pp_rank = rank % trainer.tp, rank // num_in_stage
        in_stage = rank % num_in_stage
        cut = (trainer.ep, in_stage // trainer.etp % trainer.ep, trainer.etp, in_stage % trainer.etp)
        shards: list[ShardLayout] = []
        tensors: list[torch.Tensor] = []
        for stage in range(pp_rank, len(trainer.stages), trainer.pp):
            first = sum(trainer.stages[:stage])
            layers = tuple(range(first, first + trainer.stages[stage]))
            ends = stage == 0, stage == len(trainer.stages) - 1
            numbers = tuple(idx + 1 for idx in layers)
            coord = MegatronCoord(trainer.tp, tp_rank, numbers, *ends, trainer.padded_vocab, *cut)
            held = megatron_tensors(
                *(geometry, model, trainer.tp, tp_rank, layers, *ends, trainer.padded_vocab),
                ExpertCut(*cut),
            )
            for shard in megatron_shards(geometry, coord):
                shards.append(dataclasses.replace(shard, name=f"{stage}.{shard.name}"))
                tensors.append(held[shard.name].to(getattr(torch, shard.dtype) if shard.dtype else dtype))
        names = tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        ranks.append((RankLayout(tuple(shards), names), tensors))
    return ranks


def engine_ranks(
    geometry: ModelGeometry, tp_size: int, dtype: str = "float32", ep_size: int = 1
) -> list[RankLayout]:
    layouts = []
    for tp_rank in range(tp_size):
        shards = engine_shards(geometry, tp_size, tp_rank, ep_size)
        layouts.append(RankLayout(shards, tuple(shard.dtype or dtype for shard in shards)))
    return layouts
