"""Advantages, objectives and corrections against numbers that verl and TRL computed.

`scripts/golden_vectors.py` made tests/unit/golden_vectors.json and is rerun on demand; the file names the
versions. Where a formula differs by design the test says how.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algo.advantages import compute_advantages
from asyncrl.algo.aggregation import BatchCounts, token_weight
from asyncrl.algo.corrections import accepted, correction_weights
from asyncrl.algo.inputs import ObjectiveInputs, Segments
from asyncrl.algo.objectives import build_objective
from asyncrl.algo.regularisers import KlKind, kl_estimate
from asyncrl.algo.returns import Moments, gae, whiten
from asyncrl.config import AlgorithmConfig

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden_vectors.json").read_text())
MASK = torch.tensor(GOLDEN["batch"]["mask"]).bool()
LENGTHS = MASK.sum(1).tolist()


def flat(values: Any) -> torch.Tensor:
    """A padded [responses, tokens] list as the [t] tokens of the mask, float64."""
    return torch.tensor(values, dtype=torch.float64)[MASK]


def inputs(config: AlgorithmConfig) -> ObjectiveInputs:
    batch = {name: flat(values) for name, values in GOLDEN["batch"].items()}
    counts = BatchCounts.of(LENGTHS)
    weights = [
        token_weight(config.aggregation, counts, length, constant_tokens=GOLDEN["constant_tokens"])
        for length in LENGTHS
    ]
    sample_idx = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return ObjectiveInputs(
        logprobs=batch["logprobs"].requires_grad_(),
        behav_logprobs=batch["behav_logprobs"],
        prox_logprobs=batch["prox_logprobs"],
        advantages=batch["advantages"],
        loss_weights=torch.tensor(weights, dtype=torch.float64)[sample_idx],
        mask=torch.ones(len(sample_idx), dtype=torch.bool),
        segments=Segments(sample_idx, len(LENGTHS)),
    )


def settings_of(case: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in case["settings"].items())


@pytest.mark.parametrize("case", GOLDEN["objectives"], ids=settings_of)
def test_objectives(case: dict[str, Any]) -> None:
    config = AlgorithmConfig.model_validate(case["settings"])
    given = inputs(config)
    output = build_objective(config)(given)
    (gradient,) = torch.autograd.grad(output.loss, given.logprobs)
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-6)
    torch.testing.assert_close(gradient, flat(case["gradient"]), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("case", GOLDEN["weights"], ids=settings_of)
def test_weights(case: dict[str, Any]) -> None:
    config = AlgorithmConfig.model_validate(case["settings"])
    got = correction_weights(config, inputs(config))
    torch.testing.assert_close(got, flat(case["weights"]), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("case", GOLDEN["rejection"], ids=settings_of)
def test_rejection(case: dict[str, Any]) -> None:
    config = AlgorithmConfig.model_validate(case["settings"])
    expected = flat(case["mask"]).bool()
    assert accepted(config, inputs(config)).tolist() == expected.tolist()
    assert 0 < expected.sum() < len(expected)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_advantages(kind: str) -> None:
    """verl adds 1e-6 to the standard deviation of GRPO, which here is not needed."""
    rewards, groups = np.array(GOLDEN["rewards"]), np.array(GOLDEN["groups"])
    got = np.concatenate([compute_advantages(kind, rewards[groups == group]) for group in np.unique(groups)])
    np.testing.assert_allclose(got, GOLDEN["advantages"][kind], rtol=5e-6, atol=1e-6)


def test_whitened_advantages() -> None:
    """verl divides by the unbiased deviation over tokens, here it is that of the population."""
    rewards, groups = np.array(GOLDEN["rewards"]), np.array(GOLDEN["groups"])
    centred = np.concatenate([compute_advantages("dr_grpo", rewards[groups == group]) for group in (0, 1)])
    num_tokens = sum(LENGTHS)
    got = whiten(centred, Moments.of(centred, np.array(LENGTHS)))
    bessel = math.sqrt((num_tokens - 1) / num_tokens)
    np.testing.assert_allclose(got * bessel, GOLDEN["advantages"]["whitened"], rtol=1e-5, atol=1e-6)


def test_generalised_advantages() -> None:
    case = GOLDEN["gae"]
    values = np.array(case["values"])
    rewards = np.zeros_like(values)
    rewards[-1] = 1.0
    got = gae(rewards, values, gamma=case["gamma"], lam=case["lam"])
    np.testing.assert_allclose(got, case["advantages"], rtol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_divergence(kind: KlKind) -> None:
    given = inputs(AlgorithmConfig())
    got = kl_estimate(kind, given.logprobs.detach(), given.behav_logprobs, given.mask)
    torch.testing.assert_close(got, flat(GOLDEN["kl"][kind]), rtol=1e-9, atol=1e-12)
