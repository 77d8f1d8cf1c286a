"""The short version of the ring's proof; `make chaos-ring` is the long one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.chaos.ring import programs


@pytest.fixture(scope="module")
def tree() -> Path:
    return programs.build(list(programs.PROGRAMS))


def test_crash_images(tree: Path) -> None:
    assert programs.run_program(tree, "images", 16).endswith("failures: 0")


def test_kills(tree: Path) -> None:
    assert "kills: 400" in programs.run_program(tree, "kill", 400, 1, points=True)


def test_kills_from_creation_to_removal(tree: Path) -> None:
    assert "script kills: 200" in programs.run_program(tree, "script", 200, 1, points=True)


def test_faults(tree: Path) -> None:
    programs.run_program(tree, "faults")


def test_threads(tree: Path) -> None:
    programs.run_program(tree, "threads", 5000)


@pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed")
def test_model() -> None:
    assert programs.run_model()
    assert not programs.run_model("NO_SEIZE")


def test_a_planted_defect_is_caught() -> None:
    mutant = programs.mutants()[0]
    assert programs.is_caught(mutant, programs.copy_sources(), {"images": [64]})
