"""What an objective is given and what it returns; the contract between `algo` and the training forward.

    micro-batch -> forward -> ObjectiveInputs -> Objective -> ObjectiveOutput -> backward, metrics

Invariants:

* every tensor is one-dimensional and covers the t tokens of one rank's micro-batch, aligned so that
  entry i of each belongs to the same *predicted* token i (the caller has done the shift);
* three logprobs never mixed up: behaviour (engine, of the version that sampled the token), proximal
  (trainer, before this step's update, no gradient), current (with gradient); with one optimizer
  update per batch the proximal logprobs are ``logprobs.detach()``, no second forward is needed;
* entries outside ``mask`` may hold anything, nan and inf included, and reach neither the loss nor
  its gradient;
* ``loss_weights`` sum to 1 over the *global* batch, so ranks and micro-batches combine by plain
  sums: the caller adds gradients over DP x CP and never averages them;
* ``ObjectiveOutput.sums`` hold 0-d float64 sums; adding those of all micro-batches and all
  DP x CP ranks and handing the totals to `asyncrl.algo.metrics.summarize` gives the metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


def _identity(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Which sample each token belongs to, for objectives and corrections that decide per sample.

    ``sum_over_ranks`` adds a tensor over the context-parallel ranks that share the micro-batch's samples,
    in place or not; no gradient flows through it. Every one of those ranks calls it equally often.
    """

    sample_idx: torch.Tensor  # [t] int64, in [0, num_samples)
    num_samples: int  # of the micro-batch, the same on every context-parallel rank
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = _identity

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[t] -> [num_samples], the sum over all tokens of each sample, in float64 without gradient."""
        totals = torch.zeros(self.num_samples, dtype=torch.float64, device=values.device)
        totals.index_add_(0, self.sample_idx, values.detach().double())
        return self.sum_over_ranks(totals)

    def means(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[t] values, 0 outside the mask [t] -> [num_samples], their mean over the mask (0 where empty)."""
        return self.sums(values) / self.sums(mask).clamp(min=1)

    def spread(self, per_sample: torch.Tensor) -> torch.Tensor:
        """[num_samples] -> [t], each token the value of its sample."""
        return per_sample[self.sample_idx]


@dataclass(frozen=True, slots=True, eq=False)
class ObjectiveInputs:
    """The tokens of one rank's micro-batch, t of them (0 is allowed)."""

    logprobs: torch.Tensor  # [t] float32, current policy, requires grad
    behav_logprobs: torch.Tensor  # [t] float32, as the engine reported them
    prox_logprobs: torch.Tensor  # [t] float32, before this step's update; no gradient
    advantages: torch.Tensor  # [t] float32
    loss_weights: torch.Tensor  # [t] float32, see `asyncrl.algo.aggregation`
    mask: torch.Tensor  # [t] bool, True on the model tokens that are trained on
    entropy: torch.Tensor | None = None  # [t] float32, for the metrics; None: not computed
    # [t] int, trainer's policy version - version that sampled the token, for the metrics; None: unknown
    staleness: torch.Tensor | None = None
    segments: Segments | None = None  # None: only what decides per token can be computed

    def __post_init__(self) -> None:
        if self.mask.dtype is not torch.bool:
            raise ValueError(f"mask is {self.mask.dtype}; give a bool tensor")
        shape = self.logprobs.shape
        if len(shape) != 1:
            raise ValueError(f"logprobs has shape {tuple(shape)}; give the flat tokens of one rank, [t]")
        named = {
            "behav_logprobs": self.behav_logprobs,
            "prox_logprobs": self.prox_logprobs,
            "advantages": self.advantages,
            "loss_weights": self.loss_weights,
            "mask": self.mask,
        }
        if self.entropy is not None:
            named["entropy"] = self.entropy
        if self.staleness is not None:
            named["staleness"] = self.staleness
        if self.segments is not None:
            named["segments.sample_idx"] = self.segments.sample_idx
        for name, tensor in named.items():
            if tensor.shape != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, logprobs has {tuple(shape)}")

    def required_segments(self, setting: str) -> Segments:
        """The segments, needed by ``setting``; without any token there is no sample either.

        Raises:
            ValueError: there are tokens, and nobody said to which samples they belong.
        """
        if self.segments is not None:
            return self.segments
        if len(self.logprobs):
            raise ValueError(f"{setting} decides per sample: give ObjectiveInputs.segments")
        return Segments(torch.empty(0, dtype=torch.int64, device=self.logprobs.device), num_samples=0)


@dataclass(frozen=True, slots=True, eq=False)
class ObjectiveOutput:
    """The share of one micro-batch on one rank in the global loss, and its metric sums."""

    loss: torch.Tensor  # 0-d float32, sum over the tokens of loss_weights * token loss
    sums: dict[str, torch.Tensor]  # 0-d float64 each, no gradient; the same keys on every rank


Objective = Callable[[ObjectiveInputs], ObjectiveOutput]
