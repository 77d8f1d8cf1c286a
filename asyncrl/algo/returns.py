"""Advantages from more than one group: GAE with a critic, and normalisation over the global batch.

    rewards, values of a sample -> gae -> [T]
    advantages of this rank -> Moments -> (added over ranks) -> whiten -> [n]

Float64 throughout. Moments are merged about their own means, never as E[x^2] - E[x]^2, which in
float32 loses everything when the mean is large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from asyncrl.algo.advantages import ZERO_RANGE

Floats = npt.NDArray[np.float64]


def gae(rewards: Floats, values: Floats, *, gamma: float, lam: float) -> Floats:
    """Generalised advantage estimation (arXiv 1506.02438) of one sample that ends after its last token.

    Args:
        rewards: [T], of each token; most often 0 but for the last.
        values: [T], the critic's value before each token.
        gamma: discount of a later reward, in [0, 1].
        lam: 1 trusts the rewards alone, 0 the critic alone.

    Returns:
        [T], A_t = sum over k of (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), V after the end 0.
    """
    if rewards.shape != values.shape:
        raise ValueError(f"{rewards.shape} rewards for {values.shape} values; give one of each per token")
    following = np.append(values[1:], 0.0)[: len(values)]
    errors = rewards + gamma * following - values
    advantages = np.zeros_like(errors)
    later = 0.0
    for idx in reversed(range(len(errors))):
        later = float(errors[idx]) + gamma * lam * later
        advantages[idx] = later
    return advantages


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations; those of parts add up to those of the whole."""

    count: int
    mean: float
    squares: float

    @staticmethod
    def of(values: Floats, counts: npt.NDArray[np.int64] | None = None) -> Moments:
        """Of [n] values, each counted ``counts`` times (once without): an advantage per trained token."""
        weights = np.ones(len(values), np.int64) if counts is None else counts
        count = int(weights.sum())
        if count == 0:
            return Moments(0, 0.0, 0.0)
        mean = float(np.average(values, weights=weights))
        return Moments(count, mean, float((weights * (values - mean) ** 2).sum()))

    def __add__(self, other: Moments) -> Moments:
        """Chan, Golub, LeVeque: updating formulae for computing sample variances, 1979."""
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * other.count / count,
            self.squares + other.squares + delta**2 * self.count * other.count / count,
        )

    @property
    def std(self) -> float:
        """The population's standard deviation, 0 for an empty one."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


def whiten(advantages: Floats, batch: Moments) -> Floats:
    """(a - mean) / std with the moments of the *global* batch: REINFORCE++, arXiv 2501.03262.

    Zero where the whole batch agrees up to rounding. Give it advantages that are already relative to
    their group for the paper's variant with a baseline.
    """
    if batch.std < ZERO_RANGE * max(1.0, abs(batch.mean)):
        return np.zeros_like(advantages)
    whitened: Floats = (advantages - batch.mean) / batch.std
    return whitened
