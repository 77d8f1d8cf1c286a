"""Peak memory of a tree of processes, by sampling.

The proportional set size (PSS) counts a page that k processes share as 1/k in each, so the sum over a tree
is what the tree really occupies: shared-memory rings and libraries count once. Reference: proc(5),
``/proc/PID/smaps_rollup``.
"""

from __future__ import annotations

from collections.abc import Iterable

import psutil  # type: ignore[import-untyped]

GIB = 1 << 30


class PeakMemory:
    """The largest sum seen over all calls of `sample`. Used by one thread."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    @property
    def peak_gib(self) -> float:
        return self.peak_bytes / GIB

    def sample(self, pids: Iterable[int]) -> int:
        """Bytes now held by the processes ``pids`` and all their descendants; those that are gone count 0."""
        total = sum(_pss(process) for process in _trees(pids))
        self.peak_bytes = max(self.peak_bytes, total)
        return total


def _trees(pids: Iterable[int]) -> list[psutil.Process]:
    """The processes and their descendants, each once."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        try:
            root = psutil.Process(pid)
            members = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        found.update({process.pid: process for process in members})
    return list(found.values())


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0
    except psutil.AccessDenied:  # a process of another user: resident size is all that it shows
        return int(process.memory_info().rss)
