"""Rewards that need no user code: the last number, an exact match.

Both are cheap and cannot hang, so they run in place. Numbers are compared as decimals: "5.0", "+5"
and "5" are the same answer, "1,000" is a thousand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from asyncrl.rewards.base import RewardResult, failed
from asyncrl.types import Prompt

# A sign belongs to the number only where no digit or letter stands before it: "3-4" ends in 4.
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?|\d[\d,]*(?:\.\d+)?")


def last_number(completion: str, answer: Any) -> float:
    """1 if the last number in ``completion`` equals ``answer``, 0 otherwise.

    Raises:
        ValueError: ``answer`` is not a number.
    """
    expected = _decimal(str(answer).strip())
    if expected is None:
        raise ValueError(f"the row's answer {answer!r} is not a number")
    numbers = NUMBER.findall(completion)
    return float(bool(numbers) and _decimal(numbers[-1]) == expected)


def exact_match(completion: str, answer: Any) -> float:
    """1 if ``completion`` is ``answer`` but for surrounding white space, 0 otherwise."""
    return float(completion.strip() == str(answer).strip())


def _decimal(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


class BuiltinReward:
    """A pure function of completion and answer as a `Reward`."""

    def __init__(self, function: Callable[[str, Any], float]) -> None:
        self._function = function

    async def score(self, prompt: Prompt, completion: str, token_ids: tuple[int, ...]) -> RewardResult:
        answer = prompt.row.get("answer")
        if answer is None:
            return failed("the row has no answer to compare with")
        try:
            return RewardResult(self._function(completion, answer))
        except ValueError as error:
            return failed(str(error))

    async def close(self) -> None:
        """Nothing runs."""


BUILTIN: dict[str, Callable[[str, Any], float]] = {"last_number": last_number, "exact_match": exact_match}
