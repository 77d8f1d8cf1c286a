"""Agreement among the trainer ranks, over the default process group: bytes in, bytes out, no pickle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from asyncrl.weights.geometry import ModelError
from asyncrl.weights.layout import ShardLayout
from asyncrl.weights.plan import RankLayout, decode_layout, encode_layout
from asyncrl.weights.wire import WeightUpdateError

Result = TypeVar("Result")


def collective_device() -> torch.device:
    """Where tensors must lie that the default group moves."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def gather_messages(message: bytes) -> list[bytes]:
    """Every trainer rank's message, on every trainer rank."""
    device = collective_device()
    world_size = dist.get_world_size()
    lengths = torch.zeros(world_size, dtype=torch.int64, device=device)
    lengths[dist.get_rank()] = len(message)
    dist.all_reduce(lengths)
    longest = int(lengths.max())
    if longest == 0:
        return [b""] * world_size
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    if message:
        padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    gathered = [torch.zeros_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded)
    return [bytes(row[:length].cpu().numpy()) for row, length in zip(gathered, lengths.tolist(), strict=True)]


def on_all_ranks(action: Callable[[], Result]) -> Result:
    """Run an action on every trainer rank and return its own result there.

    Raises:
        WeightUpdateError: on every rank, where the action failed on any; names the first rank and its reason.
    """
    failure: WeightUpdateError | ModelError | None = None
    try:
        result = action()
    except (WeightUpdateError, ModelError) as error:
        failure = error
    reasons = gather_messages(str(failure or "").encode())
    for rank, reason in enumerate(reasons):
        if reason:
            raise WeightUpdateError(f"trainer rank {rank}: {reason.decode()}") from failure
    return result


def exchange_layouts(
    shards: Sequence[ShardLayout], tensors: Sequence[torch.Tensor]
) -> tuple[RankLayout, ...]:
    """What every trainer rank holds, on every trainer rank; ``tensors[i]`` is laid out as ``shards[i]``."""
    own = RankLayout(tuple(shards), tuple(dtype_name(tensor.dtype) for tensor in tensors))
    return tuple(decode_layout(message) for message in gather_messages(encode_layout(own)))


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")
