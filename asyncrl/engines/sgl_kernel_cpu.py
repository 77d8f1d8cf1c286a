"""The part of `sgl_kernel` that SGLang's torch-native CPU path needs, in plain torch.

`sgl_kernel` has no wheel for CPUs. SGLang with the torch-native attention backend imports a handful of its
names there and calls two of them: the copy of new cache locations into the request table, and the hash
behind seeded sampling. `install` provides those two; the names that are only imported raise when called;
every other name is absent, so that a path that needs it fails with an ImportError that says which.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import NoReturn

import torch

# Imported by SGLang's speculative decoding and cache moves, which the CPU engine never runs.
_IMPORTED_ONLY = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)

_MASK = 0xFFFFFFFF
_library: torch.library.Library | None = None  # keeps the operator registered


def install() -> bool:
    """Register the stand-in as module `sgl_kernel` where the real one is absent; say whether it did."""
    if "sgl_kernel" in sys.modules or importlib.util.find_spec("sgl_kernel") is not None:
        return False
    module = types.ModuleType("sgl_kernel", __doc__)
    # importlib.util.find_spec refuses a module without a spec.
    module.__spec__ = importlib.util.spec_from_loader("sgl_kernel", loader=None)
    contents: dict[str, object] = {name: _unavailable(name) for name in _IMPORTED_ONLY}
    contents["assign_req_to_token_pool_cpu"] = assign_req_to_token_pool
    vars(module).update(contents)
    sys.modules["sgl_kernel"] = module
    _register_hash_operator()
    return True


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write request i's next cache locations into ``req_to_token[req_pool_indices[i], start_i:end_i]``.

    ``req_to_token`` is [max_requests, pool_len], the index tensors [num_requests], and ``out_cache_loc`` the
    locations of all requests one after the other.
    """
    locations = out_cache_loc.to(req_to_token.dtype)
    lengths = end_offset - start_offset
    if bool((lengths == 1).all()):
        req_to_token[req_pool_indices, start_offset] = locations[: len(lengths)]
        return
    taken = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        req_to_token[row, start:end] = locations[taken : taken + end - start]
        taken += end - start


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit, hash seed 0) of the 16 bytes (seed: 8, position: 4, column: 4).

    ``seed`` and ``positions`` are [n], ``columns`` [m]; returns uint32 [n, m]. The same words in the same
    order as SGLang's Triton kernel hashes on GPUs, so that a seed draws the same tokens there.
    """
    wide_seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    rows = (wide_seed & _MASK, (wide_seed >> 32) & _MASK, positions.to(torch.int64) & _MASK)
    state = torch.zeros((len(seed), 1), dtype=torch.int64)
    for word in rows:
        state = _mix(state, word[:, None])
    state = _mix(state, (columns.to(torch.int64) & _MASK)[None, :]) ^ 16
    state = _multiply(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _multiply(_rotate(_multiply(word, 0xCC9E2D51), 15), 0x1B873593)
    return (_multiply(_rotate(state ^ word, 13), 5) + 0xE6546B64) & _MASK


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _multiply(value: torch.Tensor, factor: int) -> torch.Tensor:
    """``value * factor`` modulo 2**32 of int64 tensors below 2**32, without leaving 63 bits."""
    low = (value & 0xFFFF) * factor
    high = ((value >> 16) * factor) & 0xFFFF
    return (low + (high << 16)) & _MASK


def _unavailable(name: str) -> Callable[..., NoReturn]:
    def raise_unavailable(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU version here; turn off the SGLang feature that calls it"
        )

    return raise_unavailable


def _register_hash_operator() -> None:
    global _library
    library = torch.library.Library("sgl_kernel", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(  # type: ignore[no-untyped-call]
        "murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor"
    )
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")  # type: ignore[no-untyped-call]
    _library = library
