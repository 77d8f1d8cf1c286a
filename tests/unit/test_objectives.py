"""The objective against a scalar reference, token by token, value and gradient."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from typing import Any

import pytest
import torch

from asyncrl.algo.inputs import ObjectiveInputs, ObjectiveOutput
from asyncrl.algo.objectives import build_objective
from asyncrl.algo.token_losses import Clip, ppo_clip_loss
from asyncrl.config import AlgorithmConfig
from tests.unit.tokens import random_inputs, select


def reference_token(inputs: ObjectiveInputs, config: AlgorithmConfig, idx: int) -> tuple[float, float]:
    """Loss and d loss / d logprob of one token in float64, from the papers' case distinctions."""
    advantage = inputs.advantages[idx].item()
    plain = config.correction == "none"
    weight = 1.0 if plain else min(math.exp(log_weight(inputs, idx)), config.is_cap)
    anchor = inputs.behav_logprobs if plain else inputs.prox_logprobs
    drift = (inputs.logprobs - anchor).tolist()
    ratio = math.exp(statistics.fmean(drift[other] for other in siblings(inputs, idx)))
    if config.objective != "gspo":
        ratio = math.exp(drift[idx])
    scale = weight * inputs.loss_weights[idx].item()
    if config.objective == "cispo":
        bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        return -scale * bounded * advantage * inputs.logprobs[idx].item(), -scale * bounded * advantage
    if config.objective == "sapo":
        tau = config.sapo_tau_positive if advantage > 0 else config.sapo_tau_negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -scale * 4 / tau * gate * advantage, -scale * 4 * gate * (1 - gate) * ratio * advantage
    loss, active = clipped_loss(ratio, advantage, config)
    return scale * loss, -scale * ratio * advantage if active else 0.0


def log_weight(inputs: ObjectiveInputs, idx: int) -> float:
    return inputs.prox_logprobs[idx].item() - inputs.behav_logprobs[idx].item()


def siblings(inputs: ObjectiveInputs, idx: int) -> list[int]:
    """The trained tokens of the sample to which a token belongs."""
    assert inputs.segments is not None
    same = inputs.segments.sample_idx == inputs.segments.sample_idx[idx]
    return (same & inputs.mask).nonzero().flatten().tolist()


def clipped_loss(ratio: float, advantage: float, config: AlgorithmConfig) -> tuple[float, bool]:
    """PPO's loss, and whether it still depends on the ratio."""
    if advantage >= 0:
        return -min(ratio, 1 + config.clip_high) * advantage, ratio <= 1 + config.clip_high
    if config.clip_dual is not None and ratio > config.clip_dual:
        return -config.clip_dual * advantage, False
    return -max(ratio, 1 - config.clip_low) * advantage, ratio >= 1 - config.clip_low


CONFIGS: list[dict[str, Any]] = [
    {},
    {"clip_low": 0.1, "clip_high": 0.4},
    {"clip_dual": 1.5},
    {"is_cap": 1.1},
    {"correction": "none"},
    {"correction": "none", "clip_dual": 1.3, "clip_low": 0.3},
    {"objective": "gspo", "clip_low": 0.05, "clip_high": 0.1},
    {"objective": "gspo", "correction": "none"},
    {"objective": "cispo", "clip_low": 0.9, "clip_high": 0.3},
    {"objective": "sapo"},
    {"objective": "sapo", "sapo_tau_positive": 2.0, "sapo_tau_negative": 0.5},
]
SEQUENCE_CONFIGS: list[dict[str, Any]] = [
    {"correction": "sequence_truncated_is", "is_cap": 3.0},
    {"rejection": "token", "reject_low": 0.8, "reject_high": 1.3},
    {"rejection": "geometric", "reject_low": 0.9, "reject_high": 1.1},
    {"rejection": "off_policy_sequence", "objective": "gspo"},
]


@pytest.mark.parametrize("settings", CONFIGS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 7, 80])
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


SAMPLE_BORDERS = (0, 3, 3, 66, 101)  # 3 = 1 + 2 and 66 = 1 + ... + 11, see `random_segments`


