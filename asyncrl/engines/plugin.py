"""What asyncrl adds to SGLang, through SGLang's own plugin hooks; activated in every process of a server.

    POST /update_weights_from_distributed, load_format "asyncrl"
        -> on every tensor-parallel rank: Receiver.connect, .receive into the rank's own parameters, or .take
        -> 200, or 400 with the reason, on all ranks alike
    POST /init_weights_update_group, backend "asyncrl"
        -> on every tensor-parallel rank: Receiver.stage or .link, which return at once

* The order (action, version, plan hash, deadline) travels as JSON in the request's only name; those that
  return at once in the address of the other request, because SGLang lets no other one through while it
  samples. No tensor passes through SGLang's loader: a rank receives the bytes of its own shard and nothing
  else.
* Joining a weight group has a deadline of ours; SGLang's would block the scheduler for half an hour.
* On a CPU there is more to change: `cpu_hooks`.

A hook that SGLang could not apply is only a line in its log, so the launcher asks `require_hooks`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from asyncrl.engines import cpu_hooks

LOAD_FORMAT = "asyncrl"
CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"
JOIN_TIMEOUT_VARIABLE = "ASYNCRL_JOIN_TIMEOUT_S"
DEFAULT_JOIN_TIMEOUT_S = 120.0

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_HOOKED_METHODS = (
    "init_weights_update_group",
    "receive_weights_from_distributed",
    "destroy_weights_update_group",
)

_activated = False
_num_senders: dict[str, int] = {}  # weight group -> ranks before the engine's own
_receivers: dict[str, Any] = {}  # weight group -> Receiver, from "connect" on


@dataclass(frozen=True, slots=True)
class Order:
    """One step of a transfer, as `SGLangEngine.receive_weights` sends it."""

    action: str
    version: int
    plan_hash: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Receive a version beside the live weights, as `SGLangEngine.stage_weights` sends it."""

    place: Any  # asyncrl.weights.second_copy.Place
    version: int
    plan_hash: str
    timeout_s: float


def activate() -> None:
    """Register the hooks; SGLang applies them when it loads its plugins. Idempotent."""
    global _activated
    if _activated:
        return
    _activated = True
    HookRegistry.register(f"{_UPDATER}.init_weights_update_group", _join, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.receive_weights_from_distributed", _receive, HookType.AROUND)
    HookRegistry.register(f"{_UPDATER}.destroy_weights_update_group", _leave, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.utils.common.init_custom_process_group", _with_join_timeout, HookType.BEFORE
    )
    if os.environ.get(CPU_VARIABLE) == "1":
        cpu_hooks.activate()


def require_hooks() -> None:
    """Check that SGLang applied the hooks.

    Raises:
        RuntimeError: it did not; this SGLang differs from the version that asyncrl was written for.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    missing = [name for name in _HOOKED_METHODS if not hasattr(vars(WeightUpdater)[name], "__wrapped__")]
    if missing:
        raise RuntimeError(
            f"SGLang did not apply asyncrl's hooks on WeightUpdater ({', '.join(missing)});"
            " install sglang 0.5.23"
        )


def _join(
    original: Callable[..., Any],
    updater: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str,
) -> tuple[bool, str]:
    """Remember how many ranks of a weight group are senders, those before the engine's; or carry out an order
    that returns at once."""
    if backend == LOAD_FORMAT:
        return _begin(json.loads(master_address), group_name)
    success, message = original(
        updater, master_address, master_port, rank_offset, world_size, group_name, backend
    )
    if success:
        _num_senders[group_name] = rank_offset
    return success, message


def _begin(fields: dict[str, Any], group_name: str) -> tuple[bool, str]:
    action = fields.pop("action")
    if group_name not in _receivers:
        return False, f"weight group {group_name} is not connected; send action connect first"
    receiver = _receivers[group_name]
    if action == "link":
        return _link(receiver, fields)
    order = StageOrder(**fields)
    try:
        receiver.stage(order.version, order.plan_hash, order.timeout_s, order.place)
    except RuntimeError as error:
        return False, str(error)
    return True, f"version {order.version} arrives"


def _link(receiver: Any, fields: dict[str, Any]) -> tuple[bool, str]:
    from sglang.srt.runtime_context import get_parallel

    from asyncrl.weights.routes import LinkOrder

    order = LinkOrder(**fields)
    receiver.link(order, get_parallel().tp_group.rank_in_group)
    return True, f"link {order.number} is joined"


def _leave(original: Callable[..., Any], updater: Any, group_name: str) -> Any:
    receiver = _receivers.pop(group_name, None)
    if receiver is not None:
        receiver.close()
    _num_senders.pop(group_name, None)
    return original(updater, group_name)


def _receive(
    original: Callable[..., Any],
    updater: Any,
    *,
    names: list[str],
    dtypes: list[str],
    shapes: list[list[int]],
    group_name: str,
    load_format: str | None = None,
) -> Any:
    """Carry an order out; returns no tensors, so that SGLang has nothing left to load."""
    if load_format != LOAD_FORMAT:
        return original(
            updater,
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            group_name=group_name,
            load_format=load_format,
        )
    order = Order(**json.loads(names[0]))
    if group_name not in _num_senders:
        raise RuntimeError(f"this engine is not in weight group {group_name}; join it first")
    if order.action == "connect":
        _receivers[group_name] = _connect(
            dict(updater.get_model().named_parameters()),
            updater._model_update_group[group_name],
            _num_senders[group_name],
            order.timeout_s,
        )
    elif group_name not in _receivers:
        raise RuntimeError(f"weight group {group_name} is not connected; send action connect first")
    else:
        _bring(order, _receivers[group_name], updater.get_model())
    return []


def _bring(order: Order, receiver: Any, model: torch.nn.Module) -> None:
    """One version into the live parameters, and into what the model derives from them, in place."""
    from sglang.srt.model_loader.loader import post_load_weights

    if torch.cuda.is_available():
        torch.cuda.synchronize()  # an engine that was paused in place may still compute its last step
    if order.action == "take":
        receiver.take(order.version, order.timeout_s)
    else:
        receiver.receive(order.version, order.plan_hash, order.timeout_s)
    post_load_weights(model)  # latent attention: w_kc and w_vc, which are no parameters
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the next step is computed on another stream


def _connect(
    parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup, num_senders: int, timeout_s: float
) -> Any:
    # Imported here because only the processes that hold weights need the extension.
    from asyncrl.weights.receiver import Receiver

    receiver = Receiver(parameters, group, tuple(range(num_senders)), _all_ranks_agree)
    receiver.connect(timeout_s)
    return receiver


def _all_ranks_agree(agreed: bool) -> bool:
    """Whether every tensor-parallel rank of this engine agreed."""
    from sglang.srt.runtime_context import get_parallel

    flag = torch.tensor([int(agreed)], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=get_parallel().tp_group.cpu_group)
    return bool(flag.item())


def _with_join_timeout(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    seconds = float(os.environ.get(JOIN_TIMEOUT_VARIABLE, DEFAULT_JOIN_TIMEOUT_S))
    return args, {**kwargs, "timeout": timedelta(seconds=seconds)}
