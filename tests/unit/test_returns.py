"""GAE against its defining sum, moments against numpy over any cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo.returns import Moments, gae, whiten

VALUES = st.lists(st.floats(-10, 10), min_size=0, max_size=12)


@settings(max_examples=100, deadline=None)
@given(values=VALUES, gamma=st.floats(0, 1), lam=st.floats(0, 1), seed=st.integers(0, 99))
def test_gae_against_its_definition(values: list[float], gamma: float, lam: float, seed: int) -> None:
    rewards = np.random.default_rng(seed).normal(size=len(values))
    following = [*values[1:], 0.0]
    expected = [
        sum(
            (gamma * lam) ** (later - idx) * (rewards[later] + gamma * following[later] - values[later])
            for later in range(idx, len(values))
        )
        for idx in range(len(values))
    ]
    got = gae(rewards, np.asarray(values, np.float64), gamma=gamma, lam=lam)
    np.testing.assert_allclose(got, np.asarray(expected, np.float64), atol=1e-9)


def test_gae_at_its_ends() -> None:
    rewards, values = np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.2, 0.7])
    np.testing.assert_allclose(gae(rewards, values, gamma=1.0, lam=1.0), 1.0 - values)
    np.testing.assert_allclose(gae(rewards, values, gamma=1.0, lam=0.0), [-0.3, 0.5, 0.3])
    with pytest.raises(ValueError, match="one of each per token"):
        gae(rewards, values[:2], gamma=1.0, lam=1.0)


@settings(max_examples=100, deadline=None)
@given(values=VALUES, cut=st.integers(0, 12), offset=st.sampled_from([0.0, 1e6]))
def test_moments_of_any_cut(values: list[float], cut: int, offset: float) -> None:
    array = np.asarray(values, np.float64) + offset
    merged = Moments.of(array[:cut]) + Moments.of(array[cut:])
    assert merged.count == len(array)
    if len(array):
        assert merged.mean == pytest.approx(array.mean())
        assert merged.std == pytest.approx(array.std(), abs=1e-6)


def test_moments_by_token_counts() -> None:
    assert Moments.of(np.array([1.0, 3.0]), np.array([3, 1])) == Moments.of(np.array([1.0, 1.0, 1.0, 3.0]))


def test_whitening_has_unit_moments_and_no_noise() -> None:
    values = np.array([1.0, 2.0, 4.0])
    whitened = whiten(values, Moments.of(values))
    assert whitened.mean() == pytest.approx(0.0)
    assert whitened.std() == pytest.approx(1.0)
    agreeing = np.array([0.3, 0.3, 0.3 + 1e-9])
    assert whiten(agreeing, Moments.of(agreeing)).tolist() == [0.0] * 3
