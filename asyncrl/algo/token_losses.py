"""What a token costs, given its ratio to the policy that it is clipped around: [t] tensors in and out.

Every loss has the same gradient, -advantage, at a ratio of 1; they differ in how it fades away from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds on the ratio: [1 - low, 1 + high]; ``dual`` bounds the loss of negative advantages."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True, slots=True)
class ClippedTokens:
    """Which tokens' gradient a loss removed (or, in CISPO, bounded), by reason; [t] bool each."""

    low: torch.Tensor
    high: torch.Tensor
    dual: torch.Tensor


def ppo_clip_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip: Clip) -> torch.Tensor:
    """max(-r A, -clip(r) A): PPO, arXiv 1707.06347; with low != high DAPO, arXiv 2503.14476.

    With ``clip.dual = c`` the loss of a negative advantage is at most -c A, so that one token which
    became much likelier cannot dominate the step: dual-clip PPO, arXiv 1912.09729.
    """
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)
    if clip.dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -clip.dual * advantages), loss)


def ppo_clipped(ratio: torch.Tensor, advantages: torch.Tensor, clip: Clip) -> ClippedTokens:
    """The tokens on the flat side of `ppo_clip_loss`."""
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return ClippedTokens(
        low=(ratio < 1 - clip.low) & (advantages < 0),
        high=(ratio > 1 + clip.high) & (advantages > 0),
        dual=nothing if clip.dual is None else (ratio > clip.dual) & (advantages < 0),
    )


def cispo_loss(
    ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, clip: Clip
) -> torch.Tensor:
    """-stop_grad(clip(r)) A logprob: every token keeps a gradient, of bounded weight.

    CISPO, MiniMax-M1, arXiv 2506.13585.
    """
    return -ratio.detach().clamp(1 - clip.low, 1 + clip.high) * advantages * logprobs


def cispo_clipped(ratio: torch.Tensor, advantages: torch.Tensor, clip: Clip) -> ClippedTokens:
    """The tokens whose weight `cispo_loss` bounded."""
    acts = advantages != 0
    nothing = torch.zeros_like(acts)
    return ClippedTokens(low=(ratio < 1 - clip.low) & acts, high=(ratio > 1 + clip.high) & acts, dual=nothing)


def sapo_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, tau_positive: float, tau_negative: float
) -> torch.Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate instead of a clip.

    SAPO, arXiv 2511.20347; the paper's tau are 1.0 and 1.05.
    """
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
