"""A child process of ours: a command under a warden, its output in a log file.

The owner keeps the write end of the warden's stdin. Closing it (by `end`, or by dying) ends the whole tree.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Child:
    """One supervised process tree."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        grace_s: float = 5.0,
        remove: Sequence[Path] = (),
    ) -> None:
        """Start it. ``remove`` are directories that must not outlive the tree."""
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        removals = [item for directory in remove for item in ("--remove", str(directory))]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.launch.warden", "--grace", str(grace_s), *removals]
                + ["--", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # a terminal's Ctrl-C goes to the owner alone
            )

    @property
    def pid(self) -> int:
        """The warden's pid."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """The command's exit status (128 + n: killed by signal n), None while it runs."""
        return self._process.poll()

    def begin_end(self) -> None:
        """Ask the warden to end the tree; returns at once."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()

    def wait(self, timeout_s: float) -> bool:
        """Whether the tree is gone within ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def end(self, timeout_s: float) -> None:
        """End the tree and wait for it; past ``timeout_s`` the warden's command is killed by the kernel."""
        self.begin_end()
        if not self.wait(timeout_s):
            self._process.kill()
            self._process.wait(timeout=5)
