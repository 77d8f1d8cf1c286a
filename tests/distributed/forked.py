"""Many ranks for the price of one import: a launcher process imports everything once and forks the ranks.

    pytest --subprocess--> python -m MODULE DIRECTORY --fork--> a process per role, output in ROLE.log

The launcher starts no thread and opens no socket before it forks, so a rank is as good as a fresh process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def fork_roles(roles: Mapping[str, Callable[[], None]], directory: Path) -> None:
    """Run every role in a process of its own; exits with 1 if any of them failed."""
    failed = run_roles(roles, directory)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run_roles(roles: Mapping[str, Callable[[], None]], directory: Path) -> list[str]:
    """The same; returns the names of those that failed."""
    processes = {}
    for name, action in roles.items():
        process = os.fork()
        if process == 0:
            _run_role(name, action, directory)
        processes[process] = name
    return [name for process, name in processes.items() if os.waitpid(process, 0)[1] != 0]


def torchrun_roles(
    num_ranks: int, port: int, work: Callable[[], None], name: str = "rank"
) -> dict[str, Callable[[], None]]:
    """Ranks that see the environment that torchrun would give them, with rank 0 listening at ``port``."""
    return {f"{name}{rank}": partial(_as_rank, rank, num_ranks, port, work) for rank in range(num_ranks)}


def _as_rank(rank: int, num_ranks: int, port: int, work: Callable[[], None]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    work()


def _run_role(name: str, action: Callable[[], None], directory: Path) -> None:
    log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 1
    try:
        action()
        status = 0
    except BaseException:  # a forked child must never return into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_launcher(module: str, directory: Path, timeout_s: float) -> None:
    """Start a launcher and wait for it; an assertion shows what was reported, and the end of every log."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(REPO),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # its warnings about names of hosts would hide what matters
    }
    command = [sys.executable, "-m", module, str(directory)]
    launcher = subprocess.Popen(command, cwd=REPO, env=environment, start_new_session=True)
    try:
        status: int | str = launcher.wait(timeout_s)
    except subprocess.TimeoutExpired:
        status = f"not within {timeout_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of them ended
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    assert status == 0, "\n".join([f"{module}: {status}", *_what_was_said(directory)])


def _what_was_said(directory: Path) -> list[str]:
    """Reports of errors first: who raised may have waited for somebody that gave up."""
    reports = [
        f"{path.stem} reported: {line}"
        for path in sorted(directory.glob("*.reports"))
        for line in path.read_text().splitlines()
        if json.loads(line)["error"]
    ]
    logs = {path.stem: path.read_text()[-1500:] for path in sorted(directory.glob("*.log"))}
    return reports + [f"{name}: {text}" for name, text in logs.items() if text]
