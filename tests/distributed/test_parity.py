"""Every layout trains as a plain transformers model with torch's AdamW: losses, gradient norms, logprobs.

The reference shares no code with the trainer: sequences one by one through the Hugging Face model,
autograd, `torch.optim.AdamW`, `clip_grad_norm_`. Sequences have unequal lengths and share prompts,
micro-batches have unequal token counts, one replica has an empty one; so a mean of means, a division by DP
or CP, a norm counted twice, or a prompt that leaks into its neighbour shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.forked import run_launcher
from tests.distributed.sequences import make_sequences, replica_part
from tests.distributed.test_publish import reserved_ports
from tests.tiny_models import DEFAULT_VOCAB, Kind, make_tiny

NUM_STEPS = 5
TEMPERATURE = 0.8
TOLERANCE = 1e-5

FAMILIES: tuple[Kind, ...] = ("llama", "qwen2", "qwen3")
CASES: dict[str, dict[str, int]] = {
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
    model.get_input_embeddings().padding_idx = None  # it would drop the gradient of one token's embedding
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
            total += loss.item()
        losses.append(total)
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    with torch.no_grad():
        logprobs = [logprobs_of(sequence).numpy() for sequence in make_sequences(NUM_STEPS, DEFAULT_VOCAB)]
    return Trajectory(losses, grad_norms, logprobs)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout of a tied Llama on four ranks and, beside them, each family on one."""
    directory = tmp_path_factory.mktemp("parity")
    tied_llama = make_tiny("llama", directory / "model", seed=3, num_layers=4, tied=True)
    layouts = {name: {"model": str(tied_llama), "layout": layout} for name, layout in CASES.items()}
    families = {}
    for kind in FAMILIES:
        model_dir = make_tiny(kind, directory / f"model_{kind}", seed=5, tied=kind == "qwen2")
        families[kind] = {"model": str(model_dir), "layout": {}}
    with reserved_ports(2) as ports:
        told = {"ports": ports, "layouts": layouts, "families": families}
        (directory / "cases.json").write_text(json.dumps(told))
        run_launcher("tests.distributed.parity_worker", directory, timeout_s=400)
    return directory


@pytest.fixture(scope="module")
def expected(results: Path) -> Trajectory:
    return reference(results / "model")


@pytest.mark.parametrize("case", CASES)
def test_layout_trains_as_the_reference(case: str, results: Path, expected: Trajectory) -> None:
    for rank in range(4):
        seen = json.loads((results / f"{case}.{rank}.json").read_text())
        assert_trajectory(f"{case} rank {rank}", seen, CASES[case].get("dp", 1), expected)


@pytest.mark.parametrize("kind", FAMILIES)
def test_family_trains_as_the_reference(kind: Kind, results: Path) -> None:
    seen = json.loads((results / f"{kind}.0.json").read_text())
    assert_trajectory(kind, seen, 1, reference(results / f"model_{kind}"))


def assert_trajectory(what: str, seen: dict, replicas: int, expected: Trajectory) -> None:
    """Name the first step or token that differs."""
    for key, values in (("losses", expected.losses), ("grad_norms", expected.grad_norms)):
        for step_idx, (actual, value) in enumerate(zip(seen[key], values, strict=True)):
            assert actual == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), f"{what} {key}[{step_idx}]"
    sequences = replica_part(expected.logprobs, replicas, seen["dp_rank"])
    for idx, (actual, values) in enumerate(zip(seen["logprobs"], sequences, strict=True)):
        worst = int(np.abs(np.asarray(actual) - values).argmax())
        assert actual[worst] == pytest.approx(values[worst], abs=5e-5), f"{what} sequence {idx} token {worst}"
