"""Group commit: all records that wait while one transaction runs go into the next one together.

    write(records) ... write(records)  -->  pending  --run()-->  JournalStore.write in one thread  -->  return

Order is kept: a record written earlier is never durable later than one written after it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from asyncrl.rollout.journal import JournalStore
from asyncrl.rollout.records import Record
from asyncrl.rollout.waiting import within

COMMIT_TIMEOUT_S = 120.0


class GroupCommit:
    """One per journal; `run` must be running for `write` to return. Not thread-safe."""

    def __init__(self, store: JournalStore) -> None:
        self._store = store
        self._pending: list[tuple[tuple[Record, ...], asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    async def write(self, *records: Record) -> None:
        """Return when all ``records`` are durable."""
        done = asyncio.get_running_loop().create_future()
        self._pending.append((records, done))
        self._wake.set()
        await done

    async def run(self) -> None:
        """Serve writers until cancelled; raises what the store raises."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._pending = self._pending, []
            records = [record for group, _ in batch for record in group]
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._store.write, records)
            await within(COMMIT_TIMEOUT_S, work, lambda: "the disk of the rollout journal")
            for _, done in batch:
                if not done.done():
                    done.set_result(None)

    def close(self) -> None:
        """Let a running transaction end and stop the thread."""
        self._thread.shutdown(wait=True)
