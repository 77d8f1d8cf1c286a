"""The watcher: the first unexpected end is the one that is reported, with what it died of."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from asyncrl.launch.pidfd import describe_status, exit_status
from asyncrl.launch.watch import Death, Watched, Watcher


def wait_for_death(watcher: Watcher) -> Death:
    deadline = time.monotonic() + 5
    while watcher.first_death is None and time.monotonic() < deadline:
        time.sleep(0.01)
    death = watcher.first_death
    assert death is not None
    return death


def sleeper(seconds: float = 60) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", str(seconds)])


def test_the_first_of_several_deaths_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "second.log"
    log.write_text("\n".join(f"line {idx}" for idx in range(80)))
    first, second, third = sleeper(), sleeper(), sleeper()
    watcher = Watcher()
    for name, process in (("first", first), ("second", second), ("third", third)):
        watcher.add(Watched(name, process.pid, log if name == "second" else None))
    second.send_signal(signal.SIGSEGV)
    death = wait_for_death(watcher)
    for process in (first, third):
        process.kill()
    text = death.describe()
    assert text.startswith(f"second (pid {second.pid}) died first: killed by SIGSEGV (11)")
    assert "line 79" in text and "line 30" in text and "line 29" not in text
    watcher.close()
    for process in (first, second, third):
        process.wait()


def test_a_status_is_told_before_and_after_the_parent_reaps() -> None:
    for reap_first in (False, True):
        process = subprocess.Popen(["bash", "-c", "exit 3"])
        pidfd = os.pidfd_open(process.pid)
        select.select([pidfd], [], [])
        if reap_first:
            process.wait()
        assert exit_status(pidfd, process.pid) == 3 << 8
        process.wait()
        os.close(pidfd)


def test_a_clean_exit_and_an_expected_end_are_no_deaths() -> None:
    watcher = Watcher()
    clean, later = subprocess.Popen(["true"]), sleeper()
    watcher.add(Watched("clean", clean.pid, None))
    watcher.add(Watched("later", later.pid, None))
    clean.wait()
    time.sleep(0.1)
    assert watcher.first_death is None
    watcher.expect_ends()
    later.kill()
    later.wait()
    time.sleep(0.1)
    assert watcher.first_death is None
    watcher.close()


def test_a_process_that_is_gone_already_is_a_death() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    watcher = Watcher()
    watcher.add(Watched("gone", process.pid, None))
    assert wait_for_death(watcher).process.name == "gone"
    watcher.close()


@pytest.mark.parametrize(
    ("status", "words"),
    [(9, "SIGKILL"), (11, "SIGSEGV"), (3 << 8, "status 3"), (None, "does not tell")],
)
def test_a_status_is_described(status: int | None, words: str) -> None:
    assert words in describe_status(status)


def test_the_death_of_an_engine_is_kept_apart() -> None:
    engine, other = sleeper(), sleeper()
    watcher = Watcher()
    watcher.add(Watched("engine-1 scheduler", engine.pid, None, "engine-1", 2))
    watcher.add(Watched("other", other.pid, None))
    engine.kill()
    deadline = time.monotonic() + 5
    while not (deaths := watcher.take_engine_deaths()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [(death.process.engine, death.process.incarnation) for death in deaths] == [("engine-1", 2)]
    assert watcher.first_death is None and watcher.take_engine_deaths() == []
    other.kill()
    assert wait_for_death(watcher).process.name == "other"
    watcher.close()
    for process in (engine, other):
        process.wait()
