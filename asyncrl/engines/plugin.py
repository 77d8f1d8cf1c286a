"""What asyncrl adds to SGLang, through SGLang's own plugin hooks; activated in every process of a server.

    POST /update_weights_from_distributed, load_format "asyncrl": new live weights, while the engine is paused
        -> on every tensor-parallel rank: Receiver.receive or .take, or peers.take
    POST /init_weights_update_group, backend "asyncrl": what an engine does while it samples
        -> on every tensor-parallel rank: Receiver.connect; Receiver.stage or .link, peers.give, which return
           at once
    -> 200, or 400 with the reason, on all ranks alike

* The order travels as JSON in the first request's only name; in the address of the second, which SGLang lets
  through while it samples, and no other. No tensor passes through SGLang's loader: a rank receives the bytes
  of its own shard and nothing else.
* Joining a weight group has a deadline of ours; SGLang's would block the scheduler for half an hour.
* On a CPU there is more to change: `cpu_hooks`.

A hook that SGLang could not apply is only a line in its log, so the launcher asks `require_hooks`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
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
    """One step of a transfer, as `SGLangEngine` sends it; what an action does not need is left out."""

    action: str
    version: int
    timeout_s: float
    plan_hash: str = ""  # connect, publish, take, stage
    place: Any = ""  # stage: asyncrl.weights.second_copy.Place
    host: str = ""  # give: where the other engine reaches this one
    address: str = ""  # refill: where the ranks of the other engine wait
    link: Any = None  # link: the fields of asyncrl.weights.routes.LinkOrder


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
    """Remember how many ranks of a weight group are senders: those before the engine's; or obey an order."""
    if backend == LOAD_FORMAT:
        return _obey(Order(**json.loads(master_address)), updater, group_name)
    success, message = original(
        updater, master_address, master_port, rank_offset, world_size, group_name, backend
    )
    if success:
        _num_senders[group_name] = rank_offset
    return success, message


def _obey(order: Order, updater: Any, group_name: str) -> tuple[bool, str]:
    """Carry out an order while the engine samples; an order that fails leaves the engine as it was."""
    actions = {"connect": _connect, "stage": _stage, "give": _give, "link": _link}
    if order.action not in actions:
        return False, f"no action {order.action}; there are {', '.join(actions)}"
    try:
        return True, actions[order.action](order, updater, group_name)
    except RuntimeError as error:
        return False, str(error)


def _connect(order: Order, updater: Any, group_name: str) -> str:
    # Imported here because only the processes that hold weights need the extension.
    from asyncrl.weights.receiver import Receiver

    _require_joined(group_name)
    receiver = Receiver(
        dict(updater.get_model().named_parameters()),
        updater._model_update_group[group_name],
        tuple(range(_num_senders[group_name])),
        _all_ranks_agree,
    )
    receiver.connect(order.timeout_s)
    _receivers[group_name] = receiver
    return "connected"


def _stage(order: Order, updater: Any, group_name: str) -> str:
    _require_connected(group_name)
    _receivers[group_name].stage(order.version, order.plan_hash, order.timeout_s, order.place)
    return f"version {order.version} arrives"


def _link(order: Order, updater: Any, group_name: str) -> str:
    from asyncrl.weights.routes import LinkOrder

    _require_connected(group_name)
    link = LinkOrder(**order.link)
    _receivers[group_name].link(link, updater.tp_rank)
    return f"link {link.number} is joined"


def _give(order: Order, updater: Any, group_name: str) -> str:
    """Returns the port at which the ranks of the other engine are expected."""
    from sglang.srt.runtime_context import get_parallel

    from asyncrl.weights import peers

    port, _ = peers.give(
        dict(updater.get_model().named_parameters()),
        order.host,
        group_name,
        order.version,
        tp_rank=updater.tp_rank,
        tp_size=get_parallel().tp_group.world_size,
        total=lambda number: _over_ranks(number, dist.ReduceOp.SUM),
        timeout_s=order.timeout_s,
    )
    return str(port)


def _require_joined(group_name: str) -> None:
    if group_name not in _num_senders:
        raise RuntimeError(f"this engine is not in weight group {group_name}; join it first")


def _require_connected(group_name: str) -> None:
    if group_name not in _receivers:
        raise RuntimeError(f"weight group {group_name} is not connected; send action connect first")


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
    try:
        _bring(order, updater, group_name)
    except RuntimeError:
        if order.action == "publish" and group_name in _receivers:
            # The group is broken. Senders that wait for this engine notice at once, not at their deadline.
            updater.destroy_weights_update_group(group_name)
        raise
    return []


def _bring(order: Order, updater: Any, group_name: str) -> None:
    """One version into the live parameters, and into what the model derives from them, in place."""
    from sglang.srt.model_loader.loader import post_load_weights

    model = updater.get_model()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # an engine that was paused in place may still compute its last step
    if order.action == "refill":
        _take_from_peer(order, model, group_name, updater.tp_rank)
    else:
        _require_joined(group_name)
        _require_connected(group_name)
        if order.action == "take":
            _receivers[group_name].take(order.version, order.timeout_s)
        else:
            _receivers[group_name].receive(order.version, order.plan_hash, order.timeout_s)
    post_load_weights(model)  # latent attention: w_kc and w_vc, which are no parameters
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the next step is computed on another stream


def _take_from_peer(order: Order, model: torch.nn.Module, group_name: str, tp_rank: int) -> None:
    from asyncrl.weights import peers

    peers.take(
        dict(model.named_parameters()),
        order.address,
        group_name,
        order.version,
        tp_rank=tp_rank,
        all_agree=_all_ranks_agree,
        timeout_s=order.timeout_s,
    )


def _all_ranks_agree(agreed: bool) -> bool:
    """Whether every tensor-parallel rank of this engine agreed."""
    return bool(_over_ranks(int(agreed), dist.ReduceOp.MIN))


def _over_ranks(number: int, reduce: Any) -> int:
    """Of the numbers of all tensor-parallel ranks of this engine."""
    from sglang.srt.runtime_context import get_parallel

    result = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(result, op=reduce, group=get_parallel().tp_group.cpu_group)
    return int(result.item())


def _with_join_timeout(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    seconds = float(os.environ.get(JOIN_TIMEOUT_VARIABLE, DEFAULT_JOIN_TIMEOUT_S))
    return args, {**kwargs, "timeout": timedelta(seconds=seconds)}
