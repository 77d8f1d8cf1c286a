"""Write tests/unit/golden_vectors.json: what verl and TRL compute on one small batch, to compare ours with.

    python -m venv /tmp/golden && . /tmp/golden/bin/activate
    pip install verl==0.9.1 trl==1.16.0 torch==2.13.0
    python scripts/golden_vectors.py

It runs in an environment of its own, because neither package is needed to train or to test; the file records
their versions. The batch is 2 groups of 3 responses of unequal length, in float64.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

if torch.version.cuda is None:
    # torchvision's CUDA wheel beside a CPU build of torch: its import only has to find these schemas.
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )

from trl import GRPOTrainer
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

OUTPUT = Path(__file__).resolve().parents[1] / "tests" / "unit" / "golden_vectors.json"
LENGTHS = (2, 9, 5, 1, 7, 4)
REWARDS = (1.0, 0.0, 0.5, 0.0, 0.0, 1.0)
GROUPS = np.array([0, 0, 0, 1, 1, 1])
CONSTANT_TOKENS = 12

Loss = Callable[..., tuple[torch.Tensor, dict[str, Any]]]
OBJECTIVES: dict[str, tuple[Loss, dict[str, float]]] = {
    "ppo_clip": (
        core_algos.compute_policy_loss_vanilla,
        {"clip_low": 0.1, "clip_high": 0.3, "clip_dual": 1.5},
    ),
    "gspo": (core_algos.compute_policy_loss_gspo, {"clip_low": 0.05, "clip_high": 0.1}),
    "cispo": (core_algos.compute_policy_loss_cispo, {"clip_low": 0.4, "clip_high": 0.2}),
    "sapo": (core_algos.compute_policy_loss_sapo, {"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05}),
}
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}


def main() -> None:
    batch = make_batch()
    golden = {
        "versions": {name: importlib.metadata.version(name) for name in ("verl", "trl", "torch")},
        "batch": {name: tensor.tolist() for name, tensor in batch.items()},
        "rewards": REWARDS,
        "groups": GROUPS.tolist(),
        "constant_tokens": CONSTANT_TOKENS,
        "objectives": objectives(batch),
        "weights": weights(batch),
        "rejection": rejection(batch),
        "advantages": advantages(batch),
        "gae": gae(batch),
        "kl": kl(batch),
    }
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in golden.items())
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (len(LENGTHS), max(LENGTHS))

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    behav = -normal(1.0).abs() - 0.05
    prox = behav + normal(0.3)
    return {
        "mask": (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).double(),
        "behav_logprobs": behav,
        "prox_logprobs": prox,
        "logprobs": prox + normal(0.3),
        "advantages": normal(1.0)[:, :1].expand(shape).contiguous(),
        "values": normal(1.0),
    }


def objectives(batch: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Loss and gradient of every objective under every aggregation, weighted by truncated importance."""
    cases = []
    for name, (loss_of, settings) in OBJECTIVES.items():
        for aggregation, mode in AGGREGATIONS.items():
            if name == "sapo" and aggregation != "sequence_mean":
                continue  # verl's has one aggregation
            logprobs = batch["logprobs"].clone().requires_grad_()
            loss, _ = loss_of(
                old_log_prob=batch["prox_logprobs"],
                log_prob=logprobs,
                advantages=batch["advantages"],
                response_mask=batch["mask"],
                loss_agg_mode=mode,
                config=actor_config(settings),
                rollout_is_weights=importance(batch, "token", 2.0),
            )
            (gradient,) = torch.autograd.grad(loss, logprobs)
            settings_of_ours = {"objective": name, "aggregation": aggregation, "is_cap": 2.0, **settings}
            cases.append({"settings": settings_of_ours, "loss": loss.item(), "gradient": gradient.tolist()})
    return cases


def actor_config(settings: dict[str, float]) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=settings.get("clip_low", 0.2),
        clip_ratio_high=settings.get("clip_high", 0.2),
        clip_ratio_c=settings.get("clip_dual", 3.0),
        tau_pos=settings.get("sapo_tau_positive", 1.0),
        tau_neg=settings.get("sapo_tau_negative", 1.05),
        global_batch_info={"loss_scale_factor": CONSTANT_TOKENS},
    )


def importance(batch: dict[str, torch.Tensor], level: str, cap: float | str) -> torch.Tensor:
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
        batch["prox_logprobs"] - batch["behav_logprobs"], batch["mask"], level, cap
    )
    return weights


def weights(batch: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    cases: list[tuple[dict[str, Any], str, float | str]] = [
        ({"correction": "truncated_is", "is_cap": 1.2}, "token", 1.2),
        ({"correction": "sequence_truncated_is", "is_cap": 1.2}, "sequence", 1.2),
        ({"rejection": "token", "reject_low": 0.8, "reject_high": 1.3}, "token", "0.8_1.3"),
    ]
    return [
        {"settings": settings, "weights": importance(batch, level, cap).tolist()}
        for settings, level, cap in cases
    ]


def rejection(batch: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The mask that is left: verl's bounds on the geometric mean, TRL's off-policy sequences."""
    geometric, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        batch["prox_logprobs"] - batch["behav_logprobs"], batch["mask"], "seq_mean_k1", "0.9_1.1"
    )
    keep = GRPOTrainer.get_off_policy_mask(
        batch["advantages"][:, :1], batch["logprobs"], batch["behav_logprobs"], batch["mask"], 0.05
    )
    return [
        {
            "settings": {"rejection": "geometric", "reject_low": 0.9, "reject_high": 1.1},
            "mask": geometric.tolist(),
        },
        {
            "settings": {"rejection": "off_policy_sequence", "reject_kl": 0.05},
            "mask": (batch["mask"] * keep).tolist(),
        },
    ]


def advantages(batch: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Of each response, at its first token."""
    mask = batch["mask"]

    def rewards() -> torch.Tensor:  # a new one each time: verl changes it in place
        return torch.zeros_like(mask).index_put(
            (torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1), torch.tensor(REWARDS).double()
        )

    grpo = core_algos.compute_grpo_outcome_advantage
    results = {
        "grpo": grpo(rewards(), mask, GROUPS),
        "dr_grpo": grpo(rewards(), mask, GROUPS, norm_adv_by_std_in_grpo=False),
        "rloo": core_algos.compute_rloo_outcome_advantage(rewards(), mask, GROUPS),
        "whitened": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            rewards(), mask, GROUPS
        ),
    }
    return {name: result[0][:, 0].tolist() for name, result in results.items()}


def gae(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of the longest response; the return minus the value, because verl whitens the advantage."""
    row = LENGTHS.index(max(LENGTHS))
    rewards = torch.zeros_like(batch["mask"][row : row + 1])
    rewards[0, -1] = 1.0
    values = batch["values"][row : row + 1]
    _, returns = core_algos.compute_gae_advantage_return(
        rewards, values, torch.ones_like(rewards), torch.tensor(0.99), torch.tensor(0.9)
    )
    return {
        "gamma": 0.99,
        "lam": 0.9,
        "values": values[0].tolist(),
        "advantages": (returns - values)[0].tolist(),
    }


def kl(batch: dict[str, torch.Tensor]) -> dict[str, list[list[float]]]:
    return {
        kind: core_algos.kl_penalty_forward(batch["logprobs"], batch["behav_logprobs"], kind).tolist()
        for kind in ("k1", "k2", "k3")
    }


if __name__ == "__main__":
    main()
