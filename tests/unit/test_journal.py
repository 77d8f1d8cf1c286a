"""The journal on a real file: what comes back, what survives a kill, what is refused."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engines.base import INTERRUPTED
from asyncrl.rollout.journal import Journal, JournalSettings
from asyncrl.rollout.records import (
    BatchesAcknowledged,
    GroupDropped,
    GroupReleased,
    GroupStarted,
    JournalError,
    Record,
    SampleAdvanced,
    SampleRewarded,
    fold,
)
from asyncrl.rollout.trajectory import Generated, Observed
from asyncrl.types import FinishReason, Segment, SegmentKind

SETTINGS = JournalSettings(groups_per_batch=2, samples_per_group=1, max_staleness=1)


def advanced(group_id: int, *token_ids: int, sample_idx: int = 0) -> SampleAdvanced:
    segment = Segment(SegmentKind.MODEL, token_ids, tuple(-0.1 * t for t in token_ids), 3)
    return SampleAdvanced(group_id, sample_idx, Generated((segment,), INTERRUPTED))


def story(num_groups: int, first: int = 0) -> list[Record]:
    """Groups that were started, sampled, rewarded and released in order."""
    records: list[Record] = []
    for group_id in range(first, first + num_groups):
        records += [GroupStarted(group_id, group_id, 0), advanced(group_id, 5, 6), advanced(group_id, 7)]
        records += [SampleRewarded(group_id, 0, 0.5, {"format": 1.0}), GroupReleased(group_id, group_id)]
    return records


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "journal.sqlite"
    observed = Observed((Segment(SegmentKind.TOOL, (9,)), Segment(SegmentKind.TEMPLATE, (8, 7))), done=True)
    records: list[Record] = [
        *story(2),
        GroupStarted(2, 2, 1),
        advanced(2, 1, sample_idx=1),
        SampleAdvanced(2, 1, observed),
        SampleAdvanced(2, 1, Generated((), FinishReason.STOP)),
        GroupStarted(3, 3, 1),
        GroupDropped(3, "reward_error"),
        BatchesAcknowledged(1, 0),
    ]
    journal = Journal.open(path, SETTINGS)
    uid = journal.producer_uid
    journal.write(records)
    assert journal.load() == fold(records)
    journal.close()
    again = Journal.open(path, SETTINGS)
    assert again.load() == fold(records)
    assert again.producer_uid == uid
    again.close()


def test_acknowledged_tokens_are_forgotten_positions_are_not(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j.sqlite", SETTINGS)
    journal.write([*story(6), BatchesAcknowledged(2, oldest_kept=1)])
    state = journal.load()
    assert [bool(group.events) for group in state.groups.values()] == [False, False, True, True, True, True]
    assert [group.position for group in state.groups.values()] == list(range(6))
    assert (state.num_acknowledged, state.oldest_kept) == (2, 1)
    journal.close()


def test_one_rollouter_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal.open(path, SETTINGS)
    with pytest.raises(JournalError, match="another rollouter has it"):
        Journal.open(path, SETTINGS)
    journal.close()


@pytest.mark.parametrize("key", ["groups_per_batch", "samples_per_group", "max_staleness"])
def test_other_settings_are_refused_with_both_values(tmp_path: Path, key: str) -> None:
    Journal.open(tmp_path / "j.sqlite", SETTINGS).close()
    other = {"groups_per_batch": 2, "samples_per_group": 1, "max_staleness": 1} | {key: 5}
    with pytest.raises(JournalError, match=rf"{key} = [12], now 5; resume with [12]"):
        Journal.open(tmp_path / "j.sqlite", JournalSettings(**other))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    path.write_bytes(b"not a database" * 500)
    with pytest.raises(JournalError, match=r"j\.sqlite: file is not a database; the file is damaged"):
        Journal.open(path, SETTINGS)


def test_durability_is_asked_for(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j.sqlite", SETTINGS)
    assert journal._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert journal._connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"
    journal.close()


def test_the_directory_is_synced_once_the_file_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    (tmp_path / "run").mkdir()
    Journal.open(tmp_path / "run" / "j.sqlite", SETTINGS).close()
    assert synced == [str(tmp_path / "run")]


def test_a_failing_disk_is_one_line_and_nothing_is_half_written(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "j.sqlite", SETTINGS)
    journal.write(story(1))
    journal._connection.execute(
        "CREATE TEMP TRIGGER full BEFORE INSERT ON main.records WHEN NEW.kind = 'released'"
        " BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
    )
    with pytest.raises(JournalError, match=r"j\.sqlite: database or disk is full"):
        journal.write(story(1, first=1))
    assert len(journal.load().groups) == 1
    journal.close()


def test_a_kill_at_any_moment_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """A child prints a number after each durable write; after SIGKILL at a random moment all are there."""
    child = (
        "import sys; from pathlib import Path\n"
        "from tests.unit.test_journal import SETTINGS, story\n"
        "from asyncrl.rollout.journal import Journal\n"
        "journal = Journal.open(Path(sys.argv[1]), SETTINGS)\n"
        "first = len(journal.load().groups)\n"
        "for group_id in range(first, first + 10_000):\n"
        "    journal.write(story(1, first=group_id)); print(group_id, flush=True)\n"
    )
    path, acknowledged = tmp_path / "j.sqlite", -1
    for num_writes in (1, 7, 23):
        process = subprocess.Popen(
            [sys.executable, "-c", child, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(num_writes):
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        acknowledged = max([acknowledged, *map(int, process.stdout.read().split())])
        process.wait(30)
        journal = Journal.open(path, SETTINGS)
        groups = journal.load().groups.values()
        journal.close()
        assert len(groups) > acknowledged
        assert all(len(group.events[0]) == 2 and group.position is not None for group in groups), "torn"


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([GroupStarted(1, 1, 0)], "issues group 1 after 0"),
        ([*story(1), GroupStarted(0, 0, 0)], "issues group 0 after 1"),
        ([advanced(0, 1)], "group 0, which was never issued"),
        ([*story(1), advanced(0, 1)], "group 0, which has ended"),
        ([*story(1), GroupDropped(0, "late")], "group 0, which has ended"),
        ([*story(1), GroupStarted(1, 1, 0), GroupReleased(1, 5)], "position 5 after 1"),
        ([*story(1)[:4], SampleRewarded(0, 0, 1.0)], "rewards a sample of group 0 twice"),
    ],
)
def test_an_impossible_sequence_is_refused(records: list[Record], message: str) -> None:
    with pytest.raises(JournalError, match=message):
        fold(records)


@given(
    st.lists(st.integers(1, 6), max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=5),
)
@settings(max_examples=15, deadline=None)
def test_any_transactions_equal_the_plain_list(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], extra: list[tuple[int, int]]
) -> None:
    """The file is the fold of a list, however the records are cut into transactions and reopened."""
    path = tmp_path_factory.mktemp("journal") / "j.sqlite"
    starts: list[Record] = [GroupStarted(i, i, i // 2) for i in range(6)]
    records = starts + [advanced(g, *range(3, 4 + n), sample_idx=n) for g, n in extra]
    rest = list(records)
    for cut in [*cuts, len(rest)]:
        journal = Journal.open(path, SETTINGS)
        journal.write(rest[:cut])
        journal.close()
        rest = rest[cut:]
    journal = Journal.open(path, SETTINGS)
    assert journal.load() == fold(records)
    journal.close()


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    Journal.open(path, SETTINGS).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    connection.close()
    with pytest.raises(JournalError, match="journal format 99"):
        Journal.open(path, SETTINGS)
