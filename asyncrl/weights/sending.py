"""One version on its way from a trainer rank: a thread for every engine, or for every link of engines."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from asyncrl.weights.collective import gather_messages
from asyncrl.weights.transport import BucketSender, Version
from asyncrl.weights.wire import WeightUpdateError


@dataclass(frozen=True, slots=True)
class Parcel:
    """Engines that one sender serves together, and the version that all of them hold, if it is kept."""

    engines: tuple[str, ...]
    sender: BucketSender
    base: Version | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one rank's sending of one parcel."""

    num_bytes: int  # that left, which each of the engines then has
    seconds: float  # until its last bucket had left
    failures: Mapping[str, str] = field(default_factory=dict)  # engine -> reason


class Sending:
    """One version on its way, on threads of its own; `Publisher.finish` ends it."""

    def __init__(self, version: Version, parcels: Sequence[Parcel], timeout_s: float, staged: bool) -> None:
        self.version = version
        self.parcels = tuple(parcels)
        self._began = time.monotonic()
        self._staged = staged
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(
            max_workers=max(1, len(parcels)), initializer=_use_device_of, initargs=(version.parameters,)
        )
        self._outcomes: list[Future[Outcome]] = [self._pool.submit(self._send, item) for item in parcels]

    @property
    def together(self) -> set[str]:
        """The engines that are linked."""
        return {engine for item in self.parcels if len(item.engines) > 1 for engine in item.engines}

    def _send(self, parcel: Parcel) -> Outcome:
        try:
            sent = parcel.sender.send(self.version, self._timeout_s, parcel.base, staged=self._staged)
        except WeightUpdateError as error:
            return Outcome(0, self._seconds(), dict.fromkeys(parcel.engines, str(error)))
        return Outcome(sent.num_bytes, self._seconds(), sent.failures)

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def wait(self) -> list[Outcome]:
        """This rank's outcomes, one for each parcel; every send has a deadline."""
        outcomes = [future.result() for future in self._outcomes]
        self._pool.shutdown()
        return outcomes

    def failures_here(self) -> dict[str, str]:
        """The engines to which this rank could not send, and why, once it has sent to the others."""
        return {engine: reason for item in self.wait() for engine, reason in item.failures.items()}


def _use_device_of(parameters: Sequence[torch.Tensor]) -> None:
    """A new thread would use the first device."""
    if parameters and parameters[0].is_cuda:
        torch.cuda.set_device(parameters[0].device)


def exchange_outcomes(own: Sequence[Outcome]) -> list[list[Outcome]]:
    """Per trainer rank, per parcel."""
    told = json.dumps([[item.num_bytes, item.seconds, dict(item.failures)] for item in own]).encode()
    return [[Outcome(*item) for item in json.loads(message)] for message in gather_messages(told)]


def failures_anywhere(everybody: Sequence[Sequence[Outcome]]) -> dict[str, str]:
    """For every engine that failed on any trainer rank, the first such rank's reason."""
    failures: dict[str, str] = {}
    for rank, outcomes in enumerate(everybody):
        for outcome in outcomes:
            for engine, reason in outcome.failures.items():
                failures.setdefault(engine, f"trainer rank {rank}: {reason}")
    return failures
