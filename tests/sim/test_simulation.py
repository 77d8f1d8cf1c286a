"""The rollouter under hundreds of schedules with faults, and the proof that this would notice a defect.

More seeds: ASYNCRL_SIM_SEEDS=5000 pytest tests/sim, or python -m tests.sim.run --seeds 100000.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.sim.loop import Deadlock, SimLoop, simulate
from tests.sim.mutants import MUTANTS, Mutant, first_seed_that_finds
from tests.sim.parts import RECORD_KINDS
from tests.sim.run import run_seed

NUM_SEEDS = int(os.environ.get("ASYNCRL_SIM_SEEDS", "300"))
SEEDS_PER_MUTANT = 200
PROCESSES = {"lose_engine", "lose_request", "crash_rollouter", "stop_rollouter", "restart"}
DISK = {f"{how} {kind.__name__}" for how in ("refuse", "lose") for kind in RECORD_KINDS}
FAULTS = PROCESSES | DISK | {"fail_disk", "fail_ring"}


def test_every_schedule_keeps_every_rule() -> None:
    outcomes = {seed: run_seed(seed) for seed in range(NUM_SEEDS)}
    failures = [f"seed {seed}: {o.failure}" for seed, o in outcomes.items() if o.failure]
    assert not failures, failures[0]
    fired = {fault.split(" from ")[0] for o in outcomes.values() for fault in o.faults}
    assert fired >= FAULTS, f"never happened: {sorted(FAULTS - fired)}"
    assert len({o.digest for o in outcomes.values()}) == NUM_SEEDS, "seeds repeat a schedule"


@pytest.mark.parametrize("seed", range(8))
def test_a_seed_replays_exactly(seed: int) -> None:
    assert run_seed(seed) == run_seed(seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name.replace(" ", "-") for m in MUTANTS])
def test_a_planted_defect_is_found(mutant: Mutant) -> None:
    assert first_seed_that_finds(mutant, SEEDS_PER_MUTANT) is not None


def test_the_loop_finds_a_race() -> None:
    """Check-then-act across an await: two workers both see an empty store under some schedule."""

    async def program(loop: SimLoop) -> int:
        store: list[int] = []

        async def put_once(value: int) -> None:
            if not store:
                await asyncio.sleep(loop.rng.random() if loop.rng.random() < 0.1 else 0.0)
                store.append(value)

        await asyncio.gather(put_once(1), put_once(2))
        return len(store)

    assert {simulate(seed, program) for seed in range(50)} == {1, 2}


def test_the_loop_finds_a_deadlock() -> None:
    async def program(loop: SimLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        simulate(0, program)


def test_time_is_virtual() -> None:
    async def program(loop: SimLoop) -> float:
        await asyncio.sleep(3600.0)
        return loop.time()

    assert simulate(0, program) == pytest.approx(3600.0)
