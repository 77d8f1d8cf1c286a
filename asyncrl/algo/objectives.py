"""Policy-gradient objectives: tokens of one rank -> its share of the global loss, and metric sums.

    log-ratio (selected by the mask) -> ratio -> token loss -> * correction weight * loss weight -> sum

With ``correction = "none"`` the ratio is current / behaviour: plain PPO, sound only on-policy. Any
other correction *decouples* the two jobs of PPO's old policy (arXiv 2110.00641): the clip is
around the proximal policy (current / proximal), and the weight from proximal to behaviour is a
constant factor without gradient.
"""

from __future__ import annotations

import torch

from asyncrl.algo.corrections import correction_weights, log_ratio
from asyncrl.algo.inputs import Objective, ObjectiveInputs, ObjectiveOutput
from asyncrl.algo.metrics import Sums, mismatch_sums
from asyncrl.algo.token_losses import (
    Clip,
    ClippedTokens,
    cispo_clipped,
    cispo_loss,
    ppo_clip_loss,
    ppo_clipped,
    sapo_loss,
)
from asyncrl.config import AlgorithmConfig


def build_objective(config: AlgorithmConfig) -> Objective:
    """The objective that a configuration describes."""

    def objective(inputs: ObjectiveInputs) -> ObjectiveOutput:
        return _evaluate(config, inputs)

    return objective


def _evaluate(config: AlgorithmConfig, inputs: ObjectiveInputs) -> ObjectiveOutput:
    mask = inputs.mask
    advantages = torch.where(mask, inputs.advantages, 0.0)
    loss_weights = torch.where(mask, inputs.loss_weights, 0.0)
    ratio = _ratio(config, inputs)
    weights = correction_weights(config, inputs)
    token_loss = _token_loss(config, inputs, ratio, advantages)
    loss = (loss_weights * weights * token_loss).sum()
    sums = {
        "loss": loss.detach().double(),
        "ratio": torch.where(mask, ratio.detach(), 0.0).double().sum(),
        **_clip_sums(_clipped(config, ratio.detach(), advantages)),
        **_correction_sums(config, weights, mask),
        **mismatch_sums(inputs),
    }
    return ObjectiveOutput(loss, sums)


def _ratio(config: AlgorithmConfig, inputs: ObjectiveInputs) -> torch.Tensor:
    """Current over proximal (over behaviour without a correction), [t], 1 outside the mask.

    ``gspo``: the geometric mean over the sample, as a value; the gradient is that of each token's own
    logprob times this value (GSPO-token, arXiv 2507.18071, section 4.3), so nothing has to flow
    between context-parallel ranks.
    """
    anchor = inputs.behav_logprobs if config.correction == "none" else inputs.prox_logprobs
    log_ratios = log_ratio(inputs.logprobs, anchor.detach(), inputs.mask)
    if config.objective == "gspo":
        segments = inputs.required_segments('algorithm.objective = "gspo"')
        of_samples = segments.spread(segments.means(log_ratios, inputs.mask)).to(log_ratios.dtype)
        log_ratios = torch.where(inputs.mask, of_samples + (log_ratios - log_ratios.detach()), 0.0)
    return log_ratios.exp()


def _token_loss(
    config: AlgorithmConfig, inputs: ObjectiveInputs, ratio: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    clip = _clip(config)
    if config.objective == "cispo":
        logprobs = torch.where(inputs.mask, inputs.logprobs, 0.0)
        return cispo_loss(ratio, logprobs, advantages, clip)
    if config.objective == "sapo":
        return sapo_loss(ratio, advantages, config.sapo_tau_positive, config.sapo_tau_negative)
    return ppo_clip_loss(ratio, advantages, clip)


def _clip(config: AlgorithmConfig) -> Clip:
    return Clip(config.clip_low, config.clip_high, config.clip_dual)


def _clipped(config: AlgorithmConfig, ratio: torch.Tensor, advantages: torch.Tensor) -> ClippedTokens:
    """Ratio and advantages are neutral outside the mask, so nothing there counts as clipped."""
    if config.objective == "sapo":
        nothing = torch.zeros_like(ratio, dtype=torch.bool)
        return ClippedTokens(nothing, nothing, nothing)
    clipped = cispo_clipped if config.objective == "cispo" else ppo_clipped
    return clipped(ratio, advantages, _clip(config))


def _clip_sums(clipped: ClippedTokens) -> Sums:
    named = {"clipped_low": clipped.low, "clipped_high": clipped.high, "clipped_dual": clipped.dual}
    return {name: tokens.sum().double() for name, tokens in named.items()}


def _correction_sums(config: AlgorithmConfig, weights: torch.Tensor, mask: torch.Tensor) -> Sums:
    truncated = mask & (weights >= config.is_cap) if config.correction != "none" else mask & False
    return {
        "correction_weight": torch.where(mask, weights, 0.0).double().sum(),
        "truncated": truncated.sum().double(),
        "rejected": (mask & (weights == 0)).sum().double(),
    }
