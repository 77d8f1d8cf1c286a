"""Run a command whose processes all stand still now and then, as they do where the whole machine stalls.

    python -m scripts.stall SECONDS EVERY COMMAND ...

About every EVERY seconds of running (at random, half to one and a half of it), everything that the command
has started is stopped for SECONDS and then goes on; clocks go on meanwhile. A test that fails only here has a
bound that a busy machine misses by chance. Children that left the command's tree are followed too, once they
were seen in it; what was stopped already is left so. The exit status is the command's.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import time

import psutil

LOOKS = 3
"""How often the tree is looked through for what was started while the others were being stopped."""


def stop(root: psutil.Process, known: set[psutil.Process], stopped: list[psutil.Process]) -> None:
    """``known`` grows by whatever is found below ``root``, ``stopped`` by what runs of them."""
    for _ in range(LOOKS):
        with contextlib.suppress(psutil.NoSuchProcess):
            known.update([root, *root.children(recursive=True)])
        for process in known.difference(stopped):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    process.suspend()
                    stopped.append(process)


def resume(stopped: list[psutil.Process]) -> None:
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def stand_still(root: psutil.Process, known: set[psutil.Process], seconds: float) -> None:
    stopped: list[psutil.Process] = []
    try:
        stop(root, known, stopped)
        time.sleep(seconds)
    finally:  # also when interrupted: nobody is left standing
        resume(stopped)


def main(seconds: float, every: float, command: list[str]) -> int:
    child = subprocess.Popen(command)
    root, known = psutil.Process(child.pid), set[psutil.Process]()
    while True:
        try:
            return child.wait(random.uniform(0.5, 1.5) * every)
        except subprocess.TimeoutExpired:
            stand_still(root, known, seconds)
            known = {process for process in known if process.is_running()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scripts.stall")
    parser.add_argument("seconds", type=float)
    parser.add_argument("every", type=float)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.exit(main(args.seconds, args.every, [args.program, *args.arguments]))
