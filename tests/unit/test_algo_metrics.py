"""Diagnostics against their definitions over a whole vocabulary, and the alarms they raise."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.algo.inputs import ObjectiveInputs
from asyncrl.algo.metrics import alarms, mismatch_sums, summarize
from asyncrl.algo.objectives import build_objective
from asyncrl.config import AlgorithmConfig
from tests.unit.tokens import random_inputs


def diagnose(
    behav: torch.Tensor, prox: torch.Tensor, staleness: torch.Tensor | None = None
) -> dict[str, float]:
    zeros = torch.zeros_like(behav)
    mask = torch.ones(len(behav), dtype=torch.bool)
    inputs = ObjectiveInputs(prox, behav, prox, zeros, zeros, mask, staleness=staleness)
    return summarize({name: total.item() for name, total in mismatch_sums(inputs).items()})


def test_estimators_approach_the_exact_divergence() -> None:
    generator = torch.Generator().manual_seed(3)
    behav = torch.log_softmax(torch.randn(30, generator=generator), 0)
    prox = torch.log_softmax(behav + 0.2 * torch.randn(30, generator=generator), 0)
    tokens = torch.multinomial(behav.exp(), 200_000, replacement=True, generator=generator)
    metrics = diagnose(behav[tokens], prox[tokens])
    divergence = (behav.exp() * (behav - prox)).sum().item()
    assert metrics["mismatch_k1"] == pytest.approx(divergence, rel=0.05)
    assert metrics["mismatch_k3"] == pytest.approx(divergence, rel=0.05)
    assert metrics["mismatch_k2"] == pytest.approx(divergence, rel=0.3)  # biased by design
    exact_ess = 1 / (prox - behav + prox).exp().sum().item()
    assert metrics["ess"] == pytest.approx(exact_ess, rel=0.02)
    assert metrics["is_mean"] == pytest.approx(1.0, abs=0.002)
    assert abs(metrics["is_mean_z"]) < 3


def test_means_over_the_mask_alone() -> None:
    inputs = random_inputs(60)
    totals = {name: total.item() for name, total in build_objective(AlgorithmConfig())(inputs).sums.items()}
    metrics = summarize(totals)
    log_weights = (inputs.prox_logprobs - inputs.behav_logprobs)[inputs.mask].double()
    assert inputs.entropy is not None
    expected = {
        "tokens": inputs.mask.sum().item(),
        "mismatch_k1": -log_weights.mean().item(),
        "abs_log_ratio": log_weights.abs().mean().item(),
        "is_mean": log_weights.exp().mean().item(),
        "ess": (log_weights.exp().sum() ** 2 / (len(log_weights) * log_weights.exp().square().sum())).item(),
        "entropy": inputs.entropy[inputs.mask].mean().item(),
        "truncated": (log_weights.exp() >= 2).double().mean().item(),
        "correction_weight": log_weights.exp().clamp(max=2).mean().item(),
        "tail_050": (log_weights.abs() > 0.5).double().mean().item(),
        "is_mean_z": (
            (log_weights.exp().mean() - 1) / (log_weights.exp().std(correction=0) / len(log_weights) ** 0.5)
        ).item(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), f"first mismatch: {name}"


def test_nothing_is_reported_that_was_not_measured() -> None:
    metrics = diagnose(torch.zeros(3), torch.zeros(3))
    assert "entropy" not in metrics
    assert "fresh_k3" not in metrics
    empty = diagnose(torch.zeros(0), torch.zeros(0))
    assert empty == {"tokens": 0.0}


def test_mismatch_is_told_from_staleness() -> None:
    behav, prox = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.5])
    metrics = diagnose(behav, prox, staleness=torch.tensor([0, 1]))
    assert metrics["fresh_k3"] == 0.0
    assert metrics["mismatch_k3"] > 0
    assert alarms(metrics, initial_entropy=None) == (
        alarms({"abs_log_ratio": 0.25}, initial_entropy=None)[0],
    )


@pytest.mark.parametrize(
    ("metrics", "level", "text"),
    [
        ({"fresh_k3": 2e-3}, "warn", "disagree at the same policy version: k3 = 2.00e-03"),
        ({"fresh_k3": 2e-2}, "stop", "disagree at the same policy version"),
        ({"abs_log_ratio": 0.06}, "warn", "exceeds 1.05"),
        ({"ess": 0.2}, "warn", "effective sample size of the raw importance weights is 0.20"),
        ({"is_mean": 0.9, "is_mean_z": -4.0}, "warn", "4.0 standard errors from 1"),
        ({"entropy": 0.1}, "warn", "below 20% of its start"),
    ],
)
def test_alarms(metrics: dict[str, float], level: str, text: str) -> None:
    (alarm,) = alarms(metrics, initial_entropy=1.0)
    assert alarm.level == level
    assert text in alarm.message
    assert "\n" not in alarm.message


def test_healthy_metrics_raise_no_alarm_and_stops_come_first() -> None:
    healthy = {
        "fresh_k3": 1e-4,
        "abs_log_ratio": 0.01,
        "ess": 0.99,
        "is_mean_z": 1.0,
        "is_mean": 1.0,
        "entropy": 0.9,
    }
    assert alarms(healthy, initial_entropy=1.0) == ()
    found = alarms({"ess": 0.1, "fresh_k3": 1.0}, initial_entropy=None)
    assert [alarm.level for alarm in found] == ["stop", "warn"]
    assert math.isfinite(summarize({"tokens": 2.0, "is_excess": 0.0, "is_excess_squared": 0.0})["ess"])
