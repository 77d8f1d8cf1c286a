"""Diagnostics of one step: sums per rank and micro-batch, means of their totals, alarms on the means.

    ObjectiveInputs -> mismatch_sums -> (plain sum over micro-batches and ranks) -> summarize -> alarms

Invariants: everything that crosses ranks is a sum with its count, never a mean; sums are float64
(float32 counts stop at 2**24 tokens); second moments are taken about 1, where the ratios live, so
that nothing cancels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.algo.corrections import behaviour_log_weights
from asyncrl.algo.inputs import ObjectiveInputs

Sums = dict[str, torch.Tensor]

TAIL_LOG_RATIOS = {"tail_010": 0.1, "tail_050": 0.5, "tail_200": 2.0}
"""Tokens with |log(prox / behav)| above this are counted: the mean hides a broken few."""


def mismatch_sums(inputs: ObjectiveInputs) -> Sums:
    """How far the behaviour policy is from the proximal one at the same tokens, and the entropy.

    The estimators of KL(behaviour || proximal) on behaviour samples, with w = prox / behav: k1 = -log w,
    k2 = (log w)^2 / 2, k3 = w - 1 - log w (Schulman, "Approximating KL divergence", 2020).
    """
    mask = inputs.mask
    log_weights = behaviour_log_weights(inputs).double()
    excess = torch.expm1(log_weights)  # w - 1 without cancellation; 0 outside the mask
    k3 = excess - log_weights
    fresh = mask if inputs.staleness is None else mask & (inputs.staleness == 0)
    known = inputs.staleness is not None
    sums = {
        "tokens": mask.sum(),
        "mismatch_k1": -log_weights.sum(),
        "mismatch_k2": log_weights.square().sum() / 2,
        "mismatch_k3": k3.sum(),
        "abs_log_ratio": log_weights.abs().sum(),
        "is_excess": excess.sum(),
        "is_excess_squared": excess.square().sum(),
        "fresh_tokens": fresh.sum() * known,
        "fresh_k3": torch.where(fresh, k3, 0.0).sum() * known,
        **{name: (log_weights.abs() > bound).sum() for name, bound in TAIL_LOG_RATIOS.items()},
        **_entropy_sums(inputs),
    }
    return {name: total.detach().double() for name, total in sums.items()}


def _entropy_sums(inputs: ObjectiveInputs) -> Sums:
    if inputs.entropy is None:
        zero = torch.zeros((), dtype=torch.float64, device=inputs.mask.device)
        return {"entropy": zero, "entropy_tokens": zero}
    entropy = torch.where(inputs.mask, inputs.entropy, 0.0).double()
    return {"entropy": entropy.sum(), "entropy_tokens": inputs.mask.sum()}


_COUNT_OF = {
    "mismatch_k1": "tokens",
    "mismatch_k2": "tokens",
    "mismatch_k3": "tokens",
    "abs_log_ratio": "tokens",
    "ratio": "tokens",
    "clipped_low": "tokens",
    "clipped_high": "tokens",
    "clipped_dual": "tokens",
    "truncated": "tokens",
    "rejected": "tokens",
    "correction_weight": "tokens",
    **dict.fromkeys(TAIL_LOG_RATIOS, "tokens"),
    "fresh_k3": "fresh_tokens",
    "entropy": "entropy_tokens",
}
"""Each sum and the sum that divides it into a mean."""


def summarize(totals: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step from the sums of every micro-batch and rank.

    Returns:
        ``loss``, ``tokens``, the mean of every sum that has tokens, and of the raw weights w = prox /
        behav: ``is_mean``; ``is_mean_z``, how many standard errors the mean is from 1 (w - 1 are
        martingale differences when the samples really come from the behaviour policy, whatever
        the staleness); ``ess``, the effective sample size (sum w)^2 / (tokens * sum w^2).
    """
    metrics = {name: totals[name] for name in ("loss", "tokens") if name in totals}
    for name, count_name in _COUNT_OF.items():
        if name in totals and totals[count_name] > 0:
            metrics[name] = totals[name] / totals[count_name]
    num_tokens = totals["tokens"]
    if num_tokens > 0:
        excess, squared = totals["is_excess"], totals["is_excess_squared"]
        mean_excess = excess / num_tokens
        sum_of_squares = num_tokens + 2 * excess + squared
        variance = max(squared / num_tokens - mean_excess**2, 0.0)
        standard_error = math.sqrt(variance / num_tokens)
        metrics["is_mean"] = 1 + mean_excess
        metrics["is_mean_z"] = mean_excess / standard_error if standard_error > 0 else 0.0
        metrics["ess"] = (num_tokens + excess) ** 2 / (num_tokens * sum_of_squares)
    return metrics


@dataclass(frozen=True, slots=True)
class Alarm:
    """A diagnostic out of bounds; ``stop`` means that training on would learn from wrong numbers."""

    level: Literal["warn", "stop"]
    message: str


def alarms(metrics: Mapping[str, float], *, initial_entropy: float | None) -> tuple[Alarm, ...]:
    """What is wrong with the metrics of a step, most severe first; empty when nothing is.

    Args:
        metrics: from `summarize`.
        initial_entropy: the mean entropy at the first step, None when it is not measured.
    """
    found = [*_mismatch_alarms(metrics), *_weight_alarms(metrics)]
    if initial_entropy is not None and "entropy" in metrics and metrics["entropy"] < 0.2 * initial_entropy:
        found.append(
            Alarm(
                "warn",
                f"entropy {metrics['entropy']:.3g} is below 20% of its start, {initial_entropy:.3g}:"
                " the policy is collapsing; lower train.lr or raise algorithm.clip_high",
            )
        )
    return tuple(sorted(found, key=lambda alarm: alarm.level != "stop"))


def _mismatch_alarms(metrics: Mapping[str, float]) -> list[Alarm]:
    """Same version, same token: engine and trainer must agree up to rounding."""
    k3 = metrics.get("fresh_k3", 0.0)
    if k3 <= 1e-3:
        return []
    return [
        Alarm(
            "stop" if k3 > 1e-2 else "warn",
            f"engine and trainer disagree at the same policy version: k3 = {k3:.2e}"
            " (warn above 1e-3, stop above 1e-2); compare their dtypes, or run with weights.verify = true",
        )
    ]


def _weight_alarms(metrics: Mapping[str, float]) -> list[Alarm]:
    found = []
    spread = math.exp(metrics.get("abs_log_ratio", 0.0))
    if spread > 1.05:
        found.append(
            Alarm(
                "warn",
                f"exp(mean |log(prox / behav)|) = {spread:.3f} exceeds 1.05; lower rollout.max_staleness",
            )
        )
    ess = metrics.get("ess", 1.0)
    if ess < 0.3:
        found.append(
            Alarm(
                "warn",
                f"the effective sample size of the raw importance weights is {ess:.2f} of the tokens"
                " (below 0.3); lower rollout.max_staleness or train.lr",
            )
        )
    z = metrics.get("is_mean_z", 0.0)
    if abs(z) > 3:
        found.append(
            Alarm(
                "warn",
                f"the mean of prox / behav is {metrics['is_mean']:.4f}, {abs(z):.1f} standard errors from 1:"
                " a temperature, shift or version bug, not staleness",
            )
        )
    return found
