"""Notice the first death in a run, at once, and say of what.

One thread sleeps in poll() on the pidfds of all watched processes. Whatever ends first unexpectedly is
*the* death of the run: what follows (torchrun ending the other ranks, SGLang ending its tree) is its
consequence and is not reported. Deaths of an engine that the run can do without are kept apart, for whoever
starts it again. Nothing here ends or reaps a process.
"""

from __future__ import annotations

import os
import select
import threading
from dataclasses import dataclass
from pathlib import Path

from asyncrl.launch.pidfd import describe_status, exit_status

LOG_TAIL_LINES = 50


@dataclass(frozen=True)
class Watched:
    name: str  # for example "trainer rank 1"
    pid: int
    log: Path | None
    engine: str = ""  # whose death this process's death is; empty: the run's
    incarnation: int = 0  # of that engine


@dataclass(frozen=True)
class Death:
    process: Watched
    status: int | None  # wait status, None where the kernel does not tell

    def describe(self) -> str:
        """One line, then the end of the process's log."""
        return "\n".join([self.headline(), *self._log_tail()])

    def headline(self) -> str:
        return f"{self.process.name} (pid {self.process.pid}) died first: {describe_status(self.status)}"

    def _log_tail(self) -> list[str]:
        if self.process.log is None or not self.process.log.exists():
            return []
        lines = self.process.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return [f"--- the end of {self.process.log} ---", *lines]


class Watcher:
    """Watches processes from a thread of its own. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, Watched] = {}  # by pidfd
        self._first: Death | None = None
        self._of_engines: list[Death] = []
        self._ended = threading.Event()
        self._expected = False
        self._wake_reader, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def add(self, process: Watched) -> None:
        """Watch a process; one that is gone already counts as dead."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._record(Death(process, None))
            return
        with self._lock:
            self._watched[pidfd] = process
        os.write(self._wake_writer, b"+")

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in self._watched.values()]

    @property
    def first_death(self) -> Death | None:
        return self._first

    def take_engine_deaths(self) -> list[Death]:
        """Those of engines since the last call, in order."""
        with self._lock:
            taken, self._of_engines = self._of_engines, []
        return taken

    def expect_ends(self) -> None:
        """From now on processes may end: the run is over or being stopped."""
        self._expected = True

    def close(self) -> None:
        self._ended.set()
        os.write(self._wake_writer, b"x")
        self._thread.join(timeout=5)
        with self._lock:
            for pidfd in self._watched:
                os.close(pidfd)
            self._watched.clear()

    def _record(self, death: Death) -> None:
        # rank 0 of a finished trainer exits with status 0: not a death
        if self._expected or death.status == 0:
            return
        if death.process.engine:
            with self._lock:
                self._of_engines.append(death)
        elif self._first is None:
            self._first = death

    def _run(self) -> None:
        while not self._ended.is_set():
            poller = select.poll()
            poller.register(self._wake_reader, select.POLLIN)
            with self._lock:
                for pidfd in self._watched:
                    poller.register(pidfd, select.POLLIN)
            for fd, _ in poller.poll():
                if fd == self._wake_reader:
                    os.read(self._wake_reader, 4096)
                    continue
                with self._lock:
                    process = self._watched.pop(fd)
                self._record(Death(process, exit_status(fd, process.pid)))
                os.close(fd)
