"""Correction for tokens that were sampled by another policy than the one that is updated.

    behaviour logprobs (engine), proximal logprobs (trainer) -> weight per token -> 0 where rejected

Two independent choices: `importance_weights` says how much a token counts, `accepted` which tokens are
too far off to count at all. Invariants: neither carries a gradient (a weight inside the graph would be
a second, unintended policy-gradient term); a rejected token has weight 0 and the loss's denominator
does not change.
"""

from __future__ import annotations

import torch

from asyncrl.algo.inputs import ObjectiveInputs
from asyncrl.config import AlgorithmConfig

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


def correction_weights(config: AlgorithmConfig, inputs: ObjectiveInputs) -> torch.Tensor:
    """The factor on each token's loss, [t] float32 without gradient: its weight, 0 where rejected."""
    weights = importance_weights(config, inputs)
    return torch.where(accepted(config, inputs), weights, 0.0)


def importance_weights(config: AlgorithmConfig, inputs: ObjectiveInputs) -> torch.Tensor:
    """How much each token counts, [t] float32 >= 0.

    ``truncated_is``: min(prox / behav, cap) of the token (IMPALA, arXiv 1802.01561; for LLMs AReaL, arXiv
    2505.24298). ``sequence_truncated_is``: the same of the whole sample, min(prod prox / behav, cap):
    unbiased up to the cap, of larger variance. ``none``: 1.
    """
    log_weights = behaviour_log_weights(inputs)
    if config.correction == "none":
        return torch.ones_like(log_weights)
    if config.correction == "sequence_truncated_is":
        segments = inputs.required_segments('algorithm.correction = "sequence_truncated_is"')
        # The sum is clamped, not its terms: the ratio is exp of the sum, and only then truncated.
        of_samples = segments.sums(log_weights).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_weights = segments.spread(of_samples).to(log_weights.dtype)
    return log_weights.exp().clamp(max=config.is_cap)


def accepted(config: AlgorithmConfig, inputs: ObjectiveInputs) -> torch.Tensor:
    """Which tokens are close enough to the behaviour policy, [t] bool.

    ``token``: prox / behav of the token within [reject_low, reject_high] (IcePop, arXiv 2510.18855).
    ``geometric``: the geometric mean of prox / behav over the sample within the same bounds, so that
    length does not matter (as ``sequence_truncated_is`` does not have it). ``off_policy_sequence``:
    all samples but those with a negative advantage whose mean log(behav / current) exceeds reject_kl
    (DeepSeek-V3.2, arXiv 2512.02556). ``none``: all.
    """
    if config.rejection == "none":
        return torch.ones_like(inputs.mask)
    log_weights = behaviour_log_weights(inputs)
    if config.rejection == "token":
        return _within(log_weights.exp(), config)
    segments = inputs.required_segments(f'algorithm.rejection = "{config.rejection}"')
    if config.rejection == "geometric":
        means = segments.means(log_weights, inputs.mask)
        return segments.spread(_within(means.exp(), config))
    drift = log_ratio(inputs.behav_logprobs.detach(), inputs.logprobs.detach(), inputs.mask)
    too_far = segments.means(drift, inputs.mask) > config.reject_kl
    return ~(segments.spread(too_far) & (inputs.advantages < 0))


def _within(weights: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    return (weights >= config.reject_low) & (weights <= config.reject_high)
