"""Wrong input: one clear line on stderr, exit code 2, and nothing started."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from asyncrl.cli import main
from asyncrl.launch import preflight as preflight_module
from tests.end_to_end.runs import ROOT
from tests.tiny_models import make_tiny


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path, *overrides: str) -> str:
    """Run the tiny example with ``overrides``; returns the one line that refuses it."""
    capsys.readouterr()  # what making a model printed
    arguments = ["run", "examples/tiny.toml", f"runs_dir={tmp_path / 'runs'}", *overrides]
    assert main(arguments) == 2
    assert not (tmp_path / "runs" / "tiny").exists()
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("asyncrl: ")
    return lines[0]


def test_an_unknown_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refuse(capsys, tmp_path, "train.learning_rate=1e-5")
    assert "train.learning_rate" in line and "unknown key" in line


def test_a_model_directory_without_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny("qwen3", model)
    (model / "model.safetensors").unlink()
    line = refuse(capsys, tmp_path, f"model.path={model}")
    assert str(model) in line and "safetensors" in line


def test_tp_that_does_not_divide_the_heads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refuse(capsys, tmp_path, "parallel.tp=3")
    assert "parallel.tp = 3" in line and "4" in line


def test_three_kv_heads_on_tp2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model", num_heads=6, num_kv_heads=3, head_dim=16, hidden_size=96)
    line = refuse(capsys, tmp_path, f"model.path={model}", "parallel.tp=2")
    assert "parallel.tp = 2" in line and "3" in line
    line = refuse(capsys, tmp_path, f"model.path={model}", "engine.tp=2")
    assert "engine.tp = 2" in line and "3" in line


def test_a_broken_line_of_prompts_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    good = json.dumps({"prompt": "1 + 1 =", "answer": "2"})
    prompts.write_text(f"{good}\n{good}\n{{broken\n{good}\n")
    config = tmp_path / "config.toml"
    config.write_text(
        (ROOT / "examples/tiny.toml").read_text().split("[data]")[0] + f'[data]\npath = "{prompts}"\n'
    )
    assert main(["run", str(config), f"runs_dir={tmp_path / 'runs'}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "prompts.jsonl" in line and "3" in line


def test_a_reward_file_that_raises_on_import(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("import math\n\nraise RuntimeError('no key')\n")
    line = refuse(capsys, tmp_path, f"reward.function={reward}:score")
    assert "reward.py" in line and "no key" in line and "3" in line


@pytest.mark.parametrize("setting", ["control.port", "engine.port"])
def test_a_port_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path, setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refuse(capsys, tmp_path, f"{setting}={port}")
    assert f"{setting}: port {port} is in use" in line


def test_too_small_a_shared_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refuse(capsys, tmp_path, "ring.arena_mib=100000000")
    assert "/dev/shm" in line and "ring.arena_mib" in line


def test_staleness_without_a_correction(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refuse(capsys, tmp_path, "algorithm.correction=none")
    assert "max_staleness" in line


def test_a_missing_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nowhere.toml"]) == 2
    assert "nowhere.toml: no such configuration file" in capsys.readouterr().err


def test_dry_run_shows_the_plan_for_any_world_size(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "examples/tiny.toml", "--dry-run", "parallel.dp=4", "parallel.tp=2"]
    assert main([*arguments, "train.prompts_per_step=8"]) == 0
    text = capsys.readouterr().out
    assert "8 ranks" in text and "8 prompts" in text


def test_every_wrong_input_is_found_before_anything_starts() -> None:
    """preflight imports neither Ray nor Megatron: it cannot start anything."""
    source = Path(preflight_module.__file__).read_text()
    assert "ray" not in [
        line.split()[1].split(".")[0] for line in source.splitlines() if "import" in line[:6]
    ]
