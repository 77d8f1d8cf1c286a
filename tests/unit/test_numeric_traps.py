"""Numeric traps of policy-gradient training: for each the right value, and the wrong one it is not.

The batch has unequal token counts (3 and 1 tokens) wherever counts matter, because most of these
mistakes are invisible when all samples have the same length.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from asyncrl.algo.advantages import compute_advantages
from asyncrl.algo.aggregation import BatchCounts, token_weight
from asyncrl.algo.corrections import importance_weights, log_ratio
from asyncrl.algo.inputs import ObjectiveInputs, ObjectiveOutput, Segments
from asyncrl.algo.metrics import mismatch_sums, summarize
from asyncrl.algo.objectives import build_objective
from asyncrl.algo.regularisers import KlKind, kl_estimate
from asyncrl.algo.returns import Moments, whiten
from asyncrl.algo.token_losses import Clip, ppo_clip_loss
from asyncrl.config import AlgorithmConfig

COUNTS = [3, 1]  # trained tokens of the two samples; each is a micro-batch or a rank of its own
ADVANTAGES = [1.0, -0.5]
TOKEN_MEAN = BatchCounts.of(COUNTS)
KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3")


def sample_inputs(idx: int, *, log_weight: float = 0.0, requires_grad: bool = True) -> ObjectiveInputs:
    """Sample ``idx`` alone, its current policy at the proximal one, at ``log_weight`` from behaviour."""
    count = COUNTS[idx]
    weight = token_weight("token_mean", TOKEN_MEAN, count, constant_tokens=1)
    logprobs = torch.full((count,), -1.0)
    return ObjectiveInputs(
        logprobs=logprobs.clone().requires_grad_(requires_grad),
        behav_logprobs=logprobs - log_weight,
        prox_logprobs=logprobs,
        advantages=torch.full((count,), ADVANTAGES[idx]),
        loss_weights=torch.full((count,), weight),
        mask=torch.ones(count, dtype=torch.bool),
    )


def evaluate(inputs: ObjectiveInputs, **settings: object) -> ObjectiveOutput:
    return build_objective(AlgorithmConfig.model_validate(settings))(inputs)


def test_mean_of_micro_batch_means() -> None:
    right = sum(evaluate(sample_inputs(idx)).loss.item() for idx in range(2))
    wrong = sum(-advantage for advantage in ADVANTAGES) / 2
    assert right == pytest.approx(-(3 * 1.0 - 0.5) / 4) == pytest.approx(-0.625)
    assert wrong == pytest.approx(-0.25)


def test_gradients_are_added_over_ranks_not_averaged() -> None:
    """Each sample on a rank of its own, with a weight shared by all ranks."""
    gradients = []
    for idx in range(2):
        shift = torch.zeros((), requires_grad=True)
        inputs = sample_inputs(idx, requires_grad=False)
        moved = ObjectiveInputs(
            inputs.logprobs + shift,
            inputs.behav_logprobs,
            inputs.prox_logprobs,
            inputs.advantages,
            inputs.loss_weights,
            inputs.mask,
        )
        (gradient,) = torch.autograd.grad(evaluate(moved).loss, shift)
        gradients.append(gradient.item())
    right, wrong = sum(gradients), sum(gradients) / len(gradients)
    assert right == pytest.approx(-0.625)
    assert wrong == pytest.approx(-0.3125)


def test_denominator_is_fixed_before_rejection() -> None:
    """The rejected sample's tokens still count; dividing by what is left would enlarge the other's step."""
    settings = {"rejection": "token", "reject_low": 0.5, "reject_high": 2.0}
    rejected = evaluate(sample_inputs(0, log_weight=3.0), **settings).loss.item()
    kept = evaluate(sample_inputs(1), **settings).loss.item()
    right, wrong = rejected + kept, 0.5 / COUNTS[1]
    assert right == pytest.approx(0.5 / 4)
    assert wrong == pytest.approx(0.5)


def test_nan_times_zero() -> None:
    mask = torch.tensor([True, False])
    logprobs = torch.tensor([-1.0, math.nan], requires_grad=True)
    right = (log_ratio(logprobs, torch.tensor([-1.0, 0.0]), mask).exp() * mask).sum()
    wrong = ((logprobs - torch.tensor([-1.0, 0.0])).exp() * mask).sum()
    assert right.item() == 1.0
    assert math.isnan(wrong.item())
    assert torch.autograd.grad(right, logprobs)[0].tolist() == [1.0, 0.0]
    assert math.isnan(torch.autograd.grad(wrong, logprobs)[0][1].item())


def test_counts_beyond_what_bfloat16_and_float32_hold() -> None:
    mask = torch.ones(1001, dtype=torch.bool)
    zeros = torch.zeros(1001)
    sums = mismatch_sums(ObjectiveInputs(zeros, zeros, zeros, zeros, zeros, mask))
    assert sums["tokens"].item() == 1001
    assert mask.to(torch.bfloat16).sum().item() == 1000
    assert all(total.dtype is torch.float64 for total in sums.values())
    large = torch.tensor(2.0**24)
    assert (large + 1).item() == 2.0**24
    assert (large.double() + 1).item() == 2.0**24 + 1


def test_variance_of_the_weights_does_not_cancel() -> None:
    """Weights of 1 +- 1e-4: their spread is 1e-4, E[w^2] - E[w]^2 in float32 sees nothing or less."""
    log_weights = torch.tensor([1e-4, -1e-4]).repeat(500)
    zeros, mask = torch.zeros(1000), torch.ones(1000, dtype=torch.bool)
    totals = mismatch_sums(ObjectiveInputs(zeros, -log_weights, zeros, zeros, zeros, mask))
    excess, squared = totals["is_excess"].item() / 1000, totals["is_excess_squared"].item() / 1000
    right = math.sqrt(squared - excess**2)
    weights = log_weights.exp()
    wrong = (weights.square().mean() - weights.mean().square()).item()
    assert right == pytest.approx(1e-4, rel=1e-3)
    assert abs(wrong - 1e-8) > 5e-9


def test_near_zero_group_std() -> None:
    rewards = torch.tensor([0.3 + 1e-8, 0.3, 0.3, 0.3], dtype=torch.float64)
    right = compute_advantages("grpo", rewards.tolist())
    wrong = (rewards - rewards.mean()) / rewards.std()
    assert right.tolist() == [0.0] * 4
    assert wrong[0].item() == pytest.approx(1.5)


def test_whitening_uses_the_moments_of_all_ranks() -> None:
    """Two ranks, one of which has the good samples: each alone would call its mean sample average."""
    ranks = [np.array([1.0, 2.0, 3.0]), np.array([5.0])]
    batch = Moments.of(ranks[0]) + Moments.of(ranks[1])
    right = whiten(ranks[1], batch)[0]
    wrong = whiten(ranks[1], Moments.of(ranks[1]))[0]
    everything = np.concatenate(ranks)
    assert (
        right == pytest.approx((5.0 - everything.mean()) / everything.std()) == pytest.approx(1.521, abs=1e-3)
    )
    assert wrong == 0.0


def test_divergence_as_a_loss_needs_k2() -> None:
    """Expected gradients over a whole vocabulary, against that of the exact KL(current || reference)."""
    logits = torch.tensor([0.5, -0.3, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.4, 0.9, -0.8, 0.6], dtype=torch.float64).log_softmax(0)
    current = logits.log_softmax(0)
    mask = torch.ones(4, dtype=torch.bool)
    (exact,) = torch.autograd.grad((current.exp() * (current - reference)).sum(), logits, retain_graph=True)

    def expected_gradient(kind: KlKind) -> torch.Tensor:
        estimate = kl_estimate(kind, current, reference, mask)
        return torch.autograd.grad((current.exp().detach() * estimate).sum(), logits, retain_graph=True)[0]

    torch.testing.assert_close(expected_gradient("k2"), exact)
    assert expected_gradient("k1").abs().max() < 1e-12
    assert ((expected_gradient("k3") - exact).norm() / exact.norm()).item() > 0.2


def test_divergence_estimates_have_the_right_mean() -> None:
    current = torch.tensor([0.5, -0.3, 0.9, 0.0], dtype=torch.float64).log_softmax(0)
    reference = torch.tensor([0.4, -0.1, 0.8, 0.1], dtype=torch.float64).log_softmax(0)
    mask = torch.tensor([True, True, True, True])
    exact = (current.exp() * (current - reference)).sum().item()
    means = [(current.exp() * kl_estimate(kind, current, reference, mask)).sum().item() for kind in KINDS]
    assert means[0] == pytest.approx(exact) and means[2] == pytest.approx(exact)
    assert means[1] == pytest.approx(exact, rel=0.1)
    outside = kl_estimate("k3", torch.tensor([math.nan]), torch.tensor([0.0]), torch.tensor([False]))
    assert outside.tolist() == [0.0]


def test_truncated_weight_is_a_constant() -> None:
    """A weight inside the graph adds a second term: d(w(x) * r(x)) = 2 w r instead of w r."""
    log_weight = 0.5
    inputs = sample_inputs(1, log_weight=log_weight)
    attached_inputs = dataclasses.replace(inputs, prox_logprobs=inputs.logprobs)
    (right,) = torch.autograd.grad(evaluate(attached_inputs).loss, inputs.logprobs)
    logprobs = inputs.logprobs
    attached = (logprobs - inputs.behav_logprobs).exp().clamp(max=2.0)
    ratio = (logprobs - inputs.prox_logprobs).exp()
    (wrong,) = torch.autograd.grad(
        -(attached * ratio * inputs.advantages * inputs.loss_weights).sum(), logprobs
    )
    scale = 0.5 / 4  # -advantage * loss weight
    assert right.item() == pytest.approx(scale * math.exp(0.5)) == pytest.approx(scale * 1.6487, rel=1e-4)
    assert wrong.item() == pytest.approx(scale * 2 * math.exp(0.5)) == pytest.approx(scale * 3.2974, rel=1e-4)


def test_sequence_ratio_is_the_exponential_of_the_sum() -> None:
    """Two tokens with log-ratios 1: the sample's ratio is exp(2); a mean of ratios, or truncating them one
    by one, is another number."""
    prox, mask = torch.tensor([0.0, 0.0]), torch.ones(2, dtype=torch.bool)
    zeros = torch.zeros(2)
    segments = Segments(torch.zeros(2, dtype=torch.int64), 1)
    inputs = ObjectiveInputs(prox, prox - 1.0, prox, zeros, zeros, mask, segments=segments)
    config = AlgorithmConfig(correction="sequence_truncated_is", is_cap=100.0)
    right = importance_weights(config, inputs)[0].item()
    wrong = torch.ones(2).exp().mean().item()
    assert right == pytest.approx(math.exp(2)) == pytest.approx(7.389, abs=1e-3)
    assert wrong == pytest.approx(math.exp(1)) == pytest.approx(2.718, abs=1e-3)


def test_min_and_max_for_negative_advantages() -> None:
    """Ratio 0.5, advantage -1: the pessimistic bound is the clipped 0.8; the optimistic one learns on."""
    ratio, advantages = torch.tensor([0.5]), torch.tensor([-1.0])
    right = ppo_clip_loss(ratio, advantages, Clip(0.2, 0.2)).item()
    wrong = torch.minimum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages).item()
    assert right == pytest.approx(0.8)
    assert wrong == pytest.approx(0.5)


def test_mixed_versions_use_the_logprob_of_the_sampling_version() -> None:
    """An interrupted sample: two tokens of version 0, one of version 1, which is the current policy.

    With the logprobs that each version reported the weight of the old tokens shows; recomputing all of
    them under version 1 calls the whole sample on-policy.
    """
    new = torch.tensor([-1.0, -1.0, -1.0])
    reported = torch.tensor([-1.2, -1.2, -1.0])
    mask, zeros = torch.ones(3, dtype=torch.bool), torch.zeros(3)

    def mean_weight(behav: torch.Tensor) -> float:
        inputs = ObjectiveInputs(new, behav, new, zeros + 1, zeros + 1 / 3, mask)
        return summarize({name: total.item() for name, total in evaluate(inputs).sums.items()})["is_mean"]

    assert mean_weight(reported) == pytest.approx((2 * math.exp(0.2) + 1) / 3)
    assert mean_weight(new) == 1.0


VOCABULARY = torch.linspace(-3, 3, 50, dtype=torch.float64)


def mean_ratio(sampled: torch.Tensor, prox: torch.Tensor, behav: torch.Tensor) -> float:
    """E[prox / behav] over tokens drawn from ``sampled``, exact over the vocabulary; [50] logprobs each."""
    drawn = sampled.isfinite()
    return (sampled.exp() * (prox - behav).exp())[drawn].sum().item()


def test_temperature_belongs_to_both_sides() -> None:
    """Sampled at T = 0.7; the mean ratio leaves 1 when the engine reports logprobs of T = 1."""
    plain, sampled = VOCABULARY.log_softmax(0), (VOCABULARY / 0.7).log_softmax(0)
    assert mean_ratio(sampled, prox=sampled, behav=sampled) == pytest.approx(1.0)
    assert mean_ratio(sampled, prox=sampled, behav=plain) > 1.05


def test_nucleus_logprobs_are_renormalised_on_the_replayed_support() -> None:
    """Sampled from the top 0.8 of the mass; a trainer that scores the whole vocabulary loses the rest."""
    plain = VOCABULARY.log_softmax(0)
    descending = plain.argsort(descending=True)
    before = plain[descending].exp().cumsum(0) - plain[descending].exp()
    support = torch.zeros(50, dtype=torch.bool).index_fill(0, descending[before < 0.8], True)
    sampled = torch.where(support, VOCABULARY, -math.inf).log_softmax(0)
    renormalised = plain - plain[support].logsumexp(0)
    assert mean_ratio(sampled, prox=renormalised, behav=sampled) == pytest.approx(1.0)
    assert mean_ratio(sampled, prox=plain, behav=sampled) == pytest.approx(0.836, abs=0.03)
