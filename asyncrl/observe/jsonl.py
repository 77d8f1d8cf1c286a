"""Append-only files of one JSON object per line, written by several processes and read while they grow.

A line is one ``write`` to a file opened for appending, so lines of different writers never mix. A reader
takes only lines that end in a newline; what a killed writer left behind of its last line is ignored.
Completions hold any character: those that Unicode, but not JSON, takes for the end of a line are escaped, for
``str.splitlines`` and many editors would cut a record in two there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNICODE_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def json_line(record: Mapping[str, Any]) -> str:
    """One object as a line with its newline; numbers that JSON lacks (nan, infinities) become null."""
    text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False)
    return text.translate(UNICODE_LINE_ENDS) + "\n"


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one object, see ``json_line``."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, json_line(record).encode())
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
        return [json.loads(line) for line in complete.split(b"\n") if line.strip()]
