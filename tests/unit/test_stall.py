"""A command under stalls: all its processes see them, and its status is passed on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STALL_S = 0.5
WAITS_FOR_A_STALL = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], ""]) if sys.argv[1] else None
end = last = time.monotonic()
while last < end + 60:
    time.sleep(0.01)
    now = time.monotonic()
    if now - last >= {STALL_S}:
        sys.exit(7 if child is None else child.wait())
    last = now
"""


def test_every_process_stands_still_for_a_while() -> None:
    command = [sys.executable, "-c", WAITS_FOR_A_STALL, WAITS_FOR_A_STALL]
    done = subprocess.run([sys.executable, "-m", "scripts.stall", str(STALL_S), "0.3", *command], cwd=ROOT)
    assert done.returncode == 7
