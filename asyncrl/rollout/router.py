"""Which engine replica serves a request: the group's own, unless it is much busier than another.

Samples of a group share their prompt's keys and values, and an interrupted sample finds its prefix cached
where it ran, so a group stays on one replica until the load says otherwise. Also keeps what each replica
did: requests in flight, and the seconds in which it had none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncrl.engines.base import Engine
from asyncrl.rollout.waiting import RolloutError

AFFINITY_SLACK = 8
"""How many more requests than the least busy replica a group's own replica may have."""


def choose(in_flight: Mapping[str, int], preferred: str | None) -> str:
    """The replica for a request, of those in ``in_flight`` (not empty); ties go to the first name."""
    least = min(in_flight.values())
    if preferred is not None and preferred in in_flight and in_flight[preferred] <= least + AFFINITY_SLACK:
        return preferred
    return min(in_flight, key=lambda name: (in_flight[name], name))


MAX_FAILURES = 3
"""Failed requests in a row, without one that succeeded, after which a replica gets no more."""


@dataclass(slots=True)
class _Replica:
    engine: Engine
    num_failures: int = 0  # in a row
    in_flight: int = 0
    busy_s: float = 0.0
    busy_since: float = 0.0


class Router:
    """Not thread-safe: one event loop owns it. ``clock`` gives seconds."""

    def __init__(self, engines: Mapping[str, Engine], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._replicas = {name: _Replica(engine) for name, engine in engines.items()}
        self._lost_busy_s = 0.0
        self._last_failure = "no engine was given"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    @property
    def busy_s(self) -> float:
        """Seconds, summed over replicas, in which a replica had at least one request."""
        now = self._clock()
        running = sum(now - r.busy_since for r in self._replicas.values() if r.in_flight)
        return self._lost_busy_s + running + sum(r.busy_s for r in self._replicas.values())

    def add(self, name: str, engine: Engine) -> None:
        """Use a new replica, or one that came back; it must serve the current policy version."""
        self.remove(name, f"{name}: replaced")
        self._replicas[name] = _Replica(engine)

    def remove(self, name: str, reason: str) -> None:
        """Send nothing more to a replica; a name that is not in use is not an error (it may fail twice)."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            return
        self._last_failure = reason
        self._lost_busy_s += replica.busy_s
        if replica.in_flight:
            self._lost_busy_s += self._clock() - replica.busy_since

    def acquire(self, preferred: str | None) -> tuple[str, Engine]:
        """A replica for one request, to be given back with `release`.

        Raises:
            RolloutError: no replica is left; names the last failure.
        """
        if not self._replicas:
            raise RolloutError(f"no engine is left; the last failure: {self._last_failure}")
        name = choose({name: r.in_flight for name, r in self._replicas.items()}, preferred)
        replica = self._replicas[name]
        if not replica.in_flight:
            replica.busy_since = self._clock()
        replica.in_flight += 1
        return name, replica.engine

    def succeeded(self, name: str, engine: Engine) -> None:
        """A request was answered."""
        replica = self._same(name, engine)
        if replica is not None:
            replica.num_failures = 0

    def failed(self, name: str, engine: Engine, reason: str) -> None:
        """A request failed though the replica seems to live; too many in a row remove it."""
        replica = self._same(name, engine)
        if replica is None:
            return
        replica.num_failures += 1
        if replica.num_failures >= MAX_FAILURES:
            self.remove(name, f"{reason} ({replica.num_failures} failures in a row)")

    def _same(self, name: str, engine: Engine) -> _Replica | None:
        """The replica, unless it was removed or replaced meanwhile by another of its name."""
        replica = self._replicas.get(name)
        return replica if replica is not None and replica.engine is engine else None

    def release(self, name: str, engine: Engine) -> None:
        """The request has ended."""
        replica = self._same(name, engine)
        if replica is None:
            return
        replica.in_flight -= 1
        if not replica.in_flight:
            replica.busy_s += self._clock() - replica.busy_since
