"""Advantages against sums written out by hand, and their invariants."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo.advantages import ADVANTAGES, compute_advantages, has_no_signal

REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


def reference(kind: str, rewards: list[float]) -> list[float]:
    """Plain Python, one sample at a time."""
    if max(rewards) - min(rewards) < 1e-6 * max(1.0, *map(abs, rewards)):
        return [0.0] * len(rewards)
    result = []
    for idx, reward in enumerate(rewards):
        others = rewards[:idx] + rewards[idx + 1 :]
        centred = reward - statistics.fmean(rewards)
        if kind == "grpo":
            result.append(centred / statistics.stdev(rewards))
        elif kind == "dr_grpo":
            result.append(centred)
        else:
            result.append(reward - statistics.fmean(others))
    return result


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
@settings(max_examples=150, deadline=None)
@given(rewards=REWARDS)
def test_against_reference(kind: str, rewards: list[float]) -> None:
    got = compute_advantages(kind, rewards)
    expected = reference(kind, rewards)
    for idx, (left, right) in enumerate(zip(got, expected, strict=True)):
        assert math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-7), (
            f"{kind}: first mismatch at sample {idx}"
        )
    assert abs(got.sum()) < 1e-6 * max(1.0, np.abs(got).max())


def test_values_written_out() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(compute_advantages("grpo", rewards), [1.5, -0.5, -0.5, -0.5])
    np.testing.assert_allclose(compute_advantages("dr_grpo", rewards), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(compute_advantages("rloo", rewards), [1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("kind", sorted(ADVANTAGES))
def test_a_group_that_agrees_has_no_advantage(kind: str) -> None:
    for rewards in ([1.0] * 4, [0.7], [1e6, 1e6 + 0.01]):
        assert has_no_signal(rewards)
        assert compute_advantages(kind, np.asarray(rewards, np.float64)).tolist() == [0.0] * len(rewards)


def test_dtype_is_float64_whatever_comes_in() -> None:
    assert compute_advantages("grpo", np.asarray([1, 0], np.float32)).dtype == np.float64


@pytest.mark.parametrize(
    ("kind", "rewards", "message"),
    [
        ("ppo", [1.0, 0.0], "unknown advantage 'ppo'; use one of grpo"),
        ("grpo", [], "give the n >= 1 rewards"),
        ("grpo", [1.0, math.nan], "every reward must be finite"),
    ],
)
def test_errors(kind: str, rewards: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_advantages(kind, rewards)
