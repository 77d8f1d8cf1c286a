"""Scores finished trajectories and watches how often the reward itself fails.

A reward that fails never becomes a 0: the sample's group is dropped and counted, and above the permitted
rate the run stops with the last failure in its message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.rewards.base import Reward
from asyncrl.rollout.waiting import RolloutError, within
from asyncrl.types import Prompt

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, without special tokens."""

WINDOW = 256
"""How many of the latest rewards the error rate is taken over."""
MIN_REWARDS = 16
"""Below this many rewards a rate says nothing."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A finite score with its parts; where ``error`` is set there is none, and both are empty."""

    score: float
    parts: Mapping[str, float]
    error: str | None = None


class ErrorRate:
    """The share of failures among the latest rewards."""

    def __init__(self, max_rate: float) -> None:
        self._max_rate = max_rate
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._last_error: str | None = None
        self.num_errors = 0

    @property
    def rate(self) -> float:
        return sum(self._failed) / len(self._failed) if self._failed else 0.0

    def add(self, error: str | None) -> None:
        """Raises RolloutError when the rate exceeds its maximum."""
        self._failed.append(error is not None)
        if error is not None:
            self._last_error = error
            self.num_errors += 1
        if len(self._failed) >= MIN_REWARDS and self.rate > self._max_rate:
            raise RolloutError(
                f"the reward failed for {self.rate:.0%} of the last {len(self._failed)} samples, more than"
                f" reward.max_error_rate = {self._max_rate:g}; the last failure: {self._last_error}"
            )


async def score(
    reward: Reward, prompt: Prompt, completion: str, token_ids: tuple[int, ...], timeout_s: float
) -> Scored:
    """The reward of one completion; a score that is not finite counts as a failure.

    Raises:
        RolloutError: the reward did not even fail within ``timeout_s``.
    """
    outcome = await within(
        timeout_s,
        reward.score(prompt, completion, token_ids),
        lambda: f"the reward of prompt {prompt.prompt_idx}",
    )
    if outcome.score is None:
        return Scored(0.0, {}, f"prompt {prompt.prompt_idx}: {outcome.error}")
    if not math.isfinite(outcome.score):
        return Scored(0.0, {}, f"the reward of prompt {prompt.prompt_idx} is {outcome.score}")
    return Scored(float(outcome.score), dict(outcome.parts))
