"""Where released groups go: the ring of the data-parallel replica that will train them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncrl.rollout.admission import Placement
from asyncrl.types import Sample, SampleGroup


class SampleSink(Protocol):
    """Takes groups in the order of their positions. Putting a group again must have no effect."""

    async def put_group(self, group: SampleGroup, placement: Placement) -> None: ...


class SampleRing(Protocol):
    """What is needed of `asyncrl.ring.ring.Ring`, opened as a producer."""

    async def aput_many(
        self, samples: Sequence[Sample], *, keys: Sequence[tuple[str, int]], timeout: float
    ) -> int: ...


class RingSink:
    """Puts every sample of a group into ring ``placement.ring_idx``.

    The key is (producer, position * n + sample index): it grows with every put, also over restarts, so
    that a ring that remembers the last key of a producer recognises what it already has.
    """

    def __init__(self, rings: Sequence[SampleRing], producer_uid: str, timeout_s: float) -> None:
        self._rings = tuple(rings)
        self._producer_uid = producer_uid
        self._timeout_s = timeout_s

    async def put_group(self, group: SampleGroup, placement: Placement) -> None:
        """Raises RingTimeout, naming who holds the ring's records, when it stays full."""
        ring = self._rings[placement.ring_idx]
        first = placement.position * len(group.samples)
        keys = [(self._producer_uid, first + sample.sample_idx) for sample in group.samples]
        await ring.aput_many(group.samples, keys=keys, timeout=self._timeout_s)
