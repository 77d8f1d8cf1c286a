"""Every test in two processes side by side, so that one core works while the other lane waits.

    python -m scripts.run_tests [pytest arguments]

Without arguments: runs and engines in one lane, all else in the other, whose output follows
when both are done. With arguments: one pytest with them. The exit code is that of a lane that failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
RUNS = ("tests/end_to_end", "tests/engine")
"""Each starts processes that mostly wait for each other."""


def other_lane() -> list[str]:
    folders = sorted(path for path in (ROOT / "tests").iterdir() if path.is_dir())
    names = [f"tests/{path.name}" for path in folders if list(path.rglob("test_*.py"))]
    return [name for name in names if name not in RUNS]


def pytest(arguments: list[str], output: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, stdout=output)


def main() -> int:
    if sys.argv[1:]:
        return pytest(sys.argv[1:]).wait()
    with tempfile.TemporaryFile() as later:
        print("tests: two lanes side by side; the second one's output comes at the end", flush=True)
        second = pytest(other_lane(), later.fileno())
        first = pytest([*RUNS])

        def stop(number: int, frame: FrameType | None) -> None:
            for lane in (first, second):
                lane.send_signal(signal.SIGINT)

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, lambda number, frame: None)  # the terminal tells both lanes itself
        codes = [first.wait(), second.wait()]
        later.seek(0)
        sys.stdout.flush()
        os.write(1, later.read())
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
