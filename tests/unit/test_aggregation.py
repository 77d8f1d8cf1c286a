"""Loss weights: they sum to 1 over the global batch however it is cut."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algo.aggregation import Aggregation, BatchCounts, token_weight

COUNTS = st.lists(st.integers(0, 500), min_size=1, max_size=32).filter(any)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@given(counts=COUNTS, cut=st.integers(0, 32))
def test_weights_sum_to_one_over_any_cut(aggregation: Aggregation, counts: list[int], cut: int) -> None:
    batch = BatchCounts.of(counts[:cut]) + BatchCounts.of(counts[cut:])
    assert batch == BatchCounts.of(counts)
    weights = [token_weight(aggregation, batch, count, constant_tokens=1) for count in counts]
    assert math.isclose(sum(weight * count for weight, count in zip(weights, counts, strict=True)), 1.0)


def test_values_written_out() -> None:
    batch = BatchCounts.of([10, 30, 0])
    assert batch == BatchCounts(num_samples=2, num_tokens=40)
    assert token_weight("token_mean", batch, 10, constant_tokens=100) == 1 / 40
    assert token_weight("sequence_mean", batch, 10, constant_tokens=100) == 1 / 20
    assert token_weight("sequence_mean", batch, 30, constant_tokens=100) == 1 / 60
    assert token_weight("constant", batch, 30, constant_tokens=100) == 1 / 200
    assert token_weight("token_mean", batch, 0, constant_tokens=100) == 0.0


def test_local_counts_are_refused_where_they_show() -> None:
    with pytest.raises(ValueError, match="add the counts of every rank first"):
        token_weight("token_mean", BatchCounts.of([3]), 10, constant_tokens=1)
