"""Rows of data files, in the forms that other trainers use, as (messages, row) pairs.

    file -> raw rows (line by line) -> TaskRow(messages, row)

A row keeps every column it came with, unchanged, for the reward; the canonical key "answer" is added.
Accepted: plain ``{"prompt": text | messages, "answer": ...}``; other key names through ``prompt_key``
and ``answer_key``; verl's ``reward_model.ground_truth``. JSONL, parquet, or a dataset folder (saved
by ``datasets.save_to_disk``, or holding parquet / JSONL files). A row that cannot be used is a
`DataError` with the file and the line, never skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = ("system", "user", "assistant", "tool")


class DataError(ValueError):
    """The data cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task before tokenisation; ``row`` is what the reward receives."""

    messages: tuple[Mapping[str, str], ...]
    row: Mapping[str, Any]

    @property
    def question(self) -> str:
        """The text of the conversation, by which two tasks are the same or not."""
        return "\n".join(message["content"] for message in self.messages if message["role"] != "system")


def read_rows(path: Path, prompt_key: str = "prompt", answer_key: str = "answer") -> list[TaskRow]:
    """Read every row of a file or dataset folder, in file order.

    Raises:
        DataError: nothing there, an unknown format, or a row without a usable prompt or answer.
    """
    rows: list[TaskRow] = []
    with_answer: bool | None = None
    for where, raw in _raw_rows(path):
        task = _task(where, raw, prompt_key, answer_key)
        has_answer = task.row["answer"] is not None
        if with_answer is None:
            with_answer = has_answer
        elif with_answer and not has_answer:
            raise DataError(f"{where}: no {answer_key!r}, which the rows before it have")
        rows.append(task)
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def _raw_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.is_dir():
        for file in _dataset_files(path):
            yield from _raw_rows(file)
    elif not path.is_file():
        raise DataError(f"{path}: no such file")
    elif path.suffix in (".jsonl", ".json"):
        yield from _jsonl(path)
    elif path.suffix in (".parquet", ".arrow"):
        yield from _table_rows(path)
    else:
        raise DataError(f"{path}: unknown format {path.suffix!r}; use .jsonl, .parquet or a dataset folder")


def _dataset_files(folder: Path) -> list[Path]:
    """The data files of a dataset folder, its training split where it has several."""
    if (folder / "dataset_dict.json").is_file():
        return _dataset_files(_split(folder))
    state = folder / "state.json"
    if state.is_file():
        return [folder / file["filename"] for file in json.loads(state.read_text())["_data_files"]]
    for suffix in ("parquet", "jsonl"):
        files = sorted([*folder.glob(f"*.{suffix}"), *folder.glob(f"data/*.{suffix}")])
        if files:
            return [file for file in files if file.name.startswith("train")] or files
    raise DataError(f"{folder}: no state.json, *.parquet or *.jsonl; name the folder of one split")


def _split(folder: Path) -> Path:
    splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
    if "train" in splits:
        return folder / "train"
    if len(splits) == 1:
        return folder / str(splits[0])
    raise DataError(f"{folder}: splits {', '.join(splits)}, none named train; name one as {folder}/SPLIT")


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}:{number}: not JSON: {error}") from None


def _table_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            batches: Iterable[Any] = pq.ParquetFile(path).iter_batches(batch_size=1024)
        else:
            batches = pa.ipc.open_stream(pa.memory_map(str(path)))
        number = 0
        for batch in batches:
            for raw in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", raw
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not readable: {error}") from None


def _task(where: str, raw: Any, prompt_key: str, answer_key: str) -> TaskRow:
    if not isinstance(raw, dict):
        raise DataError(f"{where}: expected an object, found {type(raw).__name__}")
    if prompt_key not in raw:
        raise DataError(f"{where}: no {prompt_key!r} (data.prompt_key); keys: {', '.join(raw)}")
    messages = _messages(where, prompt_key, raw[prompt_key])
    return TaskRow(messages, {**raw, "answer": _answer(raw, answer_key)})


def _answer(raw: Mapping[str, Any], answer_key: str) -> Any:
    if answer_key in raw:
        return raw[answer_key]
    reward_model = raw.get("reward_model")
    if isinstance(reward_model, dict):
        return reward_model.get("ground_truth")
    return None


def _messages(where: str, key: str, value: Any) -> tuple[Mapping[str, str], ...]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: {key!r} is empty")
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {key!r} must be text or a list of messages, found {type(value).__name__}")
    for message in value:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES or not isinstance(message.get("content"), str):
            raise DataError(f"{where}: {key!r}: not a message with a role and text content: {message!r:.80}")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)
