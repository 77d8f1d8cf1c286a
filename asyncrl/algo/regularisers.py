"""Estimates of the divergence from a reference policy, per sampled token.

With x drawn from the current policy and r = ref(x) / current(x), all three have about the mean
KL(current || ref): k1 = -log r (unbiased, can be negative), k2 = (log r)^2 / 2 (biased, low variance),
k3 = r - 1 - log r (unbiased, never negative). Schulman, "Approximating KL divergence", 2020.

As a *loss* only k2 has the right gradient in expectation, E[log(current / ref) d log current]; that of k1
is 0 and that of k3 belongs to the reverse divergence. As a penalty in the *reward*, without gradient, k1
is the right one.
"""

from __future__ import annotations

from typing import Literal

import torch

from asyncrl.algo.corrections import log_ratio

KlKind = Literal["k1", "k2", "k3"]


def kl_estimate(
    kind: KlKind, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The estimate per token, [t] float32, 0 outside the mask; differentiable in ``logprobs``."""
    log_r = log_ratio(ref_logprobs.detach(), logprobs, mask)
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return log_r.square() / 2
    return torch.expm1(log_r) - log_r
