"""A publication planned from a config.json alone, for any number of ranks.

    ModelGeometry, splits of both sides, replicas -> block tables -> pieces -> moves -> costs -> WeightPlan

Replicas are equal, so one engine is planned, and every figure holds for each of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from asyncrl.weights.balance import stage_skew
from asyncrl.weights.cost import (
    STRATEGIES,
    EngineTraffic,
    Estimate,
    Links,
    choose,
    estimate,
    message_counts,
    simulate,
)
from asyncrl.weights.fp8 import FP8, SCALE_BYTES, require_whole_blocks, without_scales
from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.layout import hf_tensors
from asyncrl.weights.model_tables import TensorNumbers, engine_table, trainer_table
from asyncrl.weights.moves import Moves, assign_owners, cut_messages, group_bytes
from asyncrl.weights.overlap import overlap
from asyncrl.weights.plan import hash_of
from asyncrl.weights.splits import EngineSplit, TrainerSplit
from asyncrl.weights.tables import DTYPES, ELEMENT_BYTES, SIZES, BlockTable


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be planned; dtypes are those of parameters, where the family does not fix another."""

    geometry: ModelGeometry
    trainer: TrainerSplit
    engine: EngineSplit
    num_replicas: int
    links: Links
    strategy: str = ""  # empty: the cheapest
    trainer_dtype: str = "bfloat16"
    engine_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ModelError(f"--replicas {self.num_replicas}: use 1 or more")
        if self.links.bandwidth <= 0 or self.links.latency < 0:
            raise ModelError("--bandwidth must be above 0 and --latency not below 0")


@dataclass(frozen=True, slots=True, eq=False)
class WeightPlan:
    """The plan of every replica and what it costs."""

    request: PlanRequest
    traffic: EngineTraffic
    chosen: Estimate
    estimates: tuple[Estimate, ...]  # one per strategy
    needed_bytes: int  # of one engine
    model_bytes: int
    plan_hash: str
    planning_s: float  # of one core

    @property
    def gather_broadcast_s(self) -> float:
        """All-gather of full tensors, then a broadcast: every byte of the model over one link."""
        return self.model_bytes / self.request.links.bandwidth

    def figures(self) -> dict[str, object]:
        """As `asyncrl plan weights --json` writes it."""
        return {
            "strategy": self.chosen.strategy,
            "received_over_needed": int(self.traffic.received.sum()) / self.needed_bytes,
            "send_max_over_mean": self.traffic.send_balance,
            "stage_skew": self.traffic.skew,
            "bound_s": self.chosen.bound_s,
            "simulated_s": self.chosen.simulated_s,
            "gather_broadcast_s": self.gather_broadcast_s,
            "bucket_bytes": self.chosen.bucket_bytes,
            "staging_bytes": self.chosen.staging_bytes,
            "num_communicators": self.chosen.num_communicators,
            "max_peers": self.chosen.max_peers,
            "plan_hash": self.plan_hash,
            "planning_s": self.planning_s,
        }


def plan_model(request: PlanRequest) -> WeightPlan:
    """Plan and estimate.

    Raises:
        ModelError: one of the sides cannot cut the model so.
    """
    started = time.process_time()
    _refuse_experts_of_none(request)
    numbers = TensorNumbers(request.geometry)
    senders = trainer_table(numbers, request.trainer, request.trainer_dtype)
    receivers = engine_table(numbers, request.engine, request.engine_dtype)
    blocks_of = np.unique(receivers.tensor[receivers.dtype == DTYPES.index(FP8)]).tolist()
    scales = {numbers.scale_of(number) for number in blocks_of}
    require_whole_blocks(senders, blocks_of, numbers.name)
    moves, skew = _moves(request, numbers, senders, without_scales(receivers, scales))
    traffic = EngineTraffic.of(moves, request.trainer.world_size, request.engine.tp, skew)
    costs = (traffic, request.num_replicas, request.links)
    estimates = tuple(estimate(*costs, strategy) for strategy in STRATEGIES)
    strategy = choose([item for item in estimates if request.strategy in ("", item.strategy)]).strategy
    moves, messages = cut_messages(moves, message_counts(*costs, strategy), request.engine.tp)
    chosen = simulate(*costs, strategy, messages)
    described = f"{request.geometry} {request.trainer} {request.engine} {request.num_replicas}"
    return WeightPlan(
        request=request,
        traffic=traffic,
        chosen=chosen,
        estimates=estimates,
        needed_bytes=_needed(senders, receivers, scales),
        model_bytes=_model_bytes(request),
        plan_hash=hash_of(moves, messages, (described, strategy)),
        planning_s=time.process_time() - started,
    )


def _refuse_experts_of_none(request: PlanRequest) -> None:
    wanted = {"trainer ep": request.trainer.ep, "trainer etp": request.trainer.etp}
    for name, size in (wanted | {"engine ep": request.engine.ep}).items():
        if request.geometry.moe is None and size > 1:
            raise ModelError(f"{name} = {size}: {request.geometry.family} has no experts; leave it out")


def _moves(
    request: PlanRequest, numbers: TensorNumbers, senders: BlockTable, receivers: BlockTable
) -> tuple[Moves, float]:
    """The moves of one engine, and the inherent imbalance of sending."""
    num_senders = request.trainer.world_size
    pieces, holders = overlap(senders, receivers, numbers.name)
    moves = assign_owners(pieces, holders, senders, receivers, np.zeros(num_senders, dtype=np.int64))
    totals = group_bytes(pieces, len(holders.groups))
    return moves, stage_skew(holders.groups, totals, num_senders)


def _needed(senders: BlockTable, receivers: BlockTable, scales: Collection[int]) -> int:
    """Bytes of everything that one engine's parameters hold, each in the narrower of both sides' dtypes."""
    widest = np.zeros(int(receivers.tensor.max()) + 1, dtype=np.int64)
    known = senders.tensor < len(widest)
    np.maximum.at(widest, senders.tensor[known], SIZES[senders.dtype[known]])
    widest[sorted(scales)] = SCALE_BYTES  # which no sender holds
    sizes = np.minimum(SIZES[receivers.dtype], widest[receivers.tensor])
    return int((receivers.rows * receivers.cols * sizes).sum())


def _model_bytes(request: PlanRequest) -> int:
    elements = sum(math.prod(shape) for shape in hf_tensors(request.geometry).values())
    return elements * ELEMENT_BYTES[request.engine_dtype]
