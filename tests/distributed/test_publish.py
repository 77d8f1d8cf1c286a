"""Publication between real processes over gloo: byte-equal to the reference; every fault ends in an error.

All layout pairs go through one launch of four trainer processes and two engine processes; each fault has a
launch of its own, since processes die in it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
LAUNCH_TIMEOUT_S = 150

LAYOUTS: list[dict[str, Any]] = [
    {"name": "one-to-one"},
    {"name": "tp2-to-one", "tp": 2, "family": "qwen2"},
    {"name": "tp2-to-tp2", "tp": 2, "engines": [2], "family": "qwen3"},
    {"name": "pp2-tied-to-two-engines", "pp": 2, "engines": [1, 1]},
    {"name": "pp2-vpp2-to-tp2", "pp": 2, "vpp": 2, "engines": [2], "family": "qwen2"},
    {"name": "tp2-pp2-to-tp2", "tp": 2, "pp": 2, "engines": [2]},
    {"name": "tp2-pp2-to-one", "tp": 2, "pp": 2, "family": "qwen3"},
    {"name": "tp4-fewer-kv-heads", "tp": 4, "engines": [2], "geometry": {"num_kv_heads": 2}},
    {"name": "replicated-kv-head", "tp": 2, "engines": [2], "geometry": {"num_kv_heads": 1}},
    {"name": "dp2-shares-the-sending", "dp": 2, "engines": [2], "family": "qwen2"},
    {"name": "dp2-tp2", "tp": 2, "dp": 2, "engines": [1, 1]},
    {"name": "float32-to-bfloat16", "tp": 2, "engines": [2], "engine_dtype": "bfloat16"},
    {"name": "bfloat16-to-float32", "pp": 2, "engines": [2], "trainer_dtype": "bfloat16"},
    {"name": "bfloat16", "tp": 2, "engines": [2], "trainer_dtype": "bfloat16", "engine_dtype": "bfloat16"},
    {"name": "one-bucket", "tp": 2, "engines": [2], "bucket_bytes": 1 << 20},
]
FAULTS: list[dict[str, Any]] = [
    {"name": "bit_flipped", "tp": 2, "engines": [2]},
    {"name": "sender_killed", "tp": 2, "engines": [2]},
    {"name": "receiver_killed", "tp": 2, "engines": [1, 1]},
    {"name": "receiver_stalled", "tp": 2, "engines": [1, 1]},
    {"name": "plan_mismatch", "engines": [1]},
    {"name": "version_mismatch", "engines": [1]},
    {"name": "other_model", "tp": 2, "engines": [2]},
]


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def launch(directory: Path, cases: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Run the cases; for each, what every process that took part reported."""
    num_trainers = max(case.get("tp", 1) * case.get("pp", 1) * case.get("dp", 1) for case in cases)
    num_engine_ranks = max(sum(case.get("engines", [1])) for case in cases)
    ports = iter(free_ports(5 * len(cases)))
    filled = [{**case, "ports": [next(ports) for _ in range(5)]} for case in cases]
    num_processes = num_trainers + num_engine_ranks
    (directory / "cases.json").write_text(json.dumps({"num_processes": num_processes, "cases": filled}))
    roles = [("trainer", rank) for rank in range(num_trainers)]
    roles += [("engine", rank) for rank in range(num_engine_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPO)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.publish_worker", role, str(rank), str(directory)],
            cwd=REPO,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=(directory / f"{role}{rank}.log").open("w"),
            text=True,
        )
        for role, rank in roles
    ]
    reports: dict[str, list[str]] = {case["name"]: [] for case in cases}
    try:
        for (role, rank), process in zip(roles, processes, strict=True):
            output, _ = process.communicate(timeout=LAUNCH_TIMEOUT_S)
            log = (directory / f"{role}{rank}.log").read_text()[-2000:]
            assert process.returncode == 0, (
                f"{role} {rank} exited with {process.returncode}: {reports}\n{log}"
            )
            for line in output.splitlines():
                report = json.loads(line)
                reports[report["case"]].append(f"{role} {rank}: {report['error']}" if report["error"] else "")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return reports


def test_layout_pairs(tmp_path: Path) -> None:
    for name, reports in launch(tmp_path, LAYOUTS).items():
        problems = [report for report in reports if report]
        assert reports and not problems, f"{name}: {problems}"


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case["name"])
def test_faults(tmp_path: Path, case: dict[str, Any]) -> None:
    reports = launch(tmp_path, [{**case, "fault": case["name"], "bucket_bytes": 1000}])[case["name"]]
    problems = [report for report in reports if report]
    assert reports and not problems, problems
