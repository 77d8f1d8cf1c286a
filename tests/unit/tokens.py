"""Random `ObjectiveInputs` for the tests of `algo`, and their selection by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from asyncrl.algo.inputs import ObjectiveInputs, Segments


def random_segments(num_tokens: int) -> Segments:
    """Samples of unequal lengths 1, 2, 3, ..., the last one cut."""
    num_samples, ends = 0, 0
    while ends < num_tokens:
        num_samples += 1
        ends += num_samples
    lengths = torch.arange(1, num_samples + 1)
    return Segments(torch.arange(num_samples).repeat_interleave(lengths)[:num_tokens], num_samples)


def random_inputs(
    num_tokens: int, *, seed: int = 0, spread: float = 0.5, masked: float = 0.3
) -> ObjectiveInputs:
    """Tokens with logprobs that differ by about ``spread`` and a share ``masked`` outside the mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(num_tokens, generator=generator) * scale

    behav = -normal(1.0).abs() - 0.1
    prox = behav + normal(spread)
    mask = torch.rand(num_tokens, generator=generator) >= masked
    return ObjectiveInputs(
        logprobs=(prox + normal(spread)).requires_grad_(),
        behav_logprobs=behav,
        prox_logprobs=prox,
        advantages=normal(1.0),
        loss_weights=mask / mask.sum().clamp(min=1),
        mask=mask,
        entropy=normal(1.0).abs(),
        segments=random_segments(num_tokens),
    )


def select(
    inputs: ObjectiveInputs,
    index: slice | torch.Tensor,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> ObjectiveInputs:
    """The same tokens, cut; the current logprobs stay attached to the original's graph."""
    tensors: dict[str, Any] = {
        field.name: value[index]
        for field in dataclasses.fields(inputs)
        if isinstance(value := getattr(inputs, field.name), torch.Tensor)
    }
    if inputs.segments is not None:
        segments = dataclasses.replace(inputs.segments, sample_idx=inputs.segments.sample_idx[index])
        if sum_over_ranks is not None:
            segments = dataclasses.replace(segments, sum_over_ranks=sum_over_ranks)
        tensors["segments"] = segments
    return ObjectiveInputs(**tensors)
