"""The warden: whatever ends its owner or its command, nothing of the tree is left."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from asyncrl.launch.warden import descendants
from tests.processes import running

WARDEN = [sys.executable, "-m", "asyncrl.launch.warden"]
# a daemon that left its session, a child that ignores SIGTERM, an orphan, and their shell, which stays
TREE = "setsid sleep 300 & (sleep 301 &) ; trap '' TERM; echo up; sleep 302; true"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*WARDEN, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_up(warden: subprocess.Popen[str]) -> list[int]:
    assert warden.stdout is not None
    assert warden.stdout.readline() == "up\n"
    deadline = time.monotonic() + 10
    while len(tree := descendants(warden.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(tree) == 4
    return tree


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_closing_the_pipe_ends_the_whole_tree() -> None:
    warden = start("--grace", "0.3", "--", "bash", "-c", TREE)
    tree = wait_up(warden)
    assert warden.stdin is not None
    warden.stdin.close()
    assert warden.wait(timeout=10) == 128 + signal.SIGKILL
    assert alive(tree) == []


def test_sigterm_ends_the_whole_tree() -> None:
    warden = start("--grace", "0.3", "--", "bash", "-c", TREE)
    tree = wait_up(warden)
    warden.terminate()
    warden.wait(timeout=10)
    assert alive(tree) == []


def test_the_owners_sigkill_ends_the_whole_tree() -> None:
    command = [*WARDEN, "--grace", "0.2", "--", "bash", "-c", TREE]
    code = (
        "import subprocess, sys, time\n"
        f"w = subprocess.Popen({command!r}, stdin=subprocess.PIPE)\n"
        "print(w.pid, flush=True); time.sleep(300)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    words = {owner.stdout.readline().strip(), owner.stdout.readline().strip()}
    warden_pid = int((words - {"up"}).pop())
    tree = [warden_pid, *descendants(warden_pid)]
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 10
    while running(tree) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running(tree)


def test_the_wardens_own_sigkill_ends_the_command() -> None:
    warden = start("--", "bash", "-c", "echo up; exec sleep 300")
    assert warden.stdout is not None and warden.stdout.readline() == "up\n"
    (command,) = descendants(warden.pid)
    warden.kill()
    warden.wait()
    deadline = time.monotonic() + 5
    while running([command]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running([command])


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -SEGV $$", 128 + signal.SIGSEGV)])
def test_the_commands_status_is_passed_on(script: str, code: int) -> None:
    warden = start("--", "bash", "-c", script)
    assert warden.wait(timeout=10) == code


def test_a_command_that_cannot_start_is_named() -> None:
    result = subprocess.run(
        [*WARDEN, "--", "no-such-command"], stdin=subprocess.PIPE, capture_output=True, text=True, timeout=10
    )
    assert result.returncode == 127
    assert "no-such-command: No such file" in result.stderr


def test_shared_memory_and_directories_are_removed(tmp_path: Path) -> None:
    shm = Path(f"/dev/shm/asyncrl-test-{uuid.uuid4().hex}")
    directory = tmp_path / "rings"
    directory.mkdir()
    code = (
        "import mmap, os, sys, time\n"
        f"f = os.open({str(shm)!r}, os.O_CREAT | os.O_RDWR); os.ftruncate(f, 4096); m = mmap.mmap(f, 4096)\n"
        "print('up', flush=True); time.sleep(300)\n"
    )
    warden = start("--grace", "0.1", "--remove", str(directory), "--", sys.executable, "-c", code)
    assert warden.stdout is not None and warden.stdout.readline() == "up\n"
    assert shm.exists()
    assert warden.stdin is not None
    warden.stdin.close()
    warden.wait(timeout=10)
    assert not shm.exists()
    assert not directory.exists()


def test_terminal_interrupt_is_left_to_the_owner() -> None:
    warden = start("--", "bash", "-c", "echo up; read -t 0.3 < <(sleep 1); exit 5")
    assert warden.stdout is not None and warden.stdout.readline() == "up\n"
    os.kill(warden.pid, signal.SIGINT)
    assert warden.wait(timeout=10) == 5


def test_shared_memory_of_a_process_that_died_before_is_removed_too() -> None:
    shm = Path(f"/dev/shm/asyncrl-test-{uuid.uuid4().hex}")
    code = (
        "import mmap, os, time\n"
        f"f = os.open({str(shm)!r}, os.O_CREAT | os.O_RDWR); os.ftruncate(f, 4096); m = mmap.mmap(f, 4096)\n"
        "print('up', flush=True)\n"
        "for _ in range(150): time.sleep(0.01)\n"  # of a stall of the machine, one step counts
        "os._exit(9)\n"
    )
    warden = start("--", sys.executable, "-c", code)
    assert warden.stdout is not None and warden.stdout.readline() == "up\n"
    assert warden.wait(timeout=10) == 9
    assert not shm.exists()


def test_shared_memory_that_others_still_map_is_left() -> None:
    shm = Path(f"/dev/shm/asyncrl-test-{uuid.uuid4().hex}")
    with shm.open("wb+") as file:
        file.truncate(4096)
        ours = mmap.mmap(file.fileno(), 4096)
    code = (
        "import mmap, os, time\n"
        f"f = os.open({str(shm)!r}, os.O_RDWR); m = mmap.mmap(f, 4096)\n"
        "print('up', flush=True)\n"
        "for _ in range(100): time.sleep(0.01)\n"
    )
    warden = start("--", sys.executable, "-c", code)
    assert warden.wait(timeout=10) == 0
    assert shm.exists()
    ours.close()
    shm.unlink()
