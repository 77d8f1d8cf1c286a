"""Importance weights and rejection against loops over tokens and samples."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from asyncrl.algo.corrections import (
    accepted,
    behaviour_log_weights,
    correction_weights,
    importance_weights,
    log_ratio,
)
from asyncrl.algo.inputs import ObjectiveInputs, Segments
from asyncrl.config import AlgorithmConfig
from tests.unit.tokens import random_inputs


def two_samples(log_weights: list[float], advantages: tuple[float, float] = (1.0, -1.0)) -> ObjectiveInputs:
    """Tokens 0..2 are sample 0, the rest sample 1; current = proximal = behaviour + log weight."""
    num_tokens = len(log_weights)
    behav = torch.full((num_tokens,), -1.0)
    prox = behav + torch.tensor(log_weights)
    sample_idx = (torch.arange(num_tokens) >= 3).long()
    return ObjectiveInputs(
        logprobs=prox.clone().requires_grad_(),
        behav_logprobs=behav,
        prox_logprobs=prox,
        advantages=torch.tensor(advantages)[sample_idx],
        loss_weights=torch.full((num_tokens,), 1 / num_tokens),
        mask=torch.ones(num_tokens, dtype=torch.bool),
        segments=Segments(sample_idx, 2),
    )


def reference_accepted(inputs: ObjectiveInputs, config: AlgorithmConfig) -> list[bool]:
    """One token at a time; entries outside the mask are not meaningful."""
    assert inputs.segments is not None
    log_weights = (inputs.prox_logprobs - inputs.behav_logprobs).tolist()
    drift = (inputs.behav_logprobs - inputs.logprobs).tolist()
    result = []
    for idx, sample in enumerate(inputs.segments.sample_idx.tolist()):
        mine = [
            other
            for other, owner in enumerate(inputs.segments.sample_idx.tolist())
            if owner == sample and inputs.mask[other]
        ]
        if config.rejection == "token":
            result.append(config.reject_low <= math.exp(log_weights[idx]) <= config.reject_high)
            continue
        count = max(1, len(mine))
        geometric = math.exp(sum(log_weights[other] for other in mine) / count)
        too_far = sum(drift[other] for other in mine) / count > config.reject_kl
        inside = config.reject_low <= geometric <= config.reject_high
        is_negative = inputs.advantages[idx].item() < 0
        result.append(inside if config.rejection == "geometric" else not (too_far and is_negative))
    return result


@pytest.mark.parametrize("rejection", ["token", "geometric", "off_policy_sequence"])
def test_rejection_against_loops(rejection: str) -> None:
    settings: dict[str, Any] = {
        "rejection": rejection,
        "reject_low": 0.8,
        "reject_high": 1.2,
        "reject_kl": 0.05,
    }
    config = AlgorithmConfig(**settings)
    inputs = random_inputs(80, seed=5)
    expected = reference_accepted(inputs, config)
    got = accepted(config, inputs)
    for idx in inputs.mask.nonzero().flatten().tolist():
        assert bool(got[idx]) == expected[idx], f"first mismatch: token {idx}"
    trained = got[inputs.mask]
    assert 0 < trained.sum() < len(trained)


def test_truncation_of_tokens() -> None:
    inputs = two_samples([0.0, math.log(1.5), math.log(3.0), -1.0])
    weights = importance_weights(AlgorithmConfig(is_cap=2.0), inputs)
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.5, 2.0, math.exp(-1)]))
    assert not weights.requires_grad


def test_truncation_of_samples_is_of_the_product() -> None:
    inputs = two_samples([1.0, 1.0, -0.5, -0.2, -0.3])
    config = AlgorithmConfig(correction="sequence_truncated_is", is_cap=10.0)
    expected = [math.exp(1.5)] * 3 + [math.exp(-0.5)] * 2
    torch.testing.assert_close(importance_weights(config, inputs), torch.tensor(expected))
    capped = config.model_copy(update={"is_cap": 2.0})
    torch.testing.assert_close(
        importance_weights(capped, inputs), torch.tensor([2.0] * 3 + [math.exp(-0.5)] * 2)
    )


def test_no_correction_weighs_nothing() -> None:
    inputs = two_samples([1.0, -1.0, 0.0])
    assert importance_weights(AlgorithmConfig(correction="none"), inputs).tolist() == [1.0] * 3


def test_geometric_mean_does_not_depend_on_the_length() -> None:
    """0.1 per token: a ratio of exp(0.3) or exp(20) for the samples, the same geometric mean."""
    config = AlgorithmConfig(rejection="geometric", reject_low=0.9, reject_high=1.2)
    assert accepted(config, two_samples([0.1] * 203)).all()
    assert not accepted(config, two_samples([0.2] * 203)).any()


def test_only_negative_advantages_are_rejected_for_drift() -> None:
    config = AlgorithmConfig(rejection="off_policy_sequence", reject_kl=0.1)
    drifted = two_samples([-0.5] * 5)  # behaviour much likelier than current in both samples
    assert accepted(config, drifted).tolist() == [True] * 3 + [False] * 2
    assert accepted(config, dataclasses.replace(drifted, advantages=torch.ones(5))).all()


def test_a_rejected_token_weighs_nothing_and_the_rest_does_not_change() -> None:
    inputs = two_samples([0.0, 3.0, 0.1, -2.0])
    config = AlgorithmConfig(rejection="token", reject_low=0.5, reject_high=2.0)
    torch.testing.assert_close(
        correction_weights(config, inputs), torch.tensor([1.0, 0.0, math.exp(0.1), 0.0])
    )


def test_log_ratios_are_bounded_and_selected() -> None:
    of = torch.tensor([100.0, -100.0, math.nan, 0.5])
    mask = torch.tensor([True, True, False, True])
    assert log_ratio(of, torch.zeros(4), mask).tolist() == [20.0, -20.0, 0.0, 0.5]
    assert not behaviour_log_weights(random_inputs(3)).requires_grad
