"""Four ranks of the checkpoint test: save under one layout, resume under another, and write what was seen.

DIRECTORY/cases.json: {"port": where they meet, "models": two directories, "cases": {name: sizes}}
DIRECTORY/NAME.RANK.json: what a rank saw
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from asyncrl.algo.learning_rate import LrSchedule
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.hf import local
from asyncrl.weights.layout import hf_tensors, matrix_shape
from megatron_ext.checkpoint import latest, load, save
from megatron_ext.optimizer import OptimizerSettings
from megatron_ext.parallel import ParallelLayout, RankInfo, initialize, shutdown
from megatron_ext.policy import MegatronPolicy, StepStats
from tests.distributed.forked import fork_roles, torchrun_roles
from tests.distributed.parity_worker import weighted_nll
from tests.distributed.sequences import make_sequences, micro_batches

SETTINGS = OptimizerSettings(LrSchedule(1e-3, warmup_steps=3), weight_decay=0.01, clip_grad=0.5)


def full_tensors(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """Every Hugging Face tensor as a matrix, put together from the blocks of all ranks."""
    tensors = policy.tensors()
    whole = {
        name: torch.full(matrix_shape(shape), -torch.inf)
        for name, shape in hf_tensors(policy.geometry).items()
    }
    for shard in policy.layouts():
        matrix = tensors[shard.name].view(shard.rows, shard.cols)
        for block in shard.blocks:
            rows, cols = slice(block.row, block.row + block.rows), slice(block.col, block.col + block.cols)
            whole[block.tensor][rows, cols] = local(matrix, block).float()
    for matrix in whole.values():
        dist.all_reduce(matrix, op=dist.ReduceOp.MAX)
    return whole


def build(model_dir: Path, layout: ParallelLayout) -> tuple[MegatronPolicy, RankInfo]:
    info = initialize(layout, seed=1, timeout_s=120)
    geometry = ModelGeometry.from_hf(model_dir)
    return MegatronPolicy.build(model_dir, geometry, layout, torch.float32, SETTINGS), info


def step(policy: MegatronPolicy, info: RankInfo, step_idx: int) -> StepStats:
    sequences = make_sequences(step_idx, policy.geometry.vocab_size)
    return policy.train_step(micro_batches(sequences, policy.layout, info.dp_rank), weighted_nll)


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def run_case(
    models: tuple[Path, Path], directory: Path, sizes: dict[str, dict[str, int]]
) -> dict[str, object]:
    before, info = build(models[0], ParallelLayout(**sizes["save"]))
    for step_idx in range(2):
        step(before, info, step_idx)
    common = {"policy_version": 2, "cursors": [3, 4]}
    save(before, directory, common)
    saved = full_tensors(before)
    expected = step(before, info, 2)
    expected_after = full_tensors(before)
    del before

    after, info = build(models[1], ParallelLayout(**sizes["load"]))
    path = latest(directory)
    assert path is not None
    restored = load(after, path)
    loaded = full_tensors(after)
    actual = step(after, info, 2)
    return {
        "common_is_same": restored == common,
        "processes_left": [child.cmdline() for child in psutil.Process().children()],
        "num_updates": after.num_updates,
        "loaded_difference": largest_difference(saved, loaded),
        "losses": [expected.loss, actual.loss],
        "grad_norms": [expected.grad_norm, actual.grad_norm],
        "learning_rates": [expected.learning_rate, actual.learning_rate],
        "next_difference": largest_difference(expected_after, full_tensors(after)),
    }


def run_cases(directory: Path) -> None:
    told = json.loads((directory / "cases.json").read_text())
    models = Path(told["models"][0]), Path(told["models"][1])
    for name, sizes in told["cases"].items():
        result = run_case(models, directory / name, sizes)
        (directory / f"{name}.{dist.get_rank()}.json").write_text(json.dumps(result))
    shutdown()


if __name__ == "__main__":
    into = Path(sys.argv[1])
    port = json.loads((into / "cases.json").read_text())["port"]
    fork_roles(torchrun_roles(4, port, partial(run_cases, into)), into)
