"""The layout of a run directory, and who may use its name.

    runs/NAME/{config.toml, metrics.jsonl, events.jsonl, summary.json, report.html,
               tensorboard/, logs/attempt_N/, rollouts/, checkpoints/, profiles/}

A name is claimed by making its directory: it is refused when it exists, never overwritten. Each start of
the same run (the first, and every resume) is an attempt with its own log directory, numbered from 1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path


class RunDirError(RuntimeError):
    """The run directory cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def profiles(self) -> Path:
        return self.path / "profiles"

    def rollout_file(self, step: int) -> Path:
        """The samples that step ``step`` (from 1 on) trained on."""
        return self.rollouts / f"step_{step}.jsonl"


def create_run(path: Path) -> RunDir:
    """Claim a new run directory.

    Raises:
        RunDirError: the name is in use.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        raise RunDirError(
            f"{path} is in use; choose another name (name={_free_name(path)}), or go on with that run"
            f" (checkpoint.resume={path})"
        ) from None
    run = RunDir(path)
    for folder in (run.logs, run.rollouts, run.checkpoints):
        folder.mkdir()
    return run


def open_run(path: Path) -> RunDir:
    """The directory of an existing run.

    Raises:
        RunDirError: there is none.
    """
    run = RunDir(path)
    if not run.logs.is_dir():
        siblings = sorted(p.parent.name for p in path.parent.glob("*/logs")) if path.parent.is_dir() else []
        known = f"; runs there: {', '.join(siblings)}" if siblings else ""
        raise RunDirError(f"{path}: no run of that name{known}")
    return run


def start_attempt(run: RunDir) -> Path:
    """Make and return the log directory of the next attempt, ``logs/attempt_N``."""
    for number in itertools.count(1):
        folder = run.logs / f"attempt_{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def _free_name(path: Path) -> str:
    for number in itertools.count(2):
        name = f"{path.name}-{number}"
        if not path.with_name(name).exists():
            return name
    raise AssertionError("unreachable")
