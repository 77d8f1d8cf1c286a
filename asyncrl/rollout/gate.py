"""Whether requests may be sent to engines: not while paused, nor for a policy version still to come.

A group waits for the version at which it was started. That matters after a restart from an older
checkpoint alone: continuing earlier would add tokens older than the group's staleness bound allows.
"""

from __future__ import annotations

from asyncrl.rollout.waiting import Progress
from asyncrl.types import PolicyVersion


class Gate:
    """``version`` is the one that every engine serves or has passed."""

    def __init__(self, progress: Progress, version: PolicyVersion) -> None:
        self._progress = progress
        # waiters at the gate are many and care for nothing else, so they have a signal of their own
        self._changed = Progress(progress.timeout_s)
        self._version = version
        self._paused = False

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def paused(self) -> bool:
        return self._paused

    def publish(self, version: PolicyVersion) -> None:
        self._version = version
        self._notify()

    def set_paused(self, paused: bool) -> None:
        self._paused = paused
        self._notify()

    async def passed(self, start_version: PolicyVersion) -> None:
        """Return when a group of ``start_version`` may be sent.

        Raises:
            RolloutError: neither a version nor the end of a pause came within the progress time-out.
        """
        await self._changed.wait_until(
            lambda: not self._paused and self._version >= start_version,
            lambda: self.blocker(start_version),
        )

    def _notify(self) -> None:
        self._changed.notify()
        self._progress.notify()

    def blocker(self, version: PolicyVersion) -> str:
        """Whom one waits for who waits for ``version``."""
        if self._paused:
            return "the coordinator to end the pause of rollouts"
        return f"the trainer to publish policy version {version}; the engines serve {self._version}"
