"""`asyncrl top RUN`: the live view of a running job, from any terminal that sees its directory."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from asyncrl.observe.progress import Progress
from asyncrl.observe.rundir import open_run

INTERVAL_S = 1.0


def top(run_path: Path, console: Console, *, once: bool = False) -> None:
    """Show the run until it ends or the user interrupts; with ``once``, as it is now.

    Raises:
        RunDirError: no such run.
    """
    run = open_run(run_path)
    with Progress(run, "plain" if once and not console.is_terminal else "live", console) as progress:
        while not once and progress.view.end is None:
            progress.update()
            time.sleep(INTERVAL_S)
