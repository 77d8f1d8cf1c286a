"""AdamW over megatron's gradient buffers.

Gradients are summed in float32 over micro-batches, DP and CP and never divided: the loss weights
already divide by the global batch. megatron's `DistributedDataParallel` would divide by DP x CP, and
`finalize_model_grads` by a token count; per-token loss switches the first off, and leaving the token
count out the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from asyncrl.algo.learning_rate import LrSchedule
from megatron_ext.model import PolicyModel
from megatron_ext.parallel import ParallelLayout


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW."""

    schedule: LrSchedule
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0


def wrap_chunks(
    chunks: Sequence[PolicyModel], config: TransformerConfig, layout: ParallelLayout
) -> list[DistributedDataParallel]:
    """Give every chunk its gradient buffers (and, in bfloat16, its input and output casts)."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=layout.distributed_optimizer
    )
    modules = [Float16Module(config, chunk) if config.bf16 else chunk for chunk in chunks]
    config.finalize_model_grads_func = _finalize_sums
    return [
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=chunk_idx > 0)
        for chunk_idx, module in enumerate(modules)
    ]


def build_optimizer(
    chunks: Sequence[DistributedDataParallel],
    settings: OptimizerSettings,
    config: TransformerConfig,
    layout: ParallelLayout,
) -> MegatronOptimizer:
    """megatron's optimizer over the wrapped chunks; weights must be loaded before.

    Norms and biases do not decay.
    """
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=settings.schedule.peak,
        min_lr=0.0,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=layout.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(
        optimizer_config, list(chunks), get_standard_config_overrides(optimizer_config)
    )
    for group in optimizer.param_groups:
        # Only megatron's own scheduler, which is not used, would apply this.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        group["fused"] = True  # one pass over the state instead of ten
    return optimizer


def set_learning_rate(optimizer: MegatronOptimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _finalize_sums(model: list[Any], num_tokens: torch.Tensor | None = None, **groups: Any) -> None:
    """megatron's gradient reductions without its division by ``num_tokens``."""
    finalize_model_grads(model, None, **groups)
