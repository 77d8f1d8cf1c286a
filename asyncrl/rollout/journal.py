"""The saved token prefixes on disk: SQLite in WAL mode, one file and one owner per rollout process.

    rollouter --records--> GroupCommit (one transaction for all that wait) --> Journal.write --> fsync
    restart   <--JournalState-- fold <-- Journal.load

Invariants:

* what `write` returned for survives power loss: ``synchronous = FULL``, and the directory is fsynced once
  the file exists (SQLite does not make its own creation durable);
* a transaction is all or nothing, records are read back in the order in which they were written;
* the file is locked for exclusive use: two rollouters never share a journal.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from asyncrl.rollout.codec import decode_event, encode_event
from asyncrl.rollout.records import (
    BatchesAcknowledged,
    GroupDropped,
    GroupReleased,
    GroupStarted,
    JournalError,
    JournalState,
    Record,
    SampleAdvanced,
    SampleRewarded,
    fold,
)

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE records (
    seq INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    group_id INTEGER NOT NULL,
    number INTEGER NOT NULL,
    other INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX by_group ON records (group_id, kind);
"""
_FORMAT = 1

Row = tuple[str, int, int, int, bytes]
"""kind, group_id, number, other, body."""


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """What positions and deadlines mean; a journal is resumed only with the settings it was written with."""

    groups_per_batch: int
    samples_per_group: int
    max_staleness: int


class JournalStore(Protocol):
    """What the rollouter needs of a journal. `write` is called from one thread at a time."""

    @property
    def producer_uid(self) -> str:
        """The name under which the rings know this journal's samples, in every life of the process."""
        ...

    def write(self, records: Sequence[Record]) -> None:
        """Make all records durable, or none; returns when they are."""
        ...

    def load(self) -> JournalState: ...


class Journal:
    """The SQLite store. Create with `Journal.open`; use from one thread at a time."""

    def __init__(self, path: Path, connection: sqlite3.Connection, producer_uid: str) -> None:
        self._path = path
        self._connection = connection
        self._producer_uid = producer_uid

    @classmethod
    def open(cls, path: Path, settings: JournalSettings) -> Journal:
        """Open ``path``, creating it when it does not exist.

        Raises:
            JournalError: another process has it, it is damaged, or it was written with other settings.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with _explained(path):
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            meta = _create_or_read(connection, settings)
        _fsync_directory(path.parent)
        _check_meta(path, meta, settings)
        return cls(path, connection, meta["producer_uid"])

    @property
    def path(self) -> Path:
        return self._path

    @property
    def producer_uid(self) -> str:
        return self._producer_uid

    def write(self, records: Sequence[Record]) -> None:
        """One durable transaction; raises JournalError naming the file when the disk refuses."""
        rows = [_to_row(record) for record in records]
        with _explained(self._path), _transaction(self._connection):
            self._connection.executemany(
                "INSERT INTO records (kind, group_id, number, other, body) VALUES (?, ?, ?, ?, ?)", rows
            )
            for record in records:
                if isinstance(record, BatchesAcknowledged):
                    self._forget_tokens(record.oldest_kept)

    def load(self) -> JournalState:
        """Fold every record; raises JournalError when the file is damaged."""
        with _explained(self._path):
            rows = self._connection.execute(
                "SELECT kind, group_id, number, other, body FROM records ORDER BY seq"
            )
            return fold(map(_from_row, rows))

    def close(self) -> None:
        self._connection.close()

    def _forget_tokens(self, oldest_kept: int) -> None:
        """Delete the tokens of batches that no kept checkpoint can bring back; bounds the file's size."""
        self._connection.execute(
            "DELETE FROM records WHERE kind IN ('advanced', 'rewarded') AND group_id IN"
            " (SELECT group_id FROM records WHERE kind = 'released' AND number <"
            "  ? * (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'groups_per_batch'))",
            (oldest_kept,),
        )


def _create_or_read(connection: sqlite3.Connection, settings: JournalSettings) -> dict[str, str]:
    with _transaction(connection):
        exists = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
        if not exists:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            meta = {"format": str(_FORMAT), "producer_uid": uuid.uuid4().hex}
            meta |= {key: str(value) for key, value in asdict(settings).items()}
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        return dict(connection.execute("SELECT key, value FROM meta").fetchall())


def _check_meta(path: Path, meta: dict[str, str], settings: JournalSettings) -> None:
    if meta["format"] != str(_FORMAT):
        raise JournalError(f"{path}: journal format {meta['format']}, this version reads {_FORMAT}")
    for key, value in asdict(settings).items():
        if meta[key] != str(value):
            raise JournalError(
                f"{path}: written with {key} = {meta[key]}, now {value};"
                f" resume with {meta[key]} or begin a new run"
            )


def _to_row(record: Record) -> Row:
    match record:
        case GroupStarted():
            return "started", record.group_id, record.prompt_idx, record.start_version, b""
        case SampleAdvanced():
            return "advanced", record.group_id, record.sample_idx, 0, encode_event(record.event)
        case SampleRewarded():
            body = json.dumps({"score": record.score, "parts": dict(record.parts)}, allow_nan=False)
            return "rewarded", record.group_id, record.sample_idx, 0, body.encode()
        case GroupReleased():
            return "released", record.group_id, record.position, 0, b""
        case GroupDropped():
            return "dropped", record.group_id, 0, 0, record.reason.encode()
        case BatchesAcknowledged():
            return "acknowledged", -1, record.num_batches, record.oldest_kept, b""


def _from_row(row: Row) -> Record:
    kind, group_id, number, other, body = row
    match kind:
        case "started":
            return GroupStarted(group_id, number, other)
        case "advanced":
            return SampleAdvanced(group_id, number, decode_event(body))
        case "rewarded":
            tree = json.loads(body)
            return SampleRewarded(group_id, number, tree["score"], tree["parts"])
        case "released":
            return GroupReleased(group_id, number)
        case "dropped":
            return GroupDropped(group_id, body.decode())
        case "acknowledged":
            return BatchesAcknowledged(number, other)
        case _:
            raise JournalError(f"the journal has a record of unknown kind {kind!r}")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        locked = "locked" in str(error)
        advice = "another rollouter has it; stop that one" if locked else "check the disk and the rights"
        raise JournalError(f"{path}: {error}; {advice}") from error
    except sqlite3.DatabaseError as error:
        raise JournalError(f"{path}: {error}; the file is damaged, begin a new run or restore it") from error


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
