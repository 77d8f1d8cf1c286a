"""Ranks of the parity test: train five steps under each layout in turn, and write what was seen.

DIRECTORY/cases.json: {"ports": two, "layouts": cases of four ranks, "families": cases of one}; a case has a
    name, the model's directory and the layout's sizes
DIRECTORY/NAME.RANK.json: what a rank saw
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch

from asyncrl.algo.inputs import ObjectiveInputs, ObjectiveOutput
from asyncrl.algo.learning_rate import LrSchedule
from asyncrl.weights.geometry import ModelGeometry
from megatron_ext.optimizer import OptimizerSettings
from megatron_ext.packing import unpack
from megatron_ext.parallel import ParallelLayout, initialize, shutdown
from megatron_ext.policy import MegatronPolicy
from tests.distributed.forked import fork_roles, torchrun_roles
from tests.distributed.sequences import make_sequences, micro_batches

NUM_STEPS = 5
TEMPERATURE = 0.8
SETTINGS = OptimizerSettings(LrSchedule(2e-4), beta2=0.95, weight_decay=0.01, clip_grad=0.5)


def weighted_nll(inputs: ObjectiveInputs) -> ObjectiveOutput:
    """A loss that follows every logprob: -sum of weight * advantage * logprob."""
    loss = -(inputs.loss_weights * inputs.advantages * inputs.logprobs).sum()
    sums = {"tokens": inputs.mask.sum().double(), "behav": inputs.behav_logprobs.double().sum()}
    return ObjectiveOutput(loss, sums)


def run_case(model_dir: Path, layout: ParallelLayout) -> dict[str, object]:
    info = initialize(layout, seed=1, timeout_s=120)
    geometry = ModelGeometry.from_hf(model_dir)
    policy = MegatronPolicy.build(model_dir, geometry, layout, torch.float32, SETTINGS)
    losses, grad_norms, tokens = [], [], []
    for step_idx in range(NUM_STEPS):
        batches = micro_batches(make_sequences(step_idx, geometry.vocab_size), layout, info.dp_rank)
        stats = policy.train_step(batches, weighted_nll, temperature=TEMPERATURE)
        losses.append(stats.loss)
        grad_norms.append(stats.grad_norm)
        tokens.append(stats.sums["tokens"])
    batches = micro_batches(make_sequences(NUM_STEPS, geometry.vocab_size), layout, info.dp_rank)
    logprobs = policy.compute_logprobs(batches, temperature=TEMPERATURE)
    return {
        "losses": losses,
        "grad_norms": grad_norms,
        "tokens": tokens,
        "dp_rank": info.dp_rank,
        "logprobs": [
            array.tolist()
            for batch, values in zip(batches, logprobs, strict=True)
            for array in unpack(batch, values)
        ],
    }


def run_cases(directory: Path, kind: str) -> None:
    for name, case in json.loads((directory / "cases.json").read_text())[kind].items():
        result = run_case(Path(case["model"]), ParallelLayout(**case["layout"]))
        path = directory / f"{name}.{torch.distributed.get_rank()}.json"
        path.write_text(json.dumps(result))
    shutdown()


if __name__ == "__main__":
    into = Path(sys.argv[1])
    ports = json.loads((into / "cases.json").read_text())["ports"]
    roles = torchrun_roles(4, ports[0], partial(run_cases, into, "layouts"))
    roles |= torchrun_roles(1, ports[1], partial(run_cases, into, "families"), "alone")
    fork_roles(roles, into)
