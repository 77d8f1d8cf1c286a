"""Run many seeds of the simulator: python -m tests.sim.run --seeds 100000 [--first 0]

Prints one line per failing seed and ends with status 1 if there was any; `--seeds 1 --first N` replays one.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from dataclasses import dataclass

from tests.sim.loop import SimLoop, simulate
from tests.sim.parts import History
from tests.sim.rules import violations
from tests.sim.world import World


@dataclass(frozen=True)
class Outcome:
    """``digest`` identifies the schedule: equal seeds give equal digests."""

    failure: str
    steps: int
    digest: str
    faults: tuple[str, ...]


def run_seed(seed: int) -> Outcome:
    """One simulated job; a crash of the job and a broken rule both are failures."""
    loops: list[SimLoop] = []

    async def program(loop: SimLoop) -> History:
        loops.append(loop)
        return await World(loop).run()

    try:
        history = simulate(seed, program)
    except Exception as error:  # whatever ends a run is that seed's finding
        return Outcome(f"{type(error).__name__}: {error}", loops[0].steps, "", ())
    trace = repr((history.starts, history.dropped, history.trained, sorted(history.puts), loops[0].steps))
    digest = hashlib.sha256(trace.encode()).hexdigest()[:16]
    return Outcome("; ".join(violations(history)), loops[0].steps, digest, tuple(history.faults))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--stop-at-failure", action="store_true")
    args = parser.parse_args()
    began, steps, failures = time.perf_counter(), 0, 0
    faults: Counter[str] = Counter()
    for seed in range(args.first, args.first + args.seeds):
        outcome = run_seed(seed)
        steps += outcome.steps
        faults.update(fault.split(" from ")[0] for fault in outcome.faults)
        if outcome.failure:
            failures += 1
            print(f"seed {seed}: {outcome.failure}", flush=True)
            if args.stop_at_failure:
                break
    seconds = time.perf_counter() - began
    print(f"{args.seeds} seeds, {failures} failed, {steps} steps in {seconds:.1f} s; faults: {dict(faults)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
