"""The objective against a scalar reference, token by token, value and gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from asyncrl.algo.inputs import ObjectiveInputs
from asyncrl.algo.objectives import Clip, build_objective, ppo_clip_loss
from asyncrl.config import AlgorithmConfig
from tests.unit.tokens import random_inputs, select


def reference_token(inputs: ObjectiveInputs, config: AlgorithmConfig, idx: int) -> tuple[float, float]:
    """Loss and d loss / d logprob of one token in float64, from the papers' case distinctions."""
    logprob, advantage = inputs.logprobs[idx].item(), inputs.advantages[idx].item()
    behav, prox = float(inputs.behav_logprobs[idx]), float(inputs.prox_logprobs[idx])
    plain = config.correction == "none"
    weight = 1.0 if plain else min(math.exp(prox - behav), config.is_cap)
    ratio = math.exp(logprob - (behav if plain else prox))
    if advantage >= 0:
        active = ratio <= 1 + config.clip_high
        loss = -min(ratio, 1 + config.clip_high) * advantage
    else:
        active = ratio >= 1 - config.clip_low
        loss = -max(ratio, 1 - config.clip_low) * advantage
        if config.clip_dual is not None and ratio > config.clip_dual:
            active, loss = False, -config.clip_dual * advantage
    scale = weight * float(inputs.loss_weights[idx])
    return scale * loss, -scale * ratio * advantage if active else 0.0


CONFIGS: list[dict[str, Any]] = [
    {},
    {"clip_low": 0.1, "clip_high": 0.4},
    {"clip_dual": 1.5},
    {"is_cap": 1.1},
    {"correction": "none"},
    {"correction": "none", "clip_dual": 1.3, "clip_low": 0.3},
]


@pytest.mark.parametrize("settings", CONFIGS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 200])
def test_against_scalar_reference(settings: dict[str, Any], num_tokens: int) -> None:
    config = AlgorithmConfig(**settings)
    inputs = random_inputs(num_tokens, seed=num_tokens)
    output = build_objective(config)(inputs)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    expected = 0.0
    for idx in range(num_tokens):
        loss, slope = reference_token(inputs, config, idx) if inputs.mask[idx] else (0.0, 0.0)
        expected += loss
        assert math.isclose(float(gradient[idx]), slope, rel_tol=2e-5, abs_tol=1e-7), (
            f"first mismatch: token {idx}"
        )
    assert math.isclose(output.loss.item(), expected, rel_tol=1e-5, abs_tol=1e-6)
    assert output.sums["loss"].item() == output.loss.item()


def test_any_cut_into_micro_batches_and_ranks_gives_the_same_sums() -> None:
    inputs = random_inputs(101)
    objective = build_objective(AlgorithmConfig(clip_dual=2.0))
    whole = objective(inputs)
    parts = [
        objective(select(inputs, part)) for part in (slice(0, 3), slice(3, 3), slice(3, 70), slice(70, 101))
    ]
    assert all(part.sums.keys() == whole.sums.keys() for part in parts)
    for name, total in whole.sums.items():
        added = sum(part.sums[name].item() for part in parts)
        assert math.isclose(added, total.item(), rel_tol=1e-6, abs_tol=1e-6), f"first mismatch: {name}"
    (gradient,) = torch.autograd.grad(whole.loss, inputs.logprobs)
    (added_gradient,) = torch.autograd.grad(sum(part.loss for part in parts), inputs.logprobs)
    torch.testing.assert_close(added_gradient, gradient)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_outside_the_mask_leaks(poison: float) -> None:
    clean = random_inputs(50)
    outside = ~clean.mask
    poisoned = dataclasses.replace(
        clean,
        **{
            field.name: torch.where(outside, poison, getattr(clean, field.name)).detach()
            for field in dataclasses.fields(clean)
            if field.name not in ("mask", "staleness")
        },
    )
    poisoned.logprobs.requires_grad_()
    for settings in CONFIGS:
        objective = build_objective(AlgorithmConfig(**settings))
        expected, got = objective(clean), objective(poisoned)
        assert got.loss.item() == expected.loss.item()
        assert {name: total.item() for name, total in got.sums.items()} == {
            name: total.item() for name, total in expected.sums.items()
        }
        (gradient,) = torch.autograd.grad(got.loss, poisoned.logprobs)
        assert torch.equal(gradient, torch.autograd.grad(expected.loss, clean.logprobs)[0])


def test_nan_inside_the_mask_is_loud() -> None:
    inputs = random_inputs(5, masked=0.0)
    inputs.behav_logprobs[2] = math.nan
    assert math.isnan(build_objective(AlgorithmConfig())(inputs).loss.item())


def test_a_micro_batch_without_tokens_still_has_a_gradient() -> None:
    inputs = random_inputs(0)
    output = build_objective(AlgorithmConfig())(inputs)
    output.loss.backward()
    assert output.loss.item() == 0
    assert inputs.logprobs.grad is not None


def test_extreme_log_ratios_stay_finite() -> None:
    inputs = random_inputs(6, masked=0.0, spread=200.0)
    output = build_objective(AlgorithmConfig())(inputs)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    assert output.loss.isfinite() and gradient.isfinite().all()
    assert all(total.isfinite() for total in output.sums.values())


def test_the_first_update_of_a_batch_is_truncated_importance_sampling() -> None:
    """With prox = current the clip is idle and the gradient is -min(prox / behav, cap) * A per token."""
    inputs = random_inputs(40)
    inputs = dataclasses.replace(inputs, prox_logprobs=inputs.logprobs.detach())
    output = build_objective(AlgorithmConfig())(inputs)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    weights = (inputs.prox_logprobs - inputs.behav_logprobs).exp().clamp(max=2.0)
    torch.testing.assert_close(gradient, -weights * inputs.advantages * inputs.loss_weights)
    assert output.sums["clipped_low"].item() == output.sums["clipped_high"].item() == 0


def test_clip_fractions_count_each_side() -> None:
    ratio = torch.tensor([0.5, 0.5, 1.5, 1.5, 4.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    loss = ppo_clip_loss(ratio, advantages, Clip(0.2, 0.2, 3.0))
    torch.testing.assert_close(loss, torch.tensor([-0.5, 0.8, -1.2, 1.5, 3.0]))
    zeros = torch.zeros(5)
    output = build_objective(AlgorithmConfig(clip_dual=3.0))(
        ObjectiveInputs(ratio.log(), zeros, zeros, advantages, zeros + 0.2, torch.ones(5, dtype=torch.bool))
    )
    counts = {
        name: output.sums[name].item() for name in ("clipped_low", "clipped_high", "clipped_dual", "tokens")
    }
    assert counts == {"clipped_low": 1, "clipped_high": 1, "clipped_dual": 1, "tokens": 5}


def test_inputs_of_the_wrong_shape_or_type_are_named() -> None:
    inputs = random_inputs(4)
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\), logprobs has \(4,\)"):
        dataclasses.replace(inputs, advantages=torch.zeros(3))
    with pytest.raises(ValueError, match="give a bool tensor"):
        dataclasses.replace(inputs, mask=torch.ones(4))
    with pytest.raises(ValueError, match="give the flat tokens"):
        dataclasses.replace(inputs, logprobs=torch.zeros(1, 4))
