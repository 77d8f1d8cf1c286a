"""The CPU executor and the emulated CUDA kernels under AddressSanitizer; the GPU's check, emulated too."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_executors_agree_with_the_reference(tmp_path: Path) -> None:
    configure = ["cmake", "-S", str(REPO), "-B", str(tmp_path), "-G", "Ninja", "-DASYNCRL_MODULE=OFF"]
    configure += ["-DASYNCRL_TESTS=ON", "-DASYNCRL_SANITIZE=address,undefined", "-DASYNCRL_NVCC=NO"]
    build = ["cmake", "--build", str(tmp_path), "--target", "reshard_test", "reshard_ahead_test", "-j", "2"]
    run = ([str(tmp_path / "reshard_test"), "150"], [str(tmp_path / "reshard_ahead_test")])
    for command in (configure, build, *run):
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, f"{command[0]}: {result.stdout[-3000:]}{result.stderr[-3000:]}"


def test_the_check_of_the_gpu_runs_without_one(tmp_path: Path) -> None:
    command = [str(REPO / "scripts" / "gpu_check.sh"), "--emulate", str(tmp_path / "table")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{result.stdout[-3000:]}{result.stderr[-3000:]}"
    report = json.loads((tmp_path / "table.json").read_text())
    assert report["good"] and report["programs"] > 0
    assert {row["problem"] for row in report["rows"]} == {""}
    assert (tmp_path / "table.md").read_text().count("| ok |") == len(report["rows"])
