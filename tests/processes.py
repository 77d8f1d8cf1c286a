"""Processes of this machine, from outside: any of them may end while it is looked at."""

from __future__ import annotations

from pathlib import Path


def command_line(pid: int) -> str:
    """Empty once it has ended, also where whoever adopted it has not looked yet: a zombie has none."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace")


def running(pids: list[int]) -> dict[int, str]:
    """Those that have not ended, with their command lines."""
    return {pid: command for pid in pids if (command := command_line(pid))}
