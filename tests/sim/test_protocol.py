"""The publication protocol: every state of a small scope, hundreds of schedules, and defects that both find.

More: ASYNCRL_SIM_SEEDS=5000 pytest tests/sim, or python -m tests.sim.fleet_run --seeds 20000.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sim.fleet_parts import METHODS
from tests.sim.fleet_run import run_seed
from tests.sim.mutants import Mutant, planted, read_mutants
from tests.sim.protocol_model import explore

NUM_SEEDS = int(os.environ.get("ASYNCRL_SIM_SEEDS", "150"))
SEEDS_PER_MUTANT = 300
LAST_VERSION = 2
MUTANTS = read_mutants(Path(__file__).with_name("mutants_fleet.toml"))
FAULTS = {
    *("kill", "kill rank", "corrupt", "request lost", "answer lost", "again"),
    *("rival", "rival refused", "hopeless", "refill"),
    *(f"{how} {method}" for how in ("fail", "hang") for method in METHODS),
}


def test_every_state_of_the_small_scope_is_safe() -> None:
    """Two engines, two trainer ranks, three versions, any two faults at any moment."""
    explored = explore(faults=2, last_version=LAST_VERSION)
    print(f"{explored.num_states} states, {explored.num_steps} steps")
    assert explored.failure == ""
    assert explored.num_states > 60_000 and explored.num_steps > 2 * explored.num_states
    refills = {"refill a", "refill b", "a gives", "b gives", "the refill is given up", "the refill ends"}
    wanted = refills | {
        "kill a",
        "kill b",
        "corrupt a",
        "kill rank 1",
        "deadline",
        "b is missed late",
        "a verifies",
    }
    for kind in ("PREPARE", "TRANSFER", "COMMIT"):
        wanted |= {kind, f"{kind} is lost", f"{kind}: its answer is lost", f"{kind} came again"}
    assert wanted <= explored.names


def test_every_schedule_keeps_every_rule() -> None:
    outcomes = {seed: run_seed(seed) for seed in range(NUM_SEEDS)}
    failures = [f"seed {seed}: {o.failure}" for seed, o in outcomes.items() if o.failure]
    assert not failures, failures[0]
    fired = Counter(fault for o in outcomes.values() for fault in o.faults)
    assert fired.keys() >= FAULTS, f"never happened: {sorted(FAULTS - fired.keys())}"
    assert fired["end: done"] > NUM_SEEDS / 2
    assert len({o.digest for o in outcomes.values()}) == NUM_SEEDS, "seeds repeat a schedule"


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_replays_exactly(seed: int) -> None:
    assert run_seed(seed) == run_seed(seed)


def test_a_seed_replays_in_another_process() -> None:
    """Where the order of a set of names is another one."""
    program = "from tests.sim.fleet_run import run_seed; print([run_seed(seed).digest for seed in range(12)])"
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(printed) == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name.replace(" ", "-") for m in MUTANTS])
def test_a_planted_defect_is_found(mutant: Mutant) -> None:
    if mutant.by == "model":
        with planted(mutant, "tests.sim.protocol_model") as model:
            found = any(model.explore(faults, LAST_VERSION).failure for faults in (0, 1))
            assert found or model.explore(2, 1).failure
        return
    with planted(mutant, "tests.sim.fleet_run") as run:
        assert any(run.run_seed(seed).failure for seed in range(SEEDS_PER_MUTANT))
