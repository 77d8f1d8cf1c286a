"""The trainer's durable state: model, optimizer, random numbers, and what the caller adds.

    DIRECTORY/latest_checkpointed_iteration.txt     number of the newest complete checkpoint
    DIRECTORY/iter_0000012/                         megatron's distributed checkpoint
    DIRECTORY/iter_0000012/asyncrl.json             the caller's state: policy version, cursors, ledger

A checkpoint is written under a temporary name, renamed when every rank is done, and only then named in
the text file, itself replaced atomically: killed at any instant, the newest complete checkpoint stands.
Tensors are stored whole, not as shards of a layout, so any layout resumes from any other. All ranks must
see the same file system.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_ext.policy import MegatronPolicy

TRACKER = "latest_checkpointed_iteration.txt"
CALLER_STATE = "asyncrl.json"


class CheckpointError(RuntimeError):
    """A checkpoint is missing or does not fit; one line."""


def save(policy: MegatronPolicy, directory: Path, common: dict[str, Any], *, keep: int = 2) -> Path:
    """Write the state after ``policy.num_updates`` updates; collective. Returns the checkpoint's folder.

    Args:
        common: JSON-able, the same on every rank.
        keep: how many of the newest checkpoints stay.
    """
    final = directory / f"iter_{policy.num_updates:07d}"
    partial = final.with_suffix(".partial")
    is_writer = dist.get_rank() == 0
    if is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    _collect_in_this_process()
    dist_checkpointing.save(_sharded_state(policy, is_loading=False), str(partial))
    dist.barrier()
    if is_writer:
        state = {"num_updates": policy.num_updates, "layout": _layout_record(policy), "common": common}
        _write_durably(partial / CALLER_STATE, json.dumps(state))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _write_durably(directory / TRACKER, str(policy.num_updates))
        for old in sorted(directory.glob("iter_???????"))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def _collect_in_this_process() -> None:
    """What the writers of a save report goes into a queue of this process, which waits for them.

    Megatron's own queue, also good for saves that go on after the call, is served by one more process of
    every rank: it imports torch to hold the reports, which takes 5 s and 270 MB.
    """
    filesystem_async._results_queue = queue.Queue()  # new: a save that failed may have left a report


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint of a run, None if it has none.

    Raises:
        CheckpointError: the newest one is named but not there.
    """
    tracker = directory / TRACKER
    if not tracker.exists():
        return None
    path = directory / f"iter_{int(tracker.read_text()):07d}"
    if not (path / CALLER_STATE).exists():
        raise CheckpointError(f"{tracker} names {path.name}, which is not there; restore it or edit the file")
    return path


def load(policy: MegatronPolicy, path: Path) -> dict[str, Any]:
    """Restore a checkpoint's folder, written under any layout; collective. Returns the caller's state.

    Raises:
        CheckpointError: the folder holds no complete checkpoint.
    """
    if not (path / CALLER_STATE).exists():
        raise CheckpointError(f"{path}: no complete checkpoint ({CALLER_STATE} is missing)")
    record = json.loads((path / CALLER_STATE).read_text())
    request = _sharded_state(policy, is_loading=True)
    same_layout = record["layout"] == _layout_record(policy)
    if not same_layout:
        del request["rng"]  # belongs to a rank that no longer exists: keep what `initialize` seeded
    state = dist_checkpointing.load(request, str(path))
    for chunk_idx, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(state[f"model{chunk_idx}"])
    _load_optimizer(policy.optimizer, state["optimizer"])
    if same_layout:
        _set_rng_state(state["rng"])
    policy.num_updates = record["num_updates"]
    common: dict[str, Any] = record["common"]
    return common


def _sharded_state(policy: MegatronPolicy, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }
    models = {
        f"model{chunk_idx}": chunk.sharded_state_dict(metadata=metadata)
        for chunk_idx, chunk in enumerate(policy.chunks)
    }
    if is_loading:
        _allocate_optimizer_state(policy.optimizer)
    optimizer = policy.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = ShardedObject("asyncrl.rng", _rng_state(), (world_size,), (rank,), replica_id=0)
    return {**models, "optimizer": optimizer, "rng": rng}


def _layout_record(policy: MegatronPolicy) -> dict[str, int]:
    layout = policy.layout
    return {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "cp": layout.cp, "dp": layout.dp}


def _rng_state() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def _distributed_part(optimizer: ChainedOptimizer) -> DistributedOptimizer | None:
    """The distributed optimizer inside, where it runs torch's own AdamW (no Transformer Engine, no Apex)."""
    (part,) = optimizer.chained_optimizers
    is_torch = isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.AdamW)
    return part if is_torch else None


def _allocate_optimizer_state(optimizer: ChainedOptimizer) -> None:
    """Give a fresh AdamW the (zero) moments that a checkpoint is loaded into."""
    part = _distributed_part(optimizer)
    if part is None:
        return
    for group in part.optimizer.param_groups:
        for parameter in group["params"]:
            if not part.optimizer.state[parameter]:
                part.optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _load_optimizer(optimizer: ChainedOptimizer, state: dict[str, Any]) -> None:
    """megatron's load, mended for torch's AdamW under the distributed optimizer.

    AdamW keeps a step count per parameter. megatron stores one for all, gives every parameter the *same*
    tensor (so each update counts once per parameter), and then looks for one among the stored moments.
    """
    part = _distributed_part(optimizer)
    if part is None:
        optimizer.load_state_dict(state)
        return
    moments = state.pop("param_state")
    part.load_state_dict(state)
    states = part.optimizer.state
    steps = {parameter: states[parameter].pop("step") for parameter in states}
    part.load_parameter_state_from_fully_reshardable(moments)
    for parameter, step in steps.items():
        states[parameter]["step"] = step.clone()


def _write_durably(path: Path, text: str) -> None:
    """Replace a file's content in one step that survives a power cut."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
