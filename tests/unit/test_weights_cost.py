"""Costs worked out by hand, and `asyncrl plan weights` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl.cli import main
from asyncrl.weights.cost import COPY_BANDWIDTH, EngineTraffic, Estimate, Links, choose, estimate
from asyncrl.weights.model_plan import PlanRequest, plan_model
from asyncrl.weights.splits import EngineSplit, TrainerSplit
from tests.unit.model_sizes import reduced

MODELS = Path(__file__).parents[2] / "examples" / "models"
KEYS = (
    *("strategy", "received_over_needed", "send_max_over_mean", "stage_skew", "bound_s", "simulated_s"),
    *("gather_broadcast_s", "bucket_bytes", "staging_bytes", "num_communicators", "max_peers", "plan_hash"),
    "planning_s",
)


def traffic(pairs: list[tuple[int, int, int]], num_senders: int, num_receivers: int) -> EngineTraffic:
    """Of (sender, receiver, bytes); no imbalance is inherent."""
    sender, receiver, num_bytes = (np.array(column) for column in zip(*pairs, strict=True))
    sent = np.bincount(sender, weights=num_bytes, minlength=num_senders).astype(np.int64)
    received = np.bincount(receiver, weights=num_bytes, minlength=num_receivers).astype(np.int64)
    return EngineTraffic(sender, receiver, num_bytes, sent, received, 1.0)


def test_one_round_by_hand() -> None:
    """Two senders, one receiver, 2 x 500 kB: one round of 1 MB over 1 GB/s."""
    links = Links(1e9, 1e-3)
    found = estimate(traffic([(0, 0, 500_000), (1, 0, 500_000)], 2, 1), 1, links, "p2p")
    assert found.bound_s == pytest.approx(1e-3 + 1e-3)
    assert found.simulated_s == pytest.approx(2e-3 + 2 * 1e6 / COPY_BANDWIDTH)
    assert (found.num_rounds, found.bucket_bytes, found.staging_bytes) == (1, 1_000_000, 2_000_000)
    assert (found.num_communicators, found.max_peers) == (1, 2)


def test_copies_leave_by_p2p_only() -> None:
    """One sender, four replicas of two ranks, 1 GB each: 8 GB leave by p2p, 2 GB otherwise."""
    links = Links(1e9, 0.0)
    flow = traffic([(0, 0, 10**9), (0, 1, 10**9)], 1, 2)
    p2p, broadcast, relay = (estimate(flow, 4, links, name) for name in ("p2p", "broadcast", "relay"))
    assert p2p.bound_s == pytest.approx(8.0)
    assert broadcast.bound_s == pytest.approx(2.0, abs=1e-3) and relay.bound_s == pytest.approx(2.0)
    assert (p2p.num_communicators, broadcast.num_communicators, relay.num_communicators) == (4, 6, 6)
    assert (p2p.max_peers, broadcast.max_peers, relay.max_peers) == (8, 8, 8)
    for item in (p2p, broadcast, relay):
        assert item.bound_s <= item.simulated_s <= 1.1 * item.bound_s
    assert choose([p2p, broadcast, relay]) is broadcast


def test_rounds_are_limited_by_the_fullest_link() -> None:
    """Ten gigabytes, where sqrt(P alpha C / 2) is above 256 MiB: 38 rounds of 256 MiB or less."""
    found = estimate(traffic([(0, 0, 10**10)], 1, 1), 1, Links(50e9, 150e-6), "p2p")
    assert found.num_rounds == 38 and found.bucket_bytes <= 256 << 20
    assert found.simulated_s == pytest.approx(
        0.2 + found.num_rounds * 150e-6 + 2 * found.bucket_bytes / COPY_BANDWIDTH, rel=1e-6
    )


def test_an_earlier_strategy_wins_a_near_tie() -> None:
    def costing(strategy: str, seconds: float) -> Estimate:
        return Estimate(strategy, 1.0, seconds, 1, 1, 1, 1)

    assert choose([costing("p2p", 1.04), costing("relay", 1.0)]).strategy == "p2p"
    assert choose([costing("p2p", 1.06), costing("relay", 1.0)]).strategy == "relay"


def test_dtypes_and_strategy_are_taken() -> None:
    g, splits = reduced("deepseek_v3", num_layers=2), (TrainerSplit(tp=2, ep=2), EngineSplit(2))
    links = Links(50e9, 150e-6)
    narrow = plan_model(PlanRequest(g, *splits, 2, links, "relay", "float32", "bfloat16"))
    wide = plan_model(PlanRequest(g, *splits, 2, links, "relay", "float32", "float32"))
    assert narrow.chosen.strategy == wide.chosen.strategy == "relay"
    bias = 4 * 64 * 2  # float32 on both engine ranks whatever the rest is
    assert wide.needed_bytes - bias == 2 * (narrow.needed_bytes - bias)
    assert narrow.plan_hash != wide.plan_hash


def test_the_hash_is_that_of_the_plan() -> None:
    g, links = reduced("qwen3", num_layers=2), Links(50e9, 150e-6)
    plans = [
        plan_model(PlanRequest(g, TrainerSplit(tp=tp), EngineSplit(2), 1, links)).plan_hash
        for tp in (1, 2, 2)
    ]
    assert plans[0] != plans[1] == plans[2]


def run(*changes: str) -> int:
    """The command on a small cluster; options named again override."""
    common = (
        "--model",
        str(MODELS / "qwen3-235b-a22b"),
        "--trainer",
        "tp=4,pp=4,ep=16",
        "--engine",
        "tp=8,ep=8",
    )
    return main(["plan", "weights", *common, *changes])


def test_the_command_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--replicas", "2", "--json", str(tmp_path / "plan.json")) == 0
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert tuple(figures) == KEYS
    assert figures["received_over_needed"] == 1.0 and figures["gather_broadcast_s"] == pytest.approx(
        9.4, abs=0.1
    )
    text = capsys.readouterr().out
    for word in ("trainer, sends", "engines, receive", "gather", "staging memory", "bound s", "relay"):
        assert word in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--trainer", "tp=3"), "cannot be cut into 3 equal parts"),
        (("--trainer", "tp=4,ep=48"), "experts over expert parallelism: 128 cannot be cut into 48"),
        (("--trainer", "pp=95"), "more stages than the model has layers, 94"),
        (("--engine", "tp=8,ep=3"), "ep must divide tp"),
        (("--engine", "tp=128"), "attention heads: 64 cannot be cut into 128"),
        (("--replicas", "0"), "--replicas 0: use 1 or more"),
        (("--bandwidth", "0"), "--bandwidth must be above 0"),
        (("--model", "/nowhere"), "no config.json"),
    ],
)
def test_impossible_layouts_are_refused(
    changes: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*changes) == 2
    assert message in capsys.readouterr().err


def test_experts_of_a_dense_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("--model", str(tmp_path), "--trainer", "tp=2,ep=2", "--engine", "tp=1") == 2
    assert "trainer ep = 2: llama has no experts" in capsys.readouterr().err
