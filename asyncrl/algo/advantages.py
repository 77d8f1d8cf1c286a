"""Advantages from the rewards of one sample group: pure float64 functions, [n] rewards -> [n] advantages.

Every sample carries the rewards of its whole group, so any rank computes the advantage of its
samples alone, without its siblings and without communication:

    advantage = compute_advantages("grpo", sample.group_rewards)[sample.sample_idx]

Invariants: group advantages sum to zero; a group whose rewards (nearly) agree has advantage exactly
zero everywhere, because dividing rounding noise by its own standard deviation would make it a
full-sized learning signal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Rewards = Sequence[float] | npt.NDArray[np.float32] | npt.NDArray[np.float64]
Advantages = npt.NDArray[np.float64]

ZERO_RANGE = 1e-6
"""Relative to the largest reward: a group whose rewards differ by less has no signal (float32 rewards
resolve 6e-8 of their size)."""


def compute_advantages(kind: str, group_rewards: Rewards) -> Advantages:
    """The advantage of every sample of a group.

    Args:
        kind: a key of `ADVANTAGES`.
        group_rewards: [n], n >= 1, finite.

    Returns:
        [n] float64, in sample order.

    Raises:
        ValueError: unknown kind, an empty group, or a reward that is not finite.
    """
    if kind not in ADVANTAGES:
        raise ValueError(f"unknown advantage {kind!r}; use one of {', '.join(ADVANTAGES)}")
    rewards = np.asarray(group_rewards, np.float64)
    if rewards.ndim != 1 or not len(rewards):
        raise ValueError(f"group_rewards has shape {rewards.shape}; give the n >= 1 rewards of one group")
    if not np.isfinite(rewards).all():
        raise ValueError(f"group_rewards = {rewards.tolist()}: every reward must be finite")
    if has_no_signal(rewards):
        return np.zeros_like(rewards)
    return ADVANTAGES[kind](rewards)


def has_no_signal(rewards: Rewards) -> bool:
    """Whether the rewards of a group agree up to rounding; such a group teaches nothing."""
    values = np.asarray(rewards, np.float64)
    scale = max(1.0, float(np.abs(values).max()))
    return float(values.max() - values.min()) < ZERO_RANGE * scale


def _grpo(rewards: Advantages) -> Advantages:
    """(r - mean) / std with the unbiased (n - 1) standard deviation: DeepSeekMath, arXiv 2402.03300."""
    return _dr_grpo(rewards) / float(rewards.std(ddof=1))


def _dr_grpo(rewards: Advantages) -> Advantages:
    """r - mean: Dr. GRPO, arXiv 2503.20783; the division above favours groups of near-equal rewards."""
    return rewards - float(rewards.mean())


def _rloo(rewards: Advantages) -> Advantages:
    """r_i - mean of the others = n / (n - 1) * (r_i - mean): RLOO, arXiv 2402.14740."""
    num_samples = len(rewards)
    return _dr_grpo(rewards) * (num_samples / (num_samples - 1))


ADVANTAGES: dict[str, Callable[[Advantages], Advantages]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
}
"""Each is given rewards that differ, hence n >= 2."""
