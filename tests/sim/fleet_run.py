"""Run many seeds of the simulated publications: python -m tests.sim.fleet_run --seeds 20000 [--first 0]"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim.fleet_parts import History
from tests.sim.fleet_world import FleetWorld
from tests.sim.loop import SimLoop, simulate
from tests.sim.run import Outcome


def run_seed(seed: int) -> Outcome:
    """One simulated run; a crash of the program and a broken rule both are failures."""
    loops: list[SimLoop] = []

    async def program(loop: SimLoop) -> History:
        loops.append(loop)
        return await FleetWorld(loop).run()

    try:
        history = simulate(seed, program)
    except Exception as error:  # whatever ends a run is that seed's finding
        return Outcome(f"{type(error).__name__}: {error}", loops[0].steps, "", ())
    digest = f"{loops[0].steps} {loops[0].time():.6f} {history.num_tokens} {history.committed}"
    faults = (*history.faults, f"end: {history.end}")
    return Outcome("; ".join(history.broken), loops[0].steps, digest, faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    began, steps, failures = time.perf_counter(), 0, 0
    faults: Counter[str] = Counter()
    for seed in range(args.first, args.first + args.seeds):
        outcome = run_seed(seed)
        steps += outcome.steps
        faults.update(outcome.faults)
        if outcome.failure:
            failures += 1
            print(f"seed {seed}: {outcome.failure}", flush=True)
    seconds = time.perf_counter() - began
    print(f"{args.seeds} seeds, {failures} failed, {steps} steps in {seconds:.1f} s; {dict(faults)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
