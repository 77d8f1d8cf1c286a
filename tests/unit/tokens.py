"""Random `ObjectiveInputs` for the tests of `algo`, and their selection by token."""

from __future__ import annotations

import dataclasses

import torch

from asyncrl.algo.inputs import ObjectiveInputs


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
    )


def select(inputs: ObjectiveInputs, index: slice | torch.Tensor) -> ObjectiveInputs:
    """The same tokens, cut; the current logprobs stay attached to the original's graph."""
    tensors = {
        field.name: None if (value := getattr(inputs, field.name)) is None else value[index]
        for field in dataclasses.fields(inputs)
    }
    return ObjectiveInputs(**tensors)
