"""Builds and runs the C++ test programs of the ring, the spin model, and the mutants.

A program's result is the last line that it printed, with its counts; `ProofFailed` carries all of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
BUILD = REPO / "build"
PROGRAMS = {
    "images": "ring_images",
    "kill": "ring_kill",
    "script": "ring_kill_script",
    "faults": "ring_faults",
    "threads": "ring_threads",
}
SPIN_MUTANTS = ("NO_SEIZE", "NO_HEIR")


class ProofFailed(AssertionError):
    """A program failed, or a planted defect was not caught."""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    caught_by: str


def crash_points(source: Path = REPO) -> list[str]:
    """Every label in the ring's sources."""
    texts = [path.read_text() for path in sorted((source / "csrc" / "ring").glob("*.cpp"))]
    return sorted({name for text in texts for name in re.findall(r'CRASH_POINT\("([^"]+)"\)', text)})


def build(
    programs: Sequence[str], *, source: Path = REPO, tree: str = "ring-tests", sanitize: str = ""
) -> Path:
    """Configure and build the named programs; returns the build tree."""
    directory = BUILD / tree
    configure = ["cmake", "-S", str(source), "-B", str(directory), "-G", "Ninja"]
    configure += ["-DASYNCRL_MODULE=OFF", "-DASYNCRL_TESTS=ON", f"-DASYNCRL_SANITIZE={sanitize}"]
    _run(configure, timeout=120)
    targets = [PROGRAMS[program] for program in programs]
    _run(["cmake", "--build", str(directory), "-j", "2", "--target", *targets], timeout=900)
    return directory


def run_program(tree: Path, program: str, *args: object, timeout: float = 600, points: bool = False) -> str:
    names = crash_points() if points else []
    command = [str(tree / PROGRAMS[program]), *map(str, args), *names]
    return _run(command, timeout=timeout)


def run_model(define: str = "") -> bool:
    """Whether spin finds no error in lock.pml."""
    with tempfile.TemporaryDirectory() as directory:
        flags = [f"-D{define}"] if define else []
        _run(["spin", "-a", *flags, str(HERE / "lock.pml")], timeout=60, cwd=Path(directory))
        _run(["gcc", "-O1", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"], timeout=120, cwd=Path(directory))
        report = _run(["./pan", "-m100000"], timeout=300, cwd=Path(directory), last_line=False)
    if "depth too small" in report or ("Search not completed" in report and "errors: 0" in report):
        raise ProofFailed(f"spin did not search everything:\n{report}")
    return "errors: 0" in report


def mutants() -> list[Mutant]:
    return [Mutant(**entry) for entry in tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]]


def copy_sources() -> Path:
    """A tree of the sources to plant defects in. Its files are new, so that what an earlier defect was built
    into is built again."""
    target = BUILD / "ring-mutants-source"
    for name in ("csrc", "tests/chaos/ring", "tests/cpp"):
        shutil.copytree(REPO / name, target / name, dirs_exist_ok=True, copy_function=shutil.copy)
    shutil.copy(REPO / "CMakeLists.txt", target)
    return target


def is_caught(mutant: Mutant, source: Path, arguments: dict[str, Sequence[object]]) -> bool:
    """Plant the defect in the copy, build, run the program that must fail, and take the defect out again."""
    path = source / "csrc" / "ring" / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        raise ProofFailed(
            f"mutant {mutant.name!r}: its text is {original.count(mutant.old)} times in {mutant.file}"
        )
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        tree = build([mutant.caught_by], source=source, tree="ring-mutants")
        points = mutant.caught_by in ("kill", "script")
        run_program(tree, mutant.caught_by, *arguments[mutant.caught_by], timeout=60, points=points)
    except ProofFailed:
        return True
    finally:
        path.write_text(original)
    return False


def _run(command: Sequence[str], *, timeout: float, cwd: Path = REPO, last_line: bool = True) -> str:
    name = Path(command[0]).name
    process = subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output = process.communicate(timeout=timeout)[0].strip()
    except subprocess.TimeoutExpired:
        raise ProofFailed(f"{name}: not done after {timeout} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and its workers
        process.wait()
        for left in Path("/dev/shm").glob(f"asyncrl-test-*{process.pid}*"):
            shutil.rmtree(left)
    if process.returncode != 0:
        if name == "cmake":
            raise RuntimeError(output[-4000:])
        raise ProofFailed(f"{name} ended with {process.returncode}:\n{output[-4000:]}")
    return output.splitlines()[-1] if last_line and output else output
