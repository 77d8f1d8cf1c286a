"""Wrong use and broken rings: each a named error with the numbers in it, and the ring unharmed."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.ring import Ring
from asyncrl.ring.errors import (
    MemberBusy,
    NotARing,
    RingAbiMismatch,
    RingCorrupt,
    RingDetached,
    RingExists,
    RingLimit,
    RingMissing,
    RingNoSpace,
    RingTimeout,
    ViewsAlive,
    WrongRole,
)
from asyncrl.ring.inspect import clear, describe_ring, inspect, repair
from tests.unit.ring_samples import make_sample, numbers, temporary_ring

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def path() -> Iterator[Path]:
    with temporary_ring() as ring:
        yield ring


def other_process(path: Path, script: str) -> subprocess.Popen[str]:
    """A process that has the ring open as `ring` and says READY at the end of ``script``, then sleeps."""
    prelude = (
        "import sys, time; from pathlib import Path; from asyncrl.ring import Ring\n"
        "from tests.unit.ring_samples import make_sample\n"
        f"path = Path({str(path)!r})\n"
    )
    code = prelude + script + "\nprint('READY', flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPO, env={**os.environ}
    )
    assert process.stdout is not None and process.stdout.readline() == "READY\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path / "ring", "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_missing_and_existing(path: Path, tmp_path: Path) -> None:
    with pytest.raises(RingMissing, match="no such ring"):
        Ring.open(tmp_path / "nothing", role="reader", name="r")
    with pytest.raises(RingExists, match="a ring is there"):
        Ring.create(path, arena_bytes=4096, num_slots=4)


def test_a_foreign_file(path: Path) -> None:
    (path / "ring").write_bytes(b"something else entirely" * 1000)
    with pytest.raises(NotARing, match="no magic number"):
        Ring.open(path, role="reader", name="r")


def test_another_abi(path: Path) -> None:
    overwrite(path, 8, struct.pack("<I", 7))
    with pytest.raises(RingAbiMismatch, match=r"ring ABI 7\.0 .* this build reads 1"):
        Ring.open(path, role="reader", name="r")


def test_a_truncated_ring(path: Path) -> None:
    size = (path / "ring").stat().st_size
    os.truncate(path / "ring", size - 4096)
    with pytest.raises(RingCorrupt, match=f"describes {size} bytes, the file has {size - 4096}"):
        Ring.open(path, role="reader", name="r")


def test_a_corrupt_header_is_repaired_with_its_records(path: Path) -> None:
    producer = Ring.open(path, role="producer", name="p")
    producer.put_many([make_sample(i) for i in range(3)], timeout=1)
    producer.detach()
    overwrite(path, 64, b"\xff" * 8)
    with pytest.raises(RingCorrupt, match="checksum"):
        Ring.open(path, role="reader", name="r")
    assert repair(path) == ["restored the header from its copy", "rebuilt the tables: 3 records kept"]
    assert numbers(Ring.open(path, role="reader", name="r").group("dp0").get_batch(3, timeout=1)) == [0, 1, 2]


def test_damaged_slots_are_dropped_by_repair_and_the_rest_is_kept(path: Path) -> None:
    producer = Ring.open(path, role="producer", name="p")
    producer.put_many([make_sample(i) for i in range(4)], timeout=1)
    with open(path / "ring", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        slots_at = struct.unpack_from("<Q", memory, 144)[0]  # Geometry::slots_at
        struct.pack_into("<Q", memory, slots_at + 128 + 16, 1 << 40)  # length of the second slot
    done = repair(path)
    assert done[-1] == "dropped 1 damaged records"
    assert numbers(Ring.open(path, role="reader", name="r").group("dp0").get_batch(3, timeout=1)) == [0, 2, 3]
    assert producer.check() == ""


def test_a_replaced_lock_file(path: Path) -> None:
    (path / "lock").unlink()
    (path / "lock").touch()
    with pytest.raises(RingCorrupt, match="missing or replaced"):
        Ring.open(path, role="reader", name="r")


def test_a_full_file_system(tmp_path: Path) -> None:
    free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
    target = Path("/dev/shm") / f"asyncrl-test-full-{os.getpid()}"
    with pytest.raises(RingNoSpace, match=r"the ring needs \d+ bytes, the file system has \d+ free"):
        Ring.create(target, arena_bytes=2 * free + (1 << 40), num_slots=4)
    Ring.create(target, arena_bytes=4096, num_slots=4).detach()  # nothing of the failed one is in the way
    Ring.unlink(target)
    assert not target.exists()


def test_roles(path: Path) -> None:
    with pytest.raises(WrongRole, match="opened as reader"):
        Ring.open(path, role="reader", name="r").put(make_sample(1), timeout=0)
    with pytest.raises(WrongRole, match="opened as producer"):
        Ring.open(path, role="producer", name="p").group("dp0")


def test_all_places_taken() -> None:
    with temporary_ring(num_participants=2) as path:
        first = Ring.open(path, role="reader", name="a")
        second = Ring.open(path, role="reader", name="b")
        with pytest.raises(RingLimit, match="all 2 places are taken"):
            Ring.open(path, role="reader", name="c")
        second.detach()
        assert Ring.open(path, role="reader", name="c").stats() == first.stats()


def test_detached_and_forked_handles(path: Path) -> None:
    producer = Ring.open(path, role="producer", name="p")
    producer.put(make_sample(1), timeout=1)
    ring = Ring.open(path, role="reader", name="r")
    pid = os.fork()
    if pid == 0:
        try:
            ring.stats()
        except RingDetached as error:
            os._exit(0 if "opened before a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    batch = ring.group("dp0").get_batch(1, timeout=1)
    with pytest.raises(ViewsAlive, match="1 records are on loan"):
        ring.detach()
    batch.release()
    ring.detach()
    with pytest.raises(RingDetached, match="was detached"):
        ring.stats()


def test_writing_through_a_torch_view_faults_and_harms_nobody(path: Path) -> None:
    Ring.open(path, role="producer", name="p").put(make_sample(5), timeout=1)
    script = (
        "group = Ring.open(path, role='reader', name='r').group('dp0')\n"
        "group.get_batch(1, timeout=1)[0].torch('token_ids').fill_(0)\n"
    )
    code = (
        "from pathlib import Path; from asyncrl.ring import Ring\n" + f"path = Path({str(path)!r})\n" + script
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True)
    assert done.returncode == -signal.SIGSEGV
    sample = Ring.open(path, role="reader", name="r").group("dp0").get_batch(1, timeout=1)[0].sample()
    assert sample.token_ids[4] == 5


def test_a_killed_producer_and_a_killed_rank(path: Path) -> None:
    producer = other_process(
        path, "Ring.open(path, role='producer', name='p').put(make_sample(1), key=('p', 1), timeout=1)"
    )
    member = other_process(
        path,
        "group = Ring.open(path, role='reader', name='rank1').group('dp0', rank=1, size=2)\n"
        "batch = group.get_batch(1, timeout=10)",
    )
    end(producer)
    own = Ring.open(path, role="producer", name="p")
    assert not own.put(make_sample(1), key=("p", 1), timeout=1), "the retry of a published record"
    group = Ring.open(path, role="reader", name="rank0").group("dp0", rank=0, size=2)
    with group.get_batch(1, timeout=1) as batch:
        batch.ack()
    with pytest.raises(MemberBusy, match="is in use by rank"):
        own.remove_group("dp0")
    with pytest.raises(MemberBusy, match=r"\(pid \d+\) has the ring open"):
        clear(path)
    report = inspect(path)
    assert {who.name: who.alive for who in report.participants if who.name == "rank1"} == {"rank1": True}
    end(member)
    again = Ring.open(path, role="reader", name="rank1-again").group("dp0", rank=1, size=2)
    with again.get_batch(1, timeout=1) as batch:
        assert numbers(batch) == [1], "a restarted rank gets what it had not acknowledged"
        batch.ack()
    assert own.stats().num_free == 16


def test_one_dead_group_among_many_is_removed_for_its_room(path: Path) -> None:
    producer = Ring.open(path, role="producer", name="p")
    producer.put_many([make_sample(i) for i in range(16)], timeout=1)
    dead = other_process(
        path,
        "ring = Ring.open(path, role='reader', name='gone')\nb = ring.group('old').get_batch(16, timeout=1)",
    )
    alive = Ring.open(path, role="reader", name="alive").group("new")
    end(dead)
    with pytest.raises(RingTimeout, match="group old rank 0"):
        producer.put(make_sample(16), timeout=0.2)
    producer.remove_group("old")
    with alive.get_batch(16, timeout=1) as batch:
        assert numbers(batch) == list(range(16))
        batch.ack()


def test_a_waiting_handle_uses_no_cpu(path: Path) -> None:
    script = (
        "import time; from pathlib import Path\n"
        "from asyncrl.ring import Ring; from asyncrl.ring.errors import RingTimeout\n"
        f"group = Ring.open(Path({str(path)!r}), role='reader', name='r').group('dp0')\n"
        "before = time.process_time()\n"
        "try: group.get_batch(1, timeout=2.0)\n"
        "except RingTimeout: print(time.process_time() - before)\n"
    )
    # a process of its own, in which numpy starts no threads, which may spin for 30 ms before they sleep
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPO, env=environment, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 0.02


def test_the_inside_of_a_ring_as_text(path: Path) -> None:
    producer = Ring.open(path, role="producer", name="rollout-3")
    group = Ring.open(path, role="reader", name="trainer").group("dp0", rank=0, size=2)
    producer.put_many([make_sample(i) for i in range(3)], timeout=1)
    batch = group.get_batch(2, timeout=1)
    text = describe_ring(path)
    for expected in (
        "1 ready (20 tokens",
        "2 held",
        f"producer  rollout-3 (pid {os.getpid()}, alive",
        "dp0[0]  participant 1: 2 to acknowledge, 2 on loan",
        "dp0[1]  not attached: 2 to acknowledge, 0 on loan",
        "lock      free",
    ):
        assert expected in text, f"{expected!r} not in\n{text}"
    del batch


def test_an_abandoned_ring_is_cleared(path: Path) -> None:
    assert inspect(path).abandoned
    clear(path)
    assert not path.exists()
