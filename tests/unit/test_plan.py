"""Properties of the step plan over random lengths, and its errors."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.trainer.plan import (
    agree_microbatches,
    count_microbatches,
    pad_multiple,
    padded_length,
    plan_step,
)

BUDGET = 256
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=40)
MULTIPLES = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=300, deadline=None)
@given(lengths=LENGTHS, multiple=MULTIPLES, extra=st.integers(0, 7))
def test_every_sample_once_within_budget_and_agreed_count(
    lengths: list[int], multiple: int, extra: int
) -> None:
    count = count_microbatches(lengths, budget=BUDGET, pad_multiple=multiple) + extra
    plan = plan_step(lengths, budget=BUDGET, pad_multiple=multiple, num_microbatches=count)

    assert sorted(itertools.chain(*plan.micro_batches)) == list(range(len(lengths)))
    assert len(plan.micro_batches) == len(plan.padded_tokens) == count
    for batch, tokens in zip(plan.micro_batches, plan.padded_tokens, strict=True):
        assert tokens == sum(-(-lengths[idx] // multiple) * multiple for idx in batch)
        assert tokens <= BUDGET
    assert plan.num_tokens == sum(lengths)
    assert 0 <= plan.waste < 1
    assert plan == plan_step(lengths, budget=BUDGET, pad_multiple=multiple, num_microbatches=count)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, BUDGET), min_size=1, max_size=8))
def test_count_is_near_the_optimum(lengths: list[int]) -> None:
    """Against the best of all packings, found by trying each sample in each bin."""
    count = count_microbatches(lengths, budget=BUDGET, pad_multiple=1)
    assert _optimal_count(sorted(lengths, reverse=True)) <= count <= _optimal_count(lengths) + 1


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, BUDGET), min_size=1, max_size=40), bins=st.integers(1, 6))
def test_balanced_within_one_sample(lengths: list[int], bins: int) -> None:
    """Greedy: two micro-batches differ by one sample's length at most (any sample moved would not help)."""
    plan = plan_step(lengths, budget=sum(lengths), pad_multiple=1, num_microbatches=bins)
    assert max(plan.padded_tokens) - min(plan.padded_tokens) <= max(lengths)


def test_replicas_with_unequal_lengths_agree() -> None:
    replicas = [[200, 200, 200], [10, 20, 30], []]
    counts = [count_microbatches(lengths, budget=BUDGET, pad_multiple=1) for lengths in replicas]
    agreed = agree_microbatches(counts, multiple_of=1)
    plans = [
        plan_step(lengths, budget=BUDGET, pad_multiple=1, num_microbatches=agreed) for lengths in replicas
    ]
    assert counts == [3, 1, 1]
    assert [len(plan.micro_batches) for plan in plans] == [3, 3, 3]
    assert plans[2].micro_batches == ((), (), ())
    assert plans[2].waste == 0


def test_interleaved_schedule_needs_whole_rounds() -> None:
    assert agree_microbatches([1, 5, 3], multiple_of=2) == 6
    assert agree_microbatches([4], multiple_of=2) == 4


def test_waste_and_imbalance_are_what_they_say() -> None:
    plan = plan_step([5, 3], budget=16, pad_multiple=8, num_microbatches=2)
    assert plan.micro_batches == ((0,), (1,))
    assert plan.waste == 0.5
    assert plan.imbalance == 1.0
    assert plan_step([8, 4, 4, 4], budget=16, pad_multiple=1, num_microbatches=2).imbalance == pytest.approx(
        1.2
    )


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel", "expected"),
    [(1, 1, False, 1), (2, 1, False, 4), (1, 2, True, 2), (2, 2, True, 8), (1, 2, False, 1)],
)
def test_pad_multiple(cp: int, tp: int, sequence_parallel: bool, expected: int) -> None:
    assert pad_multiple(cp=cp, tp=tp, sequence_parallel=sequence_parallel) == expected


def test_padded_length() -> None:
    assert [padded_length(length, 4) for length in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_a_sample_longer_than_the_budget_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"sample 1 has 300 tokens.*train\.microbatch_tokens = 300 or more"):
        count_microbatches([10, 300], budget=BUDGET, pad_multiple=1)
    with pytest.raises(ValueError, match=r"256 padded.*microbatch_tokens = 256"):
        plan_step([250], budget=250, pad_multiple=8, num_microbatches=1)


def test_too_few_microbatches_names_the_number() -> None:
    with pytest.raises(ValueError, match="give 2 or more"):
        plan_step([200, 200], budget=BUDGET, pad_multiple=1, num_microbatches=1)


def _optimal_count(lengths: list[int]) -> int:
    for count in itertools.count(1):
        if _fits(lengths, [0] * count):
            return count
    raise AssertionError


def _fits(lengths: list[int], loads: list[int]) -> bool:
    if not lengths:
        return True
    first, rest = lengths[0], lengths[1:]
    return any(
        _fits(rest, [*loads[:idx], loads[idx] + first, *loads[idx + 1 :]])
        for idx in {load: idx for idx, load in enumerate(loads)}.values()
        if loads[idx] + first <= BUDGET
    )