@pytest.mark.parametrize("settings", CONFIGS + SEQUENCE_CONFIGS, ids=str)
def test_any_cut_into_micro_batches_gives_the_same_sums(settings: dict[str, Any]) -> None:
    inputs = random_inputs(101)
    objective = build_objective(AlgorithmConfig(**settings))
    cuts = [slice(start, stop) for start, stop in itertools.pairwise(SAMPLE_BORDERS)]
    compare_parts(inputs, objective(inputs), [objective(select(inputs, cut)) for cut in cuts])


@pytest.mark.parametrize("settings", CONFIGS + SEQUENCE_CONFIGS, ids=str)
def test_context_parallel_ranks_that_share_samples_give_the_same_sums(settings: dict[str, Any]) -> None:
    """Each sample's tokens lie on both ranks; sums over ranks come from a first pass that records them."""
    inputs = random_inputs(101)
    objective = build_objective(AlgorithmConfig(**settings))
    odd = torch.arange(101) % 2 == 1
    recorded: list[list[torch.Tensor]] = []
    for part in (odd, ~odd):
        calls: list[torch.Tensor] = []

        def record(values: torch.Tensor, calls: list[torch.Tensor] = calls) -> torch.Tensor:
            calls.append(values.clone())
            return values

        objective(select(inputs, part, record))
        recorded.append(calls)
    totals = [left + right for left, right in zip(*recorded, strict=True)]
    ranks = []
    for part in (odd, ~odd):
        replay = iter(totals)
        ranks.append(objective(select(inputs, part, lambda _, replay=replay: next(replay))))
    compare_parts(inputs, objective(inputs), ranks)


def compare_parts(inputs: ObjectiveInputs, whole: ObjectiveOutput, parts: list[ObjectiveOutput]) -> None:
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
            if field.name not in ("mask", "staleness", "segments")
        },
    )
    poisoned.logprobs.requires_grad_()
    for settings in CONFIGS + SEQUENCE_CONFIGS:
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


def test_gspo_is_the_gradient_of_the_sequence_ratio() -> None:
    """With the mean over sequences it equals that of min(s A, clip(s) A), s differentiated as a whole."""
    inputs = random_inputs(55, masked=0.0, spread=0.05)
    segments = inputs.segments
    assert segments is not None
    counts = torch.bincount(segments.sample_idx)
    advantages = torch.randn(len(counts), generator=torch.Generator().manual_seed(1))
    inputs = dataclasses.replace(
        inputs,
        advantages=advantages[segments.sample_idx],
        loss_weights=1 / (len(counts) * counts)[segments.sample_idx],
        behav_logprobs=inputs.prox_logprobs,
    )
    output = build_objective(AlgorithmConfig(objective="gspo", clip_low=0.02, clip_high=0.02))(inputs)
    (got,) = torch.autograd.grad(output.loss, inputs.logprobs)
    drift = inputs.logprobs - inputs.prox_logprobs
    ratio = (torch.zeros(len(counts)).index_add(0, segments.sample_idx, drift) / counts).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.98, 1.02) * advantages).mean()
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(got, torch.autograd.grad(loss, inputs.logprobs)[0])


@pytest.mark.parametrize("objective", ["ppo_clip", "gspo", "cispo", "sapo"])
def test_on_policy_every_objective_is_the_policy_gradient(objective: str) -> None:
    inputs = random_inputs(30)
    at_rest = dataclasses.replace(
        inputs, prox_logprobs=inputs.logprobs.detach(), behav_logprobs=inputs.logprobs.detach()
    )
    output = build_objective(AlgorithmConfig.model_validate({"objective": objective}))(at_rest)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    torch.testing.assert_close(gradient, -inputs.advantages * inputs.loss_weights)


def test_what_decides_per_sample_asks_for_the_samples() -> None:
    inputs = dataclasses.replace(random_inputs(4), segments=None)
    with pytest.raises(ValueError, match=r'algorithm.objective = "gspo" decides per sample: give Objective'):
        build_objective(AlgorithmConfig(objective="gspo"))(inputs)
    none = dataclasses.replace(random_inputs(0), segments=None)
    assert build_objective(AlgorithmConfig(objective="gspo"))(none).loss.item() == 0
