"""Whole runs on real parts: Megatron ranks, an SGLang server, Ray, the ring, publications."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.observe.metrics import KEYS
from tests.end_to_end.runs import (
    ROOT,
    Run,
    assert_gone,
    assert_trained_once,
    shared_memory,
    start_run,
    started,
)

START_S = 300.0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of TP2 ranks to its end."""
    before = shared_memory()
    run = start_run(
        tmp_path_factory.mktemp("runs") / "tp2", "parallel.tp=2", "train.steps=4", "eval.num_tasks=8"
    )
    code = run.wait(START_S)
    assert code == 0, run.output
    assert shared_memory() - before == set()
    return run


def test_metrics_have_every_key_for_every_step(finished: Run) -> None:
    lines = finished.json_lines("metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        missing = set(KEYS.values()) - line.keys()
        assert not missing
        assert 0 <= line["staleness/max"] <= 1  # rollout.max_staleness
        assert line["tokens/trained"] > 0
        assert line["grad_norm"] > 0


def test_the_summary_accounts_for_every_sample(finished: Run) -> None:
    summary = json.loads((finished.directory / "summary.json").read_text())
    assert set(summary) == {
        "heldout/before",
        "heldout/after",
        "steps",
        "seconds",
        "peak_rss_gib",
        "publications",
        "samples_issued",
        "samples_trained",
        "samples_dropped",
    }
    assert summary["steps"] == 4
    assert summary["publications"] == 5  # version 0 and one per step
    assert summary["samples_trained"] == 4 * 4 * 4
    assert summary["samples_issued"] >= summary["samples_trained"] + summary["samples_dropped"]
    assert summary["peak_rss_gib"] > 0.5


def test_every_publication_was_verified_against_the_trainer(finished: Run) -> None:
    checks = [event for event in finished.json_lines("events.jsonl") if event["kind"] == "verification"]
    assert [check["version"] for check in checks] == [0, 1, 2, 3, 4]
    for check in checks:
        assert check["max_logprob_difference"] < 1e-4
    for earlier, later in itertools.pairwise(checks):
        assert earlier["checksums"] != later["checksums"]  # training did change the weights


def test_a_run_leaves_what_people_look_for(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.toml", "report.html", "rollouts/step_1.jsonl", "logs/attempt_1/trainer-rank0.log"):
        assert (finished.directory / name).stat().st_size >= 0, name
    assert list((finished.directory / "tensorboard").iterdir())
    assert list((finished.directory / "checkpoints").glob("iter_*_hf/model*.safetensors"))
    assert main(["show", str(finished.directory), "--step", "3"]) == 0
    assert "reward" in capsys.readouterr().out
    assert main(["top", str(finished.directory), "--once"]) == 0
    assert "4" in capsys.readouterr().out


def test_a_name_in_use_is_refused(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", str(ROOT / "examples/tiny.toml"), f"name={finished.directory.name}"]
    assert main([*arguments, f"runs_dir={finished.directory.parent}"]) == 2
    assert "is not overwritten" in capsys.readouterr().err


def test_ctrl_c_leaves_nothing_running_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    """With publications that are under way while training goes on."""
    before = shared_memory()
    settings = ("checkpoint.every=1", "weights.verify=false", "weights.stage=device", "weights.overlap=true")
    run = start_run(tmp_path / "stopped", "train.steps=500", *settings)
    run.wait_until(lambda: len(run.steps()) >= 3, START_S)
    pids = run.processes()
    asked = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(15) == 0, run.output
    assert time.monotonic() - asked < 10
    assert_gone(pids)
    assert shared_memory() - before == set()
    resume = run.output.strip().splitlines()[-1]
    assert resume.startswith("resume: asyncrl run ")
    done = max(run.steps())
    config, *overrides = shlex.split(resume.removeprefix("resume: asyncrl run "))
    again = start_run(tmp_path / "stopped", *overrides, f"train.steps={done + 3}", config=[config])
    assert again.wait(START_S) == 0, again.output
    steps = again.steps()
    assert steps == sorted(steps) and set(steps) == set(range(1, done + 4))
    summary = json.loads((again.directory / "summary.json").read_text())
    assert summary["steps"] == done + 3
    assert summary["samples_trained"] == (done + 3) * 16
    assert_trained_once(again, done + 3)


@pytest.mark.parametrize(
    "reached",
    [
        lambda run: len(run.processes()) >= 4,  # the launcher waits inside Ray
        pytest.param(lambda run: "starting engines and trainer" in run.output, marks=pytest.mark.long),
    ],
    ids=["ray", "engines"],
)
def test_ctrl_c_during_start_up_ends_everything_too(tmp_path: Path, reached: Callable[[Run], bool]) -> None:
    before = shared_memory()
    run = start_run(tmp_path / "early", "weights.verify=false")
    run.wait_until(lambda: reached(run), START_S)
    pids = run.processes()
    asked = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(15) == 0, run.output
    assert time.monotonic() - asked < 10
    assert_gone(pids)
    assert shared_memory() - before == set()
    assert run.output.strip().splitlines()[-1].startswith("resume: asyncrl run ")


@pytest.mark.parametrize(
    ("victim", "name", "report"),
    [
        ("rank", "-u -m asyncrl.train", "trainer rank"),
        ("scheduler", "sglang::scheduler", "engine-0 scheduler"),
    ],
)
def test_a_killed_process_is_named_with_its_cause(
    tmp_path: Path, victim: str, name: str, report: str
) -> None:
    before = shared_memory()
    with started(tmp_path / f"killed-{victim}", "train.steps=500", "weights.verify=false") as run:
        run.wait_until(lambda: len(run.steps()) >= 1, START_S)
        pids = run.processes()
        os.kill(run.pid_of(name), signal.SIGKILL)
        assert run.wait(30) == 1
    assert re.search(rf"{report}.* died first: killed by SIGKILL", run.output), run.output
    assert "the end of" in run.output
    assert_gone(pids)
    assert shared_memory() - before == set()
