"""Processes of this machine, from outside: any of them may end while it is looked at."""

from __future__ import annotations

from pathlib import Path

INIT = 1


def command_line(pid: int) -> str:
    """Empty once it has ended."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace")


def running(pids: list[int]) -> dict[int, str]:
    """Those that are left, with their command lines.

    One that is dead and init's to bury is not: when init looks is not ours. One that its own parent should
    have buried is.
    """
    return {pid: command_line(pid) for pid in pids if not _is_gone(pid)}


def _is_gone(pid: int) -> bool:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z" and int(parent) == INIT
