"""Process groups of the trainer: torch.distributed first, then megatron's model-parallel groups.

Ranks are cut as megatron's default order says, fastest first: TP, CP, DP, PP. A *replica* is the
TP x CP x PP ranks of one DP rank; its leader is the rank where all three are 0.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How the model is cut: sizes of tensor, pipeline, virtual pipeline, context and data parallelism."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = True

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}; use 1 or more")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} needs pp > 1; set vpp = 1 or pp = 2")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1; set it to false or tp = 2")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def pad_multiple(self) -> int:
        """What every segment's length is padded to: 2 per CP rank (zigzag), times TP where tokens are cut."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where this process stands."""

    rank: int
    world_size: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    is_first_stage: bool
    is_last_stage: bool

    @property
    def is_replica_leader(self) -> bool:
        return self.tp_rank == self.pp_rank == self.cp_rank == 0


def device() -> torch.device:
    """This rank's device: its current CUDA device, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def initialize(layout: ParallelLayout, seed: int, timeout_s: float) -> RankInfo:
    """Join the job that torchrun (or srun) started, and cut it by ``layout``.

    May be called again with another layout of the same size: tests do so. It ends the groups of the layout
    before, with which nothing can be computed from then on.

    Args:
        seed: of the random number generators; the same on every rank.
        timeout_s: after which a collective that waits for a rank fails.

    Raises:
        ValueError: the job's world size is not the layout's.
    """
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timeout)
    if dist.get_world_size() != layout.world_size:
        raise ValueError(
            f"{dist.get_world_size()} ranks were started; tp {layout.tp} x pp {layout.pp} x cp {layout.cp}"
            f" x dp {layout.dp} needs {layout.world_size}"
        )
    if mpu.model_parallel_is_initialized():
        _leave_groups()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return rank_info()


def rank_info() -> RankInfo:
    """Where this process stands in the groups that `initialize` made."""
    pp_rank = mpu.get_pipeline_model_parallel_rank()
    return RankInfo(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_rank=pp_rank,
        cp_rank=mpu.get_context_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        is_first_stage=pp_rank == 0,
        is_last_stage=pp_rank == mpu.get_pipeline_model_parallel_world_size() - 1,
    )


def _leave_groups() -> None:
    """Megatron forgets its groups without ending most of them: they would keep connections and threads."""
    for group in mpu._global_process_group_list or []:
        if group is not None:  # the default group stays
            dist.destroy_process_group(group)
    mpu.destroy_model_parallel()


def shutdown() -> None:
    """Leave the job's process groups; the last call of a rank."""
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
