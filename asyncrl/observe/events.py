"""events.jsonl: what happened to a run and when, one JSON object per line.

    {"time": unix seconds, "kind": "phase", ...fields}

Kinds that the displays and the report know: phase (name), publication (version, seconds), heldout (label,
accuracy, num_tasks, policy_version), checkpoint (step), engine (message: lost, started again, back), alarm
(step, level, message), death (process, reason) and the ends finished, stopped, failed (message). Others are
kept and shown as they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.observe.jsonl import JsonlTail, append_line
from asyncrl.observe.rundir import RunDir

ENDS = ("finished", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class Event:
    """One line; ``time`` in unix seconds."""

    time: float
    kind: str
    fields: Mapping[str, Any]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Event:
        fields = {key: value for key, value in record.items() if key not in ("time", "kind")}
        return cls(record["time"], record["kind"], fields)


class EventLog:
    """Appends to the events of a run; any process of the run may have one. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._path = RunDir(run_dir).events

    def write(self, kind: str, **fields: Any) -> Event:
        """Append one event now, durable against the death of this process."""
        event = Event(time.time(), kind, fields)
        append_line(self._path, {"time": event.time, "kind": kind, **fields})
        return event

    def phase(self, name: str) -> Event:
        """The run entered a named phase; the phase before it ends here."""
        return self.write("phase", name=name)


def read_events(run: RunDir) -> list[Event]:
    """All events so far, oldest first."""
    return [Event.from_json(record) for record in JsonlTail(run.events).poll()]
