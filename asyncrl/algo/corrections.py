"""Correction for tokens that were sampled by another policy than the one that is updated.

    behaviour logprobs (engine) , proximal logprobs (trainer) -> one weight per token

Invariants: weights carry no gradient (a weight inside the graph would be a second, unintended
policy-gradient term); a rejected token has weight 0 and the loss's denominator does not change.
"""

from __future__ import annotations

import torch

from asyncrl.algo.inputs import ObjectiveInputs

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-this before exp, so that float32 stays finite (exp(20) = 4.9e8)."""


def log_ratio(of: torch.Tensor, to: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``of - to`` clamped, 0 outside the mask; [t] each.

    The selection comes before any exp: ``exp(nan) * 0`` is nan, and so is its gradient.
    """
    return torch.where(mask, of - to, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def behaviour_log_weights(inputs: ObjectiveInputs) -> torch.Tensor:
    """log(proximal / behaviour) per token, [t] float32 without gradient, 0 outside the mask."""
    return log_ratio(inputs.prox_logprobs.detach(), inputs.behav_logprobs.detach(), inputs.mask)


def truncated_is(log_weights: torch.Tensor, cap: float) -> torch.Tensor:
    """min(prox / behav, cap) per token: IMPALA, arXiv 1802.01561, for LLMs AReaL, arXiv 2505.24298."""
    return log_weights.detach().exp().clamp(max=cap)
