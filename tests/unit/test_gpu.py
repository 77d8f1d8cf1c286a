"""Who asks whether there is a GPU, and who need not import torch for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from asyncrl.launch import gpu


@pytest.mark.parametrize("driver, expected", [("libc.so.6", True), ("libno-such-driver.so.1", False)])
def test_torch_is_asked_only_beside_a_driver(
    monkeypatch: pytest.MonkeyPatch, driver: str, expected: bool
) -> None:
    monkeypatch.setattr(gpu, "CUDA_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu.has_gpu() == expected


def test_processes_that_do_not_compute_do_not_import_torch() -> None:
    """The launcher, and the Ray actors of coordinator, rollouter and engines."""
    code = (
        "import sys, asyncrl.cli, asyncrl.launch.local, asyncrl.launch.preflight, asyncrl.rollout.service\n"
        "from asyncrl.launch import gpu\n"
        "gpu.CUDA_DRIVER = 'libno-such-driver.so.1'\n"
        "gpu.has_gpu()\n"
        "print(sorted({'torch', 'megatron', 'transformers', 'sglang'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr
