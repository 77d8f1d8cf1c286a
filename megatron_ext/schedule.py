"""Micro-batches through megatron's pipeline schedules.

    MicroBatch -> this rank's entries -> model chunks -> logprobs of the scored entries -> a callback

megatron runs one schedule for every layout; each micro-batch is a flat run of entries whose number may
differ, so stages tell each other the shapes. The schedule itself divides nothing (per-token loss).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.attention import PackedParams, gathered_key_order, make_masks, make_spans
from megatron_ext.packing import MicroBatch, zigzag_indices
from megatron_ext.parallel import ParallelLayout
from megatron_ext.rope import rotary_tables


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """The part of a micro-batch that this rank's context-parallel rank computes, on its device."""

    micro_batch: MicroBatch
    entries: torch.Tensor  # int64 [t], on the CPU: index of each local entry in the micro-batch
    scored: torch.Tensor  # int64 [m], on the CPU: index in the micro-batch of each scored entry
    token_ids: torch.Tensor  # int64 [1, t]
    params: PackedParams


# Given the micro-batch's index, its part, and (logprobs, entropy) of its m scored entries -> loss, 0-d.
ScoreLoss = Callable[[int, LocalBatch, torch.Tensor, torch.Tensor], torch.Tensor]


def localize(
    micro_batch: MicroBatch,
    layout: ParallelLayout,
    frequencies: torch.Tensor,
    device: torch.device,
    temperature: float,
) -> LocalBatch:
    """Cut out this context-parallel rank's part and what attention and the head need to know of it."""
    cp_rank = mpu.get_context_parallel_rank()
    entries = zigzag_indices(micro_batch.cu_seqlens, layout.cp, cp_rank)
    scored = micro_batch.loss_mask[entries].nonzero().squeeze(1)
    spans = make_spans(micro_batch.segments, layout.cp, cp_rank)
    cos, sin = rotary_tables(frequencies, micro_batch.positions[entries])
    key_order = gathered_key_order(micro_batch.cu_seqlens, layout.cp).to(device) if layout.cp > 1 else None
    return LocalBatch(
        micro_batch=micro_batch,
        entries=entries,
        scored=entries[scored],
        token_ids=micro_batch.token_ids[entries].unsqueeze(0).to(device),
        params=PackedParams(
            qkv_format="thd",
            cos=cos.to(device),
            sin=sin.to(device),
            spans=spans,
            segment_sizes=tuple(segment.stop - segment.start for segment in micro_batch.segments),
            masks=make_masks(spans, device),
            key_order=key_order,
            scored=scored.to(device),
            labels=micro_batch.labels[entries[scored]].to(device),
            temperature=temperature,
        ),
    )


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[LocalBatch],
    score_loss: ScoreLoss,
    layout: ParallelLayout,
    *,
    forward_only: bool,
) -> None:
    """Run every micro-batch forward (and backward from the loss that ``score_loss`` returns).

    ``score_loss`` is called on last-stage ranks only, once per micro-batch.

    Raises:
        ValueError: the interleaved schedule needs a multiple of PP micro-batches.
    """
    if layout.vpp > 1 and len(batches) % layout.pp:
        raise ValueError(
            f"{len(batches)} micro-batches under vpp {layout.vpp}: give a multiple of pp = {layout.pp}"
        )
    iterators = [iter(enumerate(batches)) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=_forward_step(score_loss),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=1,  # unused: stages exchange the real shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _forward_step(score_loss: ScoreLoss) -> Callable[..., Any]:
    def forward_step(batches: Iterator[tuple[int, LocalBatch]], chunk: torch.nn.Module) -> Any:
        batch_idx, batch = next(batches)
        output = chunk(batch.token_ids, None, None, packed_seq_params=batch.params)

        def loss_func(scores: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, None]:
            loss = score_loss(batch_idx, batch, *scores)
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), None

        return output, loss_func

    return forward_step
