"""Every layout trains as a plain transformers model with torch's AdamW does: losses, gradient norms, logprobs.

The reference shares no code with the trainer: sequences one by one through the Hugging Face model, autograd,
`torch.optim.AdamW`, `clip_grad_norm_`. Sequences have unequal lengths, micro-batches unequal token counts, and
one replica an empty micro-batch; so a mean of means, a division by DP or CP, or a norm counted twice shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.launch import launch
from tests.distributed.sequences import make_sequences
from tests.tiny_models import DEFAULT_VOCAB, Kind, make_tiny

WORKER = Path(__file__).with_name("parity_worker.py")
NUM_STEPS = 5
TEMPERATURE = 0.8
TOLERANCE = 1e-5

CASES: dict[str, dict[str, object]] = {
    "tp2_dp2": {"tp": 2, "dp": 2},
    "tp2_sp_dp2": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "pp2_dp2": {"pp": 2, "dp": 2},
    "pp2_vpp2_dp2": {"pp": 2, "vpp": 2, "dp": 2},
    "cp2_dp2": {"cp": 2, "dp": 2},
    "dp4": {"dp": 4},
    "dp4_plain_optimizer": {"dp": 4, "distributed_optimizer": False},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_sp_cp2": {"tp": 2, "cp": 2, "sequence_parallel": True},
    "pp2_cp2": {"pp": 2, "cp": 2},
    "tp4_fewer_kv_heads": {"tp": 4},
}


@dataclass(frozen=True)
class Trajectory:
    losses: list[float]
    grad_norms: list[float]
    logprobs: list[np.ndarray]  # of the batch after the last step, per sequence [T]


def reference(model_dir: Path) -> Trajectory:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    plain = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}],
        lr=2e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
    )

    def logprobs_of(sequence) -> torch.Tensor:
        token_ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        logits = model(token_ids[None]).logits[0, :-1].float() / TEMPERATURE
        picked = logits.log_softmax(-1).gather(1, token_ids[1:, None]).squeeze(1)
        return torch.cat((torch.zeros(1), picked)) * torch.from_numpy(sequence.loss_mask.astype(np.float32))

    losses, grad_norms = [], []
    for step_idx in range(NUM_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for sequence in make_sequences(step_idx, DEFAULT_VOCAB):
            weights = torch.from_numpy(sequence.loss_weights * sequence.advantages)
            loss = -(weights * logprobs_of(sequence)).sum()
            loss.backward()
            total += float(loss)
        losses.append(total)
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    with torch.no_grad():
        logprobs = [logprobs_of(sequence).numpy() for sequence in make_sequences(NUM_STEPS, DEFAULT_VOCAB)]
    return Trajectory(losses, grad_norms, logprobs)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Both launches: every layout of a tied Llama on four ranks; one rank with each family."""
    directory = tmp_path_factory.mktemp("parity")
    llama = make_tiny("llama", directory / "llama", seed=3, num_layers=4, tied=True)
    launch(WORKER, 4, llama, directory, json.dumps(CASES))
    return directory


@pytest.fixture(scope="module")
def llama_reference(results: Path) -> Trajectory:
    return reference(results / "llama")


@pytest.mark.parametrize("case", CASES)
def test_layout_trains_as_the_reference(case: str, results: Path, llama_reference: Trajectory) -> None:
    replicas = CASES[case].get("dp", 1)
    for rank in range(4):
        seen = json.loads((results / f"{case}.{rank}.json").read_text())
        assert_trajectory(f"{case} rank {rank}", seen, replicas, llama_reference)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_family_trains_as_the_reference(kind: Kind, tmp_path: Path) -> None:
    model_dir = make_tiny(kind, tmp_path / "model", seed=5, tied=kind == "qwen2")
    launch(WORKER, 1, model_dir, tmp_path, json.dumps({"one": {}}))
    seen = json.loads((tmp_path / "one.0.json").read_text())
    assert_trajectory(kind, seen, 1, reference(model_dir))


def assert_trajectory(what: str, seen: dict, replicas: int, expected: Trajectory) -> None:
    """Name the first step or token that differs."""
    for key, values in (("losses", expected.losses), ("grad_norms", expected.grad_norms)):
        for step_idx, (actual, value) in enumerate(zip(seen[key], values, strict=True)):
            assert actual == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), f"{what} {key}[{step_idx}]"
    sequences = expected.logprobs[seen["dp_rank"] :: replicas]
    for idx, (actual, values) in enumerate(zip(seen["logprobs"], sequences, strict=True)):
        worst = int(np.abs(np.asarray(actual) - values).argmax())
        assert actual[worst] == pytest.approx(values[worst], abs=5e-5), f"{what} sequence {idx} token {worst}"
