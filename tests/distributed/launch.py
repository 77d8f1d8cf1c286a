"""Start a worker script under torchrun and wait for it; workers write their results as JSON files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def launch(worker: Path, num_ranks: int, *arguments: object, timeout_s: float = 400.0) -> None:
    """Run ``worker`` on ``num_ranks`` local ranks; fail with the end of their output if any fails."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)),
        *(str(worker), *map(str, arguments)),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        command,
        env=environment,
        cwd=REPOSITORY,
        timeout=timeout_s,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{worker.name} on {num_ranks} ranks failed:\n{first_cause(done.stdout)}")


def first_cause(output: str) -> str:
    """The output of a rank that failed by itself, not because a peer had closed its connection."""
    by_rank: dict[str, list[str]] = {}
    for line in output.splitlines():
        prefix, colon, text = line.partition("]: ")
        if colon and prefix.startswith("[rank"):
            by_rank.setdefault(prefix[1:], []).append(text)
    for rank, lines in by_rank.items():
        if "Connection closed by peer" not in lines[-1]:
            return "\n".join([rank, *lines[-40:]])
    return output[-6000:]
