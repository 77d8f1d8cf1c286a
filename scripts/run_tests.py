"""Every test. What needs one core runs two by two; what starts many processes runs alone after that.

    python -m scripts.run_tests [pytest arguments]

The second process's output follows the first one's. With arguments: one pytest with them. The exit code is
that of the first process that failed; all of them run in any case.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIDE_BY_SIDE = (
    ("tests/unit", "--ignore=tests/unit/test_reshard_ops.py", "tests/sim/test_protocol.py"),
    ("tests/cpp", "tests/chaos", "tests/sim/test_simulation.py", "tests/unit/test_reshard_ops.py"),
)
"""Each works on one core, for about as long as the other."""


def alone() -> list[str]:
    """Every other folder with tests: ranks, engines and runs, which are slow enough without neighbours."""
    paths = [Path(name) for names in SIDE_BY_SIDE for name in names if not name.startswith("--")]
    paired = {path.parts[1] for path in paths}
    folders = sorted(path for path in (ROOT / "tests").iterdir() if list(path.rglob("test_*.py")))
    return [f"tests/{path.name}" for path in folders if path.name not in paired]


def pytest(arguments: list[str], output: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, stdout=output)


def main() -> int:
    if sys.argv[1:]:
        return pytest(sys.argv[1:]).wait()
    codes: list[int] = []
    with tempfile.TemporaryFile() as later:
        second = pytest(list(SIDE_BY_SIDE[1]), later.fileno())
        codes += [pytest(list(SIDE_BY_SIDE[0])).wait(), second.wait()]
        later.seek(0)
        sys.stdout.flush()
        os.write(1, later.read())
    codes.append(pytest(alone()).wait())
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
