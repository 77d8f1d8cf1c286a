"""The policy that is trained: what the trainer loop sees of megatron.

    MegatronPolicy.build -> compute_logprobs / train_step ... -> layouts, tensors (publication, export)

Every method is collective: all ranks call it, in the same order, with micro-batches of their own replica
and the same number of them on every replica. All ranks of a replica pass the same micro-batches.

Sums, never means: the loss weights of a `MicroBatch` sum to 1 over the global batch, so gradients, losses
and metric sums add up over micro-batches, context-parallel ranks and replicas.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from asyncrl.algo.inputs import Objective, ObjectiveInputs, Segments
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.hf import read_shards
from asyncrl.weights.layout import ShardLayout
from megatron_ext.model import PolicyModel, build_chunks, transformer_config
from megatron_ext.names import rank_layouts, rank_parameters
from megatron_ext.optimizer import OptimizerSettings, build_optimizer, set_learning_rate, wrap_chunks
from megatron_ext.packing import MicroBatch
from megatron_ext.parallel import ParallelLayout, device
from megatron_ext.rope import inverse_frequencies
from megatron_ext.schedule import LocalBatch, localize, run_schedule


@dataclass(frozen=True, slots=True)
class StepStats:
    """One optimizer step, the same on every rank."""

    loss: float  # of the global batch
    grad_norm: float  # before clipping
    learning_rate: float
    sums: dict[str, float]  # the objective's sums over the global batch
    forward_backward_s: float  # of this rank, gradient reduction included
    optimizer_s: float


class MegatronPolicy:
    """The model chunks of this rank, their optimizer, and the layout they are cut by."""

    def __init__(
        self,
        geometry: ModelGeometry,
        layout: ParallelLayout,
        settings: OptimizerSettings,
        chunks: list[PolicyModel],
        wrapped: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
    ) -> None:
        self.geometry = geometry
        self.layout = layout
        self.settings = settings
        self.chunks = chunks
        self.wrapped = wrapped
        self.optimizer = optimizer
        self.num_updates = 0
        self._device = device()
        self._frequencies = inverse_frequencies(geometry)

    @staticmethod
    def build(
        model_dir: Path,
        geometry: ModelGeometry,
        layout: ParallelLayout,
        dtype: torch.dtype,
        settings: OptimizerSettings,
    ) -> MegatronPolicy:
        """Build this rank's part of the model and read its weights; `parallel.initialize` comes before.

        Args:
            model_dir: a Hugging Face directory with safetensors.
            dtype: of the parameters, float32 or bfloat16; gradients and optimizer state are float32.

        Raises:
            ModelError: the model cannot be read, or cannot be cut by this layout.
        """
        config = transformer_config(geometry, layout, dtype)
        chunks = build_chunks(geometry, layout, config)
        wrapped = wrap_chunks(chunks, config, layout)
        read_shards(model_dir, rank_layouts(geometry, chunks), rank_parameters(chunks))
        optimizer = build_optimizer(wrapped, settings, config, layout)
        return MegatronPolicy(geometry, layout, settings, chunks, wrapped, optimizer)

    def layouts(self) -> tuple[ShardLayout, ...]:
        """The rectangles of every parameter of this rank, by the names of `tensors`."""
        return rank_layouts(self.geometry, self.chunks)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The current parameters of this rank, not copied: read them between steps only."""
        return {name: parameter.detach() for name, parameter in rank_parameters(self.chunks).items()}

    def compute_logprobs(
        self, micro_batches: Sequence[MicroBatch], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Logprobs of the labels under the current parameters, of temperature-scaled logits.

        Returns:
            Per micro-batch float32 [total] on the CPU, in the order of its entries, 0 where its mask is
            False; the same on every rank of the replica.
        """
        local = self._localize(micro_batches, temperature)
        scored = [torch.zeros(batch.num_tokens, device=self._device) for batch in micro_batches]

        def collect(
            batch_idx: int, batch: LocalBatch, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> torch.Tensor:
            scored[batch_idx][batch.scored.to(self._device)] = logprobs
            return logprobs.sum()

        with torch.no_grad():
            run_schedule(self.wrapped, local, collect, self.layout, forward_only=True)
        flat = torch.cat(scored)
        # Context-parallel ranks scored disjoint entries, and only the last stage scored any.
        for group in (mpu.get_context_parallel_group(), mpu.get_pipeline_model_parallel_group()):
            if group.size() > 1:
                dist.all_reduce(flat, group=group)
        return list(flat.cpu().split([batch.num_tokens for batch in micro_batches]))

    def train_step(
        self, micro_batches: Sequence[MicroBatch], objective: Objective, *, temperature: float = 1.0
    ) -> StepStats:
        """One optimizer update on the global batch, of which these micro-batches are this replica's share.

        The objective is given the masked entries alone. Where a micro-batch has no proximal logprobs, they
        are the current ones, detached: right for the first and only update on a batch.
        """
        start = time.perf_counter()
        totals = _Totals(objective, micro_batches[0].staleness is not None, self._device)
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        local = self._localize(micro_batches, temperature)

        def score_loss(
            batch_idx: int, batch: LocalBatch, logprobs: torch.Tensor, entropy: torch.Tensor
        ) -> torch.Tensor:
            return totals.add(objective_inputs(batch, logprobs, entropy))

        run_schedule(self.wrapped, local, score_loss, self.layout, forward_only=False)
        middle = time.perf_counter()
        rate = self.settings.schedule.rate(self.num_updates)
        set_learning_rate(self.optimizer, rate)
        _updated, grad_norm, _num_zeros = self.optimizer.step()
        self.num_updates += 1
        loss, sums = totals.reduce()
        end = time.perf_counter()
        return StepStats(loss, float(grad_norm), rate, sums, middle - start, end - middle)

    def _localize(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[LocalBatch]:
        return [
            localize(batch, self.layout, self._frequencies, self._device, temperature)
            for batch in micro_batches
        ]


def objective_inputs(batch: LocalBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> ObjectiveInputs:
    """The scored entries of a rank's part of a micro-batch, as the objective takes them."""
    source = batch.micro_batch

    def scored(values: torch.Tensor) -> torch.Tensor:
        return values[batch.scored].to(logprobs.device)

    return ObjectiveInputs(
        logprobs=logprobs,
        behav_logprobs=scored(source.behav_logprobs),
        prox_logprobs=logprobs.detach() if source.prox_logprobs is None else scored(source.prox_logprobs),
        advantages=scored(source.advantages),
        loss_weights=scored(source.loss_weights),
        mask=torch.ones_like(logprobs, dtype=torch.bool),
        entropy=entropy,
        staleness=None if source.staleness is None else scored(source.staleness),
        segments=Segments(
            sample_idx=torch.bucketize(batch.scored, torch.tensor(source.cu_seqlens[1:]), right=True).to(
                logprobs.device
            ),
            num_samples=len(source.segments),  # a shared prefix is one without trained tokens
            sum_over_ranks=_sum_over_context,
        ),
    )


def _sum_over_context(values: torch.Tensor) -> torch.Tensor:
    """Over the context-parallel ranks that share a micro-batch's samples, in place."""
    group = mpu.get_context_parallel_group()
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


class _Totals:
    """Loss and metric sums over micro-batches, then over the job.

    The names of the sums come from the objective itself, evaluated on no token at all, so that ranks of
    the other pipeline stages know them without being told.
    """

    def __init__(self, objective: Objective, with_staleness: bool, where: torch.device) -> None:
        self._objective = objective
        none = torch.empty(0, device=where)
        empty = ObjectiveInputs(
            logprobs=none,
            behav_logprobs=none,
            prox_logprobs=none,
            advantages=none,
            loss_weights=none,
            mask=none.bool(),
            entropy=none,
            staleness=none.long() if with_staleness else None,
        )
        self._names = sorted(objective(empty).sums)
        self._values = torch.zeros(1 + len(self._names), dtype=torch.float64, device=where)

    def add(self, inputs: ObjectiveInputs) -> torch.Tensor:
        """Evaluate the objective and return its loss, with its graph."""
        output = self._objective(inputs)
        sums = [output.sums[name] for name in self._names]
        self._values += torch.stack([output.loss.detach().double(), *sums])
        return output.loss

    def reduce(self) -> tuple[float, dict[str, float]]:
        """The loss and the sums of the global batch, on every rank.

        Each pipeline's last stage holds its part and the other stages zero, so a sum over the pipeline
        broadcasts it.
        """
        groups = (
            mpu.get_pipeline_model_parallel_group(),
            mpu.get_data_parallel_group(with_context_parallel=True),
        )
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(self._values, group=group)
        loss, *sums = self._values.tolist()
        return loss, dict(zip(self._names, sums, strict=True))
