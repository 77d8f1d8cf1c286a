"""Append-only files of one JSON object per line, written by several processes and read while they grow.

A line is one ``write`` to a file opened for appending, so lines of different writers never mix. A reader
takes only lines that end in a newline; what a killed writer left behind of its last line is ignored.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one object; numbers that JSON lacks (nan, infinities) become null."""
    line = json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def finite(value: Any) -> Any:
    """``value`` with every float that is not finite replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class JsonlTail:
    """Reads a growing file piece by piece; each complete line comes out once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def poll(self) -> list[dict[str, Any]]:
        """The lines completed since the last call; none while the file does not exist."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]
