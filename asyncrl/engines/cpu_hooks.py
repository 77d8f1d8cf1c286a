"""What an SGLang server on a CPU does differently under asyncrl; `plugin.activate` registers it.

* Processes are forked, not spawned: SGLang's imports take 15 CPU seconds, and a spawned child repeats them.
  The launcher is single-threaded when it forks, and there is no device context to lose.
* A prompt is prefilled once per sample group. All samples of a group arrive together, and SGLang would
  prefill each of them before the first is in the prefix cache, which costs a CPU more than the sampling.
* A decode step attends for the whole batch at once (`cpu_attention`).
* Seeded sampling is allowed with the torch-native attention backend.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups import choices
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from asyncrl.engines.cpu_attention import decode_attention

MIN_SHARED_TOKENS = 8
"""Fewer tokens are cheaper to compute twice than to wait for."""

_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def activate() -> None:
    """Register the hooks of a CPU server."""
    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    # Its operators are Triton kernels. Without them a seed fixes the random numbers, not the last bit of
    # the logits they are compared with, which on a CPU depends on the size of the batch.
    HookRegistry.register(
        "sglang.srt.batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode",
        lambda *args, **kwargs: None,
        HookType.REPLACE,
    )
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER)
    HookRegistry.register(f"{_ADDER}.add_one_req", _wait_for_shared_prefix, HookType.AROUND)
    HookRegistry.register(f"{_ATTENTION}._run_sdpa_forward_decode", _decode, HookType.AROUND)


def _fork(result: None, *args: Any, **kwargs: Any) -> None:
    if threading.active_count() == 1:
        multiprocessing.set_start_method("fork", force=True)


def _wait_for_shared_prefix(
    original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """Leave a request in the queue while this very batch computes most of what it needs.

    It is offered again for the next batch, when those keys and values are in the cache.
    """
    from sglang.srt.managers.schedule_policy import AddReqResult

    if not adder.tree_cache.disable:
        token_ids = req.full_untruncated_fill_ids
        most = (req.prefix_len + len(token_ids)) // 2 + 1  # more than half of what is not cached yet
        if most - req.prefix_len >= MIN_SHARED_TOKENS and any(
            other.full_untruncated_fill_ids[:most] == token_ids[:most] for other in adder.can_run_list
        ):
            return AddReqResult.CONTINUE
    return original(adder, req, *args, **kwargs)


def _decode(
    original: Callable[..., torch.Tensor],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """`decode_attention` into ``output``; encoders and sliding windows are left to SGLang."""
    if encoder_lens is None and sliding_window_size is None:
        output.copy_(
            decode_attention(query, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, scaling)
        )
        return output
    return original(
        backend,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        encoder_lens,
        scaling=scaling,
        sliding_window_size=sliding_window_size,
        **kwargs,
    )
