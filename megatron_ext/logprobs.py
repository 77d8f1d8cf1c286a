"""Log-probabilities of given tokens from hidden states and the output head, without the logits.

    hidden [t, h], head [v, h] (v: this TP rank's rows of the vocabulary) -> logprobs, entropy [t] float32

Tokens are taken in chunks: the logits of one chunk exist at a time, and backward computes them again.
So the peak is one [chunk, v] float32 instead of [t, v] with its gradient. Logits are divided by the
sampling temperature, exactly as the engine does before its softmax. Rows of the head beyond the real
vocabulary are padding and take no part. All sums over the vocabulary are all-reduced over the TP group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

CPU_CHUNK_BYTES = 32 * 2**20  # about the last-level cache
CUDA_CHUNK_BYTES = 512 * 2**20


def token_logprobs(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(hidden @ head.T / temperature)[label] over the whole vocabulary, and its entropy.

    Args:
        hidden: [t, h], the same on every rank of ``tp_group``.
        head: [v, h], rows [rank * v, (rank + 1) * v) of the padded vocabulary.
        labels: int64 [t], below ``vocab_size``.
        vocab_size: rows of the vocabulary that are real.

    Returns:
        logprobs [t] float32, differentiable in ``hidden`` and ``head``. The gradient of ``hidden`` is
        this rank's share: the caller sums it over ``tp_group``.
        entropy [t] float32 in nats, without gradient.
    """
    first = tp_group.rank() * head.size(0)
    num_real = min(max(vocab_size - first, 0), head.size(0))
    return _TokenLogprobs.apply(hidden, head, labels - first, 1.0 / temperature, num_real, tp_group)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        local_labels: torch.Tensor,
        scale: float,
        num_real: int,
        tp_group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            _forward_chunk(_logits(hidden[rows], head[:num_real], scale), local_labels[rows], tp_group)
            for rows in _chunks(hidden.size(0), head)
        ]
        logprobs, log_sums, entropy = (
            torch.cat(columns) if parts else hidden.new_empty(0, dtype=torch.float32)
            for columns in (zip(*parts, strict=True) if parts else ((), (), ()))
        )
        ctx.save_for_backward(hidden, head, local_labels, log_sums)
        ctx.scale, ctx.num_real = scale, num_real
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _entropy: torch.Tensor) -> tuple[Any, ...]:
        hidden, head, local_labels, log_sums = ctx.saved_tensors
        real = head[: ctx.num_real]
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        for rows in _chunks(hidden.size(0), head):
            # d logprob / d logit = onehot - softmax
            probs = _logits(hidden[rows], real, ctx.scale).sub_(log_sums[rows, None]).exp_()
            scaled = grad[rows, None] * ctx.scale
            grad_logits = probs.mul_(-scaled)
            held, column = _held(local_labels[rows], ctx.num_real)
            if ctx.num_real:  # a rank may hold nothing but padding
                grad_logits.scatter_add_(1, column[:, None], scaled * held[:, None])
            grad_logits = grad_logits.to(head.dtype)
            torch.mm(grad_logits, real, out=grad_hidden[rows])
            if head.dtype is torch.float32:
                grad_head[: ctx.num_real].addmm_(grad_logits.t(), hidden[rows])
            else:
                grad_head[: ctx.num_real] += grad_logits.t() @ hidden[rows]
        return grad_hidden, grad_head.to(head.dtype), None, None, None, None


def _chunks(num_tokens: int, head: torch.Tensor) -> list[slice]:
    budget = CUDA_CHUNK_BYTES if head.is_cuda else CPU_CHUNK_BYTES
    size = max(1, budget // (4 * head.size(0)))
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _logits(hidden: torch.Tensor, head: torch.Tensor, scale: float) -> torch.Tensor:
    """[chunk, v] float32; products in the head's dtype, as the engine computes them."""
    logits = (hidden @ head.t()).float()
    return logits if scale == 1.0 else logits.mul_(scale)


def _held(local_labels: torch.Tensor, num_real: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which labels are in this rank's rows, and the row of each (0 where it is not)."""
    held = (local_labels >= 0) & (local_labels < num_real)
    return held, torch.where(held, local_labels, 0)


def _forward_chunk(
    logits: torch.Tensor, local_labels: torch.Tensor, tp_group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logprob of the label, log of the sum of exponentials, entropy: [chunk] float32 each."""
    num_tokens, num_real = logits.shape
    largest = logits.amax(-1) if num_real else logits.new_full((num_tokens,), -torch.inf)
    if tp_group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
    shifted = logits.sub_(largest[:, None])
    held, column = _held(local_labels, num_real)
    target = logits.new_zeros(num_tokens)
    if num_real:
        target = torch.where(held, shifted.gather(1, column[:, None]).squeeze(1), 0.0)
    weights = shifted.exp()
    sums = torch.stack((target, weights.sum(-1), torch.linalg.vecdot(weights, shifted)))
    if tp_group.size() > 1:
        dist.all_reduce(sums, group=tp_group)
    target, total, weighted = sums
    log_total = total.log()
    return target - log_total, largest + log_total, log_total - weighted / total
