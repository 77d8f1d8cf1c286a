"""The few collectives of the training loop itself: small numbers and small JSON, never a pickle.

Every rank calls each of these in the same order; the time-out is that of the default process group, which
names the rank that did not come.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def device() -> torch.device:
    """Where tensors of the default process group must live."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sum_over_leaders(values: Sequence[float], is_leader: bool) -> list[float]:
    """Sum over the leaders of all replicas; on every rank. Float64, so integers stay exact up to 2**53."""
    tensor = torch.tensor(values if is_leader else [0.0] * len(values), dtype=torch.float64, device=device())
    dist.all_reduce(tensor)
    return [float(value) for value in tensor]


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Maximum over all ranks; on every rank."""
    tensor = torch.tensor(list(values), dtype=torch.float64, device=device())
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


def broadcast_json(value: Any) -> Any:
    """Rank 0's JSON value, on every rank (what the others pass is ignored)."""
    payload = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device())
    dist.broadcast(size, 0)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device())
    if payload:
        buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(buffer, 0)
    return json.loads(bytes(buffer.cpu().tolist()))
