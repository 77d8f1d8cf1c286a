"""summary.json: the outcome of a run in a dozen numbers, written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass

from asyncrl.observe.jsonl import finite
from asyncrl.observe.rundir import RunDir, RunDirError


@dataclass(frozen=True, slots=True)
class Summary:
    """Held-out accuracies are None where there was no evaluation; sample counts are the ledger's."""

    heldout_before: float | None
    heldout_after: float | None
    steps: int
    seconds: float
    peak_rss_gib: float
    publications: int
    samples_issued: int
    samples_trained: int
    samples_dropped: int


_KEYS = {"heldout_before": "heldout/before", "heldout_after": "heldout/after"}


def write_summary(run: RunDir, summary: Summary) -> None:
    """Write summary.json; it appears complete, by one rename."""
    record = {_KEYS.get(name, name): value for name, value in dataclasses.asdict(summary).items()}
    staging = run.summary.with_suffix(".json.tmp")
    staging.write_text(json.dumps(finite(record), indent=2) + "\n")
    os.replace(staging, run.summary)


def read_summary(run: RunDir) -> Summary:
    """Raises:
    RunDirError: the run has not finished.
    """
    if not run.summary.is_file():
        raise RunDirError(f"{run.path}: no summary.json; the run has not finished")
    record = json.loads(run.summary.read_text())
    return Summary(**{f.name: record[_KEYS.get(f.name, f.name)] for f in dataclasses.fields(Summary)})
