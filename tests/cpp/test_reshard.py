"""Builds and runs `reshard_test`: the CPU executor and the emulated CUDA kernels under AddressSanitizer."""

from __future__ import annotations

import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_executors_agree_with_the_reference(tmp_path: Path) -> None:
    configure = ["cmake", "-S", str(REPO), "-B", str(tmp_path), "-G", "Ninja", "-DASYNCRL_MODULE=OFF"]
    configure += ["-DASYNCRL_TESTS=ON", "-DASYNCRL_SANITIZE=address,undefined"]
    build = ["cmake", "--build", str(tmp_path), "--target", "reshard_test", "-j", "2"]
    for command in (configure, build, [str(tmp_path / "reshard_test"), "300"]):
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, f"{command[0]}: {result.stdout[-3000:]}{result.stderr[-3000:]}"
