"""Start `asyncrl run` as a user does, and look at what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.launch.warden import descendants, mapped_shm_files
from asyncrl.observe.jsonl import JsonlTail
from tests.processes import command_line, running

ROOT = Path(__file__).resolve().parents[2]
TINY = ["examples/tiny.toml"]


@dataclass
class Run:
    """A running or finished `asyncrl run`; output goes to a file."""

    process: subprocess.Popen[bytes]
    directory: Path
    output_file: Path

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def json_lines(self, name: str) -> list[dict[str, Any]]:
        return JsonlTail(self.directory / name).poll()

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(timeout=30)
            raise AssertionError(f"still running after {timeout_s:.0f} s:\n{self.output}") from None

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended early:\n{self.output}"
            assert time.monotonic() < deadline, f"not reached in {timeout_s:.0f} s:\n{self.output}"
            time.sleep(0.1)

    def steps(self) -> list[int]:
        return [line["step"] for line in self.json_lines("metrics.jsonl")]

    def processes(self) -> list[int]:
        return descendants(self.process.pid)

    def pid_of(self, name: str) -> int:
        """The pid of a descendant whose command line or title contains ``name``."""
        for pid in self.processes():
            command = command_line(pid)
            if name in command and "launch.warden" not in command:
                return pid
        raise AssertionError(f"no process {name!r} below {self.process.pid}")


@contextlib.contextmanager
def started(directory: Path, *overrides: str) -> Iterator[Run]:
    """`start_run`, ended whatever the test does."""
    run = start_run(directory, *overrides)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)
            run.process.wait(timeout=60)


def start_run(directory: Path, *overrides: str, config: list[str] | None = None) -> Run:
    """Start a run whose directory is ``directory``."""
    output_file = directory.with_suffix(f".{time.monotonic_ns()}.out")
    command = [sys.executable, "-m", "asyncrl.cli", "run", *(config or TINY)]
    command += [f"name={directory.name}", f"runs_dir={directory.parent}", *overrides]
    with output_file.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return Run(process, directory, output_file)


OTHER_TESTS = "asyncrl-test"
"""How rings of other tests are called, which may run at the same time."""


def shared_memory() -> set[str]:
    """What is in /dev/shm, not in use by any living process and not another test's."""
    everybody = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    used = {Path(path).relative_to("/dev/shm").parts[0] for path in mapped_shm_files(everybody)}
    return {name for name in os.listdir("/dev/shm") if not name.startswith(OTHER_TESTS)} - used


def assert_gone(pids: list[int]) -> None:
    """No process is left, not even a moment later."""
    deadline = time.monotonic() + 2
    while left := running(pids):
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.05)


def assert_trained_once(run: Run, num_steps: int) -> None:
    """Every group was released into exactly one batch, over both attempts."""
    seen: dict[int, int] = {}
    for step in range(1, num_steps + 1):
        for record in run.json_lines(f"rollouts/step_{step}.jsonl"):
            assert seen.setdefault(record["group_id"], step) == step
