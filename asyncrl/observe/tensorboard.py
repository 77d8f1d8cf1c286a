"""Scalars for TensorBoard, through its own event writer: neither torch nor TensorFlow is needed.

The first write of an attempt marks its step as a start, so that TensorBoard drops what an earlier attempt
wrote for that step and later ones.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardWriter:
    """One event file in ``folder``; used by one thread."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import (  # type: ignore[import-untyped]
            EventFileWriter,
        )

        self._writer: Any = EventFileWriter(str(folder))
        self._started = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import (  # type: ignore[import-untyped]
            Event,
            SessionLog,
        )
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        now = time.time()
        if not self._started:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=now, step=step, session_log=start))
            self._started = True
        values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in scalars.items()]
        self._writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
