"""How token losses add up to the loss of a batch: one weight per sample, from integers alone.

    loss of the batch = sum over all tokens of the global batch of weight(its sample) * token loss

The weights are fixed from the counts of the *global* batch before anything is masked or rejected
and before it is cut into micro-batches and ranks. So any cut gives the same loss, and a rejected
token shrinks the step instead of enlarging its siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Counts of the global batch, the same on every rank; those of parts add up."""

    num_samples: int  # samples with at least one trained token
    num_tokens: int  # trained tokens

    @staticmethod
    def of(tokens_per_sample: Sequence[int]) -> BatchCounts:
        """Count a part of the batch, given the trained tokens of each of its samples."""
        return BatchCounts(
            num_samples=sum(count > 0 for count in tokens_per_sample),
            num_tokens=sum(tokens_per_sample),
        )

    def __add__(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(self.num_samples + other.num_samples, self.num_tokens + other.num_tokens)


def token_weight(
    aggregation: Aggregation, batch: BatchCounts, sample_tokens: int, *, constant_tokens: int
) -> float:
    """The loss weight of each trained token of a sample.

    Args:
        aggregation: ``token_mean``: every token of the batch counts the same (DAPO, arXiv 2503.14476);
            ``sequence_mean``: every sample counts the same (GRPO, arXiv 2402.03300);
            ``constant``: sum over tokens / (samples * constant_tokens), so that length does not
            scale a token's gradient (Dr. GRPO, arXiv 2503.20783).
        batch: counts of the global batch.
        sample_tokens: trained tokens of this sample.
        constant_tokens: the longest possible response; used by ``constant`` only.

    Returns:
        A weight; over the batch the weights sum to 1 (``constant``: to the mean share of
        ``constant_tokens`` that was used). 0 for a sample without trained tokens.
    """
    if sample_tokens == 0:
        return 0.0
    if sample_tokens > batch.num_tokens or batch.num_samples < 1:
        raise ValueError(
            f"a sample of {sample_tokens} trained tokens in a batch of {batch.num_tokens} tokens and"
            f" {batch.num_samples} samples; add the counts of every rank first"
        )
    if aggregation == "token_mean":
        return 1.0 / batch.num_tokens
    if aggregation == "sequence_mean":
        return 1.0 / (batch.num_samples * sample_tokens)
    return 1.0 / (batch.num_samples * constant_tokens)
