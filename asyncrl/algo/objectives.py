"""Policy-gradient objectives: tokens of one rank -> its share of the global loss, and metric sums.

    log-ratio (selected by the mask) -> ratio -> token loss -> * correction weight * loss weight -> sum

With ``correction = "none"`` the ratio is current / behaviour: plain PPO, sound only on-policy. Any
other correction *decouples* the two jobs of PPO's old policy (arXiv 2110.00641): the clip is
around the proximal policy (current / proximal), and the weight from proximal to behaviour is a
constant factor without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.algo.corrections import behaviour_log_weights, log_ratio, truncated_is
from asyncrl.algo.inputs import Objective, ObjectiveInputs, ObjectiveOutput
from asyncrl.algo.metrics import Sums, mismatch_sums
from asyncrl.config import AlgorithmConfig


def build_objective(config: AlgorithmConfig) -> Objective:
    """The objective that a configuration describes."""
    clip = Clip(config.clip_low, config.clip_high, config.clip_dual)

    def objective(inputs: ObjectiveInputs) -> ObjectiveOutput:
        return _evaluate(config, clip, inputs)

    return objective


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds on the ratio: [1 - low, 1 + high]; ``dual`` bounds the loss of negative advantages."""

    low: float
    high: float
    dual: float | None = None


def ppo_clip_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip: Clip) -> torch.Tensor:
    """max(-r A, -clip(r) A) per token, [t]: PPO, arXiv 1707.06347; low != high: DAPO, arXiv 2503.14476.

    With ``clip.dual = c`` the loss of a negative advantage is at most -c A, so that one token which
    became much likelier cannot dominate the step: dual-clip PPO, arXiv 1912.09729.
    """
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)
    if clip.dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -clip.dual * advantages), loss)


def _evaluate(config: AlgorithmConfig, clip: Clip, inputs: ObjectiveInputs) -> ObjectiveOutput:
    mask = inputs.mask
    decoupled = config.correction != "none"
    anchor = inputs.prox_logprobs if decoupled else inputs.behav_logprobs
    ratio = log_ratio(inputs.logprobs, anchor.detach(), mask).exp()
    advantages = torch.where(mask, inputs.advantages, 0.0)
    loss_weights = torch.where(mask, inputs.loss_weights, 0.0)
    weights = correction_weights(config, inputs)
    token_loss = ppo_clip_loss(ratio, advantages, clip)
    loss = (loss_weights * weights * token_loss).sum()
    sums = {
        "loss": loss.detach().double(),
        **_ratio_sums(ratio.detach(), advantages, mask, clip),
        **_correction_sums(config, weights, mask),
        **mismatch_sums(inputs),
    }
    return ObjectiveOutput(loss, sums)


def correction_weights(config: AlgorithmConfig, inputs: ObjectiveInputs) -> torch.Tensor:
    """The factor from proximal to behaviour policy per token, [t] float32, no gradient."""
    log_weights = behaviour_log_weights(inputs)
    if config.correction == "none":
        return torch.ones_like(log_weights)
    return truncated_is(log_weights, config.is_cap)


def _ratio_sums(ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, clip: Clip) -> Sums:
    """Tokens whose gradient the clip removed, by side; ratio and advantages are neutral outside the mask."""
    sums = {
        "ratio": torch.where(mask, ratio, 0.0).double().sum(),
        "clipped_low": ((ratio < 1 - clip.low) & (advantages < 0)).sum(),
        "clipped_high": ((ratio > 1 + clip.high) & (advantages > 0)).sum(),
        "clipped_dual": torch.zeros_like(mask).sum(),
    }
    if clip.dual is not None:
        sums["clipped_dual"] = ((ratio > clip.dual) & (advantages < 0)).sum()
    return {name: total.double() for name, total in sums.items()}


def _correction_sums(config: AlgorithmConfig, weights: torch.Tensor, mask: torch.Tensor) -> Sums:
    truncated = mask & (weights >= config.is_cap) if config.correction == "truncated_is" else mask & False
    return {
        "correction_weight": torch.where(mask, weights, 0.0).double().sum(),
        "truncated": truncated.sum().double(),
        "rejected": (mask & (weights == 0)).sum().double(),
    }
