"""RMSNorm for the local layer spec, under sequence parallelism too (megatron's own refuses it).

Under sequence parallelism each tensor-parallel rank normalises its own part of the tokens, so the
gradients of the (replicated) weight must be summed over the ranks: megatron does that for parameters
marked ``sequence_parallel``. q and k norms need no mark; megatron sums those by their name.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_options: object) -> None:
        super().__init__()
        self.eps = eps
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., hidden_size], any float dtype -> the same shape and dtype.

        The product with the weight is taken in the input's dtype, as the Hugging Face models do.
        """
        exact = hidden.float()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return (exact * scale).to(hidden.dtype) * self.weight
