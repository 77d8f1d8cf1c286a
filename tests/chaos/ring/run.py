"""The long proof of the sample ring (`make chaos-ring`): prints the counts of every part.

python tests/chaos/ring/run.py [--kills 10000] [--seed 1]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import programs


def step(name: str, work: Callable[[], str]) -> bool:
    started = time.monotonic()
    try:
        result = work()
    except programs.ProofFailed as error:
        print(f"FAILED {name}\n{error}", flush=True)
        return False
    print(f"{name}: {result} ({time.monotonic() - started:.0f} s)", flush=True)
    return True


def prove_with_sanitizer(sanitizer: str) -> str:
    tree = programs.build(["threads"], tree=f"ring-{sanitizer}", sanitize=sanitizer)
    return programs.run_program(tree, "threads", 20_000, timeout=900)


def prove_model() -> str:
    if shutil.which("spin") is None:
        raise programs.ProofFailed("spin is missing; apt-get install spin")
    if not programs.run_model():
        raise programs.ProofFailed("spin found an error in lock.pml")
    for define in programs.SPIN_MUTANTS:
        if programs.run_model(define):
            raise programs.ProofFailed(f"spin found no error with {define}")
    return f"no errors, {len(programs.SPIN_MUTANTS)} planted ones found"


def prove_mutants() -> str:
    source = programs.copy_sources()
    arguments = {"images": [64], "kill": [2000, 1], "script": [300, 1], "faults": [], "threads": [20_000]}
    planted = programs.mutants()
    missed = [mutant.name for mutant in planted if not programs.is_caught(mutant, source, arguments)]
    if missed:
        raise programs.ProofFailed("planted defects that nothing noticed: " + "; ".join(missed))
    return f"{len(planted)} planted, all caught"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tree = programs.build(list(programs.PROGRAMS))

    def kill(program: str, count: int) -> Callable[[], str]:
        return lambda: programs.run_program(tree, program, count, args.seed, timeout=3600, points=True)

    steps = {
        "crash images": lambda: programs.run_program(tree, "images", 1, timeout=1800),
        "kills of workers": kill("kill", args.kills),
        "kills from creation to removal": kill("script", args.kills // 2),
        "faults": lambda: programs.run_program(tree, "faults"),
        "ThreadSanitizer": lambda: prove_with_sanitizer("thread"),
        "AddressSanitizer": lambda: prove_with_sanitizer("address"),
        "spin": prove_model,
        "mutants": prove_mutants,
    }
    results = [step(name, work) for name, work in steps.items()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
