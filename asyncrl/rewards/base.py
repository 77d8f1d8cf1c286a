"""What a reward is: text and token ids of one completion in, one `RewardResult` out.

A reward that fails gives ``score=None`` and the reason. It is never a silent 0: the sample is masked,
the error counted, and above ``reward.max_error_rate`` the run stops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.types import Prompt


class RewardError(ValueError):
    """The reward cannot be used at all; the message says where and why."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The verdict on one completion; ``score`` is None exactly where ``error`` is set."""

    score: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    def __post_init__(self) -> None:
        if (self.score is None) != (self.error is not None):
            raise ValueError(f"score {self.score} with error {self.error!r}: exactly one must be given")


class Reward(Protocol):
    """One reward function, ready to score; `close` ends its worker, if it has one."""

    async def score(self, prompt: Prompt, completion: str, token_ids: tuple[int, ...]) -> RewardResult: ...

    async def close(self) -> None: ...


def failed(reason: str) -> RewardResult:
    return RewardResult(score=None, error=reason)


def as_result(value: Any) -> RewardResult:
    """Turn what a reward function returned into a result.

    Accepted: a number, a dict with "score" (its other numbers become parts), or a list of one of these.
    """
    if isinstance(value, list | tuple):
        if len(value) != 1:
            return failed(f"returned {len(value)} rewards for one completion")
        return as_result(value[0])
    if isinstance(value, Mapping):
        return _from_mapping(value)
    if value is None:
        return failed("returned None, no reward for this sample")
    if not isinstance(value, int | float):
        return failed(f"returned {type(value).__name__}, expected a number or a dict with 'score'")
    if not math.isfinite(value):
        return failed(f"returned {value}, which is not finite")
    return RewardResult(float(value))


def _from_mapping(value: Mapping[Any, Any]) -> RewardResult:
    if "score" not in value:
        return failed(f"returned a dict without 'score': {', '.join(map(str, value))}")
    result = as_result(value["score"])
    if result.score is None:
        return result
    parts = {
        str(key): float(part)
        for key, part in value.items()
        if key != "score" and isinstance(part, int | float) and math.isfinite(part)
    }
    return RewardResult(result.score, parts)
