"""Two real engines: one is killed, the run goes on, the engine comes back with the other's version.

Minutes long, so for `make chaos-runs`; a lone engine's death is in test_runs.py, a fleet's in the simulator.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import Run, assert_gone, assert_trained_once, shared_memory, started

pytestmark = pytest.mark.long

START_S = 300.0
RETURN_S = 300.0


def engine_events(run: Run) -> list[str]:
    return [event["message"] for event in run.json_lines("events.jsonl") if event["kind"] == "engine"]


def paused_engines(run: Run) -> set[str]:
    """Engines that took part in the publication of the newest step, and served before."""
    prefix = "publish/paused_s/"
    newest = run.json_lines("metrics.jsonl")[-1]
    return {key.removeprefix(prefix) for key in newest if key.startswith(prefix)}


def weight_orders(run: Run, name: str) -> list[str]:
    """What the newest start of an engine was asked to do with weights."""
    log = (run.directory / "logs/attempt_1" / f"{name}.log").read_text()
    return re.findall(r"POST /(\w*weights\w*) HTTP", log.rsplit("server_args=", 1)[1])


def test_a_killed_engine_comes_back_and_no_sample_is_lost_or_trained_twice(tmp_path: Path) -> None:
    before = shared_memory()
    overrides = ("engine.replicas=2", "train.steps=5000", "weights.verify=false", "rollout.max_new_tokens=64")
    with started(tmp_path / "two", *overrides, "weights.strategy=relay") as run:
        run.wait_until(lambda: len(run.steps()) >= 2, START_S)
        assert paused_engines(run) == {"engine-0", "engine-1"}
        os.kill(run.pid_of("sglang::scheduler"), signal.SIGKILL)
        run.wait_until(lambda: len(engine_events(run)) >= 2, 30.0)
        death, restart = engine_events(run)[:2]
        match = re.match(r"(engine-\d) \w+ .* died first: killed by SIGKILL", death)
        assert match, death
        name = match[1]
        assert restart == f"{name} starts again (1 of 2)"
        at_death = len(run.steps())
        run.wait_until(lambda: len(run.steps()) >= at_death + 3, 60.0)  # with the other engine alone
        assert paused_engines(run) == {"engine-0", "engine-1"} - {name}
        run.wait_until(lambda: len(engine_events(run)) >= 3, RETURN_S)
        back = re.fullmatch(rf"{name} serves again, version (\d+)", engine_events(run)[2])
        assert back, engine_events(run)
        steps = len(run.steps())
        assert steps - 2 <= int(back[1]) <= steps + 1  # the current version, not the first
        run.wait_until(lambda: paused_engines(run) == {"engine-0", "engine-1"}, 60.0)
        # The first weights came from the other engine, before it met the trainer in a weight group.
        first, second = weight_orders(run, name)[:2]
        assert (first, second) == ("update_weights_from_distributed", "init_weights_update_group")
        pids = run.processes()
        run.process.send_signal(signal.SIGINT)
        assert run.wait(20) == 0, run.output
    assert_gone(pids)
    assert shared_memory() - before == set()
    assert len(engine_events(run)) == 3, engine_events(run)
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["steps"] == max(run.steps())
    assert summary["samples_trained"] == summary["steps"] * 16
    assert_trained_once(run, summary["steps"])
    linked = [line["publish/linked"] for line in run.json_lines("metrics.jsonl")]
    assert linked[0] == linked[-1] == 2 and 0 in linked  # before the death, after the return, between them
    for line in run.json_lines("metrics.jsonl"):
        assert 0 <= line["staleness/max"] <= 1  # rollout.max_staleness


def test_the_death_of_both_engines_ends_the_run_with_the_first(tmp_path: Path) -> None:
    before = shared_memory()
    overrides = ("engine.replicas=2", "train.steps=5000", "weights.verify=false")
    with started(tmp_path / "none", *overrides) as run:
        run.wait_until(lambda: len(run.steps()) >= 1, START_S)
        pids = run.processes()
        first = run.pid_of("sglang::scheduler")
        os.kill(first, signal.SIGKILL)
        run.wait_until(lambda: len(engine_events(run)) >= 1, 30.0)
        os.kill(run.pid_of("sglang::scheduler"), signal.SIGKILL)
        assert run.wait(30) == 1
    assert re.search(rf"engine-\d \w+ \(pid {first}\) died first: killed by SIGKILL", run.output), run.output
    assert "the end of" in run.output
    assert_gone(pids)
    assert shared_memory() - before == set()
