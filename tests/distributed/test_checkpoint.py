"""A checkpoint written under one layout resumes under another: same parameters, same next step.

The resuming policy is built from a different model, so every value it has comes from the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.forked import run_launcher
from tests.distributed.test_publish import reserved_ports
from tests.tiny_models import make_tiny

CASES = {
    "same_layout": {"save": {"tp": 2, "dp": 2}, "load": {"tp": 2, "dp": 2}},
    "tp2_to_tp1": {"save": {"tp": 2, "dp": 2}, "load": {"dp": 4}},
    "pp2_to_tp2": {"save": {"pp": 2, "dp": 2}, "load": {"tp": 2, "dp": 2}},
    "dp4_to_tp2_pp2": {"save": {"dp": 4}, "load": {"tp": 2, "pp": 2}},
    "tp2_cp2_to_pp2_vpp2": {"save": {"tp": 2, "cp": 2}, "load": {"pp": 2, "vpp": 2, "dp": 2}},
    "pp2_vpp2_to_tp2_cp2": {"save": {"pp": 2, "vpp": 2, "dp": 2}, "load": {"tp": 2, "cp": 2}},
    "plain_optimizer": {
        "save": {"tp": 2, "dp": 2, "distributed_optimizer": False},
        "load": {"pp": 2, "dp": 2, "distributed_optimizer": False},
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    models = [
        make_tiny("qwen3", directory / f"model{seed}", seed=seed, num_layers=4, tied=True) for seed in (3, 4)
    ]
    with reserved_ports(1) as [port]:
        told = {"port": port, "models": list(map(str, models)), "cases": CASES}
        (directory / "cases.json").write_text(json.dumps(told))
        run_launcher("tests.distributed.checkpoint_worker", directory, timeout_s=400)
    return directory


@pytest.mark.parametrize("case", CASES)
def test_resume(case: str, results: Path) -> None:
    seen = json.loads((results / f"{case}.0.json").read_text())
    assert seen["common_is_same"]
    assert seen["processes_left"] == []
    assert seen["num_updates"] == 3
    assert seen["loaded_difference"] == 0
    assert seen["learning_rates"][0] == seen["learning_rates"][1]
    tolerance = 0 if case == "same_layout" else 1e-6
    assert seen["losses"][1] == pytest.approx(seen["losses"][0], rel=tolerance, abs=tolerance)
    assert seen["grad_norms"][1] == pytest.approx(seen["grad_norms"][0], rel=tolerance, abs=tolerance)
    assert seen["next_difference"] <= tolerance


@pytest.mark.parametrize("case", CASES)
def test_files(case: str, results: Path) -> None:
    """The folder has the usual names, and nothing unfinished is left."""
    names = sorted(path.name for path in (results / case).iterdir())
    assert names == ["iter_0000002", "latest_checkpointed_iteration.txt"]
    assert (results / case / names[1]).read_text() == "2"
