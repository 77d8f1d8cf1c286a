"""Reading a configuration: defaults, overrides, and errors that say what to write instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config, ConfigError, load_config, parse_config
from tests.unit.source_tree import REPO

MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "rows.jsonl"}}
TOML = '[model]\npath = "m"\n\n[data]\npath = "rows.jsonl"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def with_settings(**sections: Any) -> Config:
    tree = {name: dict(values) for name, values in MINIMAL.items()}
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return parse_config(tree)


def test_minimal_file(file: Path) -> None:
    config = load_config(file)
    assert config.model.path == Path("m")
    assert config.train.samples_per_step == 64
    assert config.run_dir == Path("runs/run")
    assert config.engine_dtype == "float32"


def test_overrides_are_toml_values_or_bare_text(file: Path) -> None:
    overrides = ["train.lr=1e-5", "parallel.tp=2", "parallel.sequence_parallel=true", "name=first-run"]
    overrides += ["data.task_args.max_terms=3", 'engine.extra_args=["--x"]', "engine.dtype=bfloat16"]
    config = load_config(file, overrides)
    assert config.train.lr == 1e-5
    assert config.parallel.tp == 2 and config.parallel.sequence_parallel
    assert config.name == "first-run"
    assert config.data.task_args == {"max_terms": 3}
    assert config.engine.extra_args == ("--x",)
    assert config.engine_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr", "expected section.key=value"),
        ("name.x.y=1", "did you mean|name"),
        ("train.learning_rat=1", "train.learning_rat: unknown key"),
        ("train.step=1", "did you mean steps"),
        ("trian.lr=1", "trian: unknown key; did you mean train"),
        ("train.lr=fast", "train.lr = 'fast'"),
        ("train.lr=0", "train.lr = 0: Input should be greater than 0"),
        ("algorithm.advantage=ppo", "'grpo', 'dr_grpo' or 'rloo'"),
    ],
)
def test_what_cannot_be_read(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(file, [override])


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"vpp": 2}}, "vpp = 2 needs pp > 1"),
        ({"parallel": {"sequence_parallel": True}}, "needs tp > 1"),
        ({"parallel": {"dp": 3}}, "prompts_per_step = 16 is not a multiple of parallel.dp = 3.*nearest: 15"),
        (
            {"rollout": {"max_new_tokens": 2000}},
            "exceeds engine.context_length = 2048; set it to 3024 or more",
        ),
        ({"algorithm": {"correction": "none"}}, 'use "truncated_is" or max_staleness = 0'),
        ({"algorithm": {"reject_low": 5.0}}, "reject_low = 5.0 is not below reject_high = 5.0"),
        ({"algorithm": {"clip_dual": 1.1}}, "clip_dual = 1.1 is inside the clip range"),
        ({"train": {"samples_per_prompt": 1}}, "leaves none; use 2 or more"),
        ({"eval": {"num_tasks": 5}}, "needs eval.path"),
        ({"data": {"reasoning_gym": "x"}}, "exactly one source of prompts"),
    ],
)
def test_what_cannot_work(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_settings(**sections)


def test_sound_without_correction_on_policy() -> None:
    config = with_settings(algorithm={"correction": "none"}, rollout={"max_staleness": 0})
    assert config.algorithm.correction == "none"


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        with_settings(train={"lr": -1, "stepz": 3}, ring={"num_slots": 0})
    assert len(str(caught.value).splitlines()) == 3


def test_files_that_are_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(broken)


def test_the_documentation_is_current() -> None:
    """docs/config.md is what scripts/config_docs.py writes."""
    result = subprocess.run(
        [sys.executable, str(REPO / "scripts" / "config_docs.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(REPO)},
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_pause_in_place_is_refused_where_old_keys_and_values_would_spread() -> None:
    for mode in ("abort", "retract", "drain"):
        assert with_settings(rollout={"interrupt": mode}).rollout.interrupt == mode
    in_place, uncached = {"interrupt": "in_place"}, {"extra_args": ["--disable-radix-cache"]}
    assert with_settings(rollout=in_place, engine=uncached).rollout.interrupt == "in_place"
    with pytest.raises(ConfigError, match=r'prefix cache.*add "--disable-radix-cache" to engine.extra_args'):
        with_settings(rollout=in_place)
    with pytest.raises(ConfigError, match=r'mixture of versions.* use "truncated_is"'):
        algorithm = {"correction": "none"}
        with_settings(rollout={**in_place, "max_staleness": 0}, engine=uncached, algorithm=algorithm)
