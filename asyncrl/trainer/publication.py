"""The trainer's side of publishing a policy version: rank 0 talks to the coordinator, all ranks send.

    all ranks:  follow the engines (`meetings`)
    rank 0:     prepare -> (engines pause) -> transfer -> (engines listen) ................ -> commit
    all ranks:                                  plan and hash known since the meeting, send buckets

    weights.stage:    rank 0: stage -> (engines listen and serve on) .. they verified -> land
                      engines pause for a local copy alone
    weights.overlap:  the ranks send from a copy of the parameters, on threads, and train on; the outcome is
                      looked at when the next version is due, or anything else is to be sent

Every decision that rank 0 takes is broadcast before the ranks act on it, so all of them take part in the same
transfers in the same order. Commit or land follows from rank 0's thread as soon as it has sent: an engine
verifies what every rank sent, so nothing else is needed. An engine that fails is met again before the next
publication, or between two steps, and gets the whole current version alone, if no other engine has given it
that meanwhile; the run goes on while one engine serves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.config import Config
from asyncrl.control.client import ControlClient, ControlError, ControlRefused
from asyncrl.control.messages import (
    CommitOrder,
    EngineFailed,
    EngineStatus,
    FlightName,
    Landing,
    Publication,
    PublicationResult,
    RunState,
    StageOrder,
)
from asyncrl.engines.base import StagePlace
from asyncrl.trainer.collectives import broadcast_json
from asyncrl.trainer.meetings import Meetings, control_deadline_s
from asyncrl.types import PolicyVersion
from asyncrl.weights.publisher import Publisher, PublishStats, Sending

MAX_LOOKS = 20
"""How often the engines may change between the look at them and the order that follows from it."""


@dataclass(frozen=True)
class PublishTimes:
    """Seconds, as rank 0 saw them."""

    total_s: float  # that training waited
    transfer_s: float
    num_bytes: int  # that arrived at all engines
    num_linked: int = 0  # engines that passed them on to each other
    paused_s: Mapping[str, float] = field(default_factory=dict)  # engine -> how long it answered nobody

    @property
    def engine_paused_s(self) -> float:
        """The longest pause of any engine."""
        return max(self.paused_s.values(), default=0.0)


@dataclass(frozen=True)
class _Flight:
    """A version under way, as all ranks know it; ``result`` comes to rank 0 alone."""

    version: PolicyVersion
    alone: bool  # for engines that do not serve yet; none of them taking it is no error
    sending: Sending
    result: Future[PublicationResult] | None


class PolicyPublisher:
    """All ranks construct it together and call its methods together, `has_news` apart."""

    def __init__(self, publisher: Publisher, control: ControlClient | None, config: Config) -> None:
        self._publisher = publisher
        self._control = control  # on rank 0 only
        self._config = config
        self._meetings = Meetings(publisher, control, config)
        self._flight: _Flight | None = None
        self._landing = ThreadPoolExecutor(max_workers=1)
        self.last_result: PublicationResult | None = None  # on rank 0 only

    def connect_engines(self) -> None:
        """Wait until all configured engines are up, and join a weight group with each.

        Raises:
            ControlError: an engine did not come up or did not join within its deadline.
        """
        self._meetings.connect_engines()

    def has_news(self, state: RunState) -> bool:
        """Whether an engine waits to be met, or for the current version; on rank 0."""
        return self._meetings.has_news(state)

    def publish(self, version: PolicyVersion) -> PublishTimes:
        """Bring the current weights into every engine as ``version``.

        With ``weights.overlap`` it returns while they are sent, with the times of the version before.

        Raises:
            ControlError: no engine holds the version in the end.
        """
        started = time.monotonic()
        times = self.finish()
        self._flight = self._begin(version, alone=False)
        assert self._flight is not None, "the coordinator refuses a publication without engines"
        if not self._config.weights.overlap:
            times = self.finish()
        return replace(times, total_s=time.monotonic() - started)

    def catch_up(self, version: PolicyVersion) -> None:
        """Bring the current weights, published as ``version`` before, into engines that came since.

        An engine that cannot take them is the coordinator's to judge; training goes on.
        """
        self.finish()
        self._flight = self._begin(version, alone=True)
        self.finish()

    def finish(self) -> PublishTimes:
        """Wait for the version that is under way, if any, and learn what became of it.

        Raises:
            ControlError: no engine took it.
        """
        started = time.monotonic()
        flight, self._flight = self._flight, None
        if flight is None:
            return PublishTimes(0.0, 0.0, 0)
        told = broadcast_json(_outcome(flight) if flight.result else None)
        result = PublicationResult.model_validate(told["result"]) if told["result"] else None
        stats = self._publisher.finish(flight.sending, taken_by=result.committed if result else ())
        # The engines know what became of it: this side may have sent all before it could notice a death.
        missed = flight.sending.together - set(result.committed if result else ())
        if missed:
            self._meetings.links.distrust(_first_reason(missed, stats, result) or told["error"])
        for failure in stats.failures:
            self._meetings.leave(failure.engine)
            if self._control:
                report = EngineFailed(name=failure.engine, reason=failure.reason)
                self._control.post("weights/failed", report, timeout_s=control_deadline_s(self._config))
        if result is None and not flight.alone:
            if not missed:
                raise ControlError(told["error"])
            # Engines that pass weights on fail together; each by itself may take them.
            self._flight = self._begin(flight.version, alone=False, again=flight.sending)
            return self.finish()
        if not flight.alone:
            self.last_result = result if self._control else None
        return PublishTimes(
            time.monotonic() - started,
            stats.seconds,
            stats.bytes_received_total,
            len(flight.sending.together - missed),
            result.paused_s if result else {},
        )

    def _begin(self, version: PolicyVersion, alone: bool, again: Sending | None = None) -> _Flight | None:
        """One flight; None where there is nobody to bring the version to. ``again``: of what was sent so."""
        weights = self._config.weights
        place = None if alone or weights.stage == "none" else weights.stage
        order = self._order_together(version, alone, place)
        if not order["plans"]:
            return None
        endpoints = [self._meetings.met[name].endpoint for name in order["ready"]]
        copied = weights.overlap and not alone
        sending = self._publisher.begin(
            endpoints, version, staged=place is not None, from_copy=copied, again=again
        )
        result = None
        if self._control:
            result = self._landing.submit(self._land, self._control, order, sending, place is not None)
        return _Flight(version, alone, sending, result)

    def _order_together(
        self, version: PolicyVersion, alone: bool, place: StagePlace | None
    ) -> dict[str, Any]:
        """Version, epoch, engines of the flight and those that are ready, once the coordinator agrees.

        Raises:
            ControlError: it refuses for another reason than a change of the engines.
        """
        for _ in range(MAX_LOOKS):
            self._meetings.follow()
            told = self._order(self._control, version, alone, place) if self._control else None
            order: dict[str, Any] = broadcast_json(told)
            if not order["again"]:
                return order
        raise ControlError(f"the engines changed {MAX_LOOKS} times while version {version} was prepared")

    def _order(
        self, control: ControlClient, version: PolicyVersion, alone: bool, place: StagePlace | None
    ) -> dict[str, Any]:
        """Let the engines listen for a version, as far as they are still those that were met."""
        state = control.state()
        changes = self._meetings.changes(state)
        names = self._meetings.met.keys() - set(changes["leave"])
        if alone:
            names &= {engine.name for engine in state.engines if engine.status is EngineStatus.JOINING}
        order = {"again": False, "version": version, "epoch": state.epoch, "plans": sorted(names)}
        if not names and (alone or changes["meet"]):
            return {**order, "again": not alone}
        if any(item["status"] is EngineStatus.SERVING for item in changes["meet"]):
            return {"again": True}  # refilled since they were followed; a publication must not leave it out
        plans = {name: self._meetings.plan(name) for name in sorted(names)}
        publication = Publication(version=version, epoch=state.epoch, plans=plans)
        try:
            ready = self._listen(control, publication, place)
        except ControlRefused:
            if control.state().epoch == state.epoch:
                raise
            return {"again": True}
        return {**order, "ready": ready}

    def _listen(
        self, control: ControlClient, publication: Publication, place: StagePlace | None
    ) -> list[str]:
        """The engines that listen: paused for this version, or serving beside it."""
        ready: list[str]
        deadline_s = control_deadline_s(self._config)
        if place is not None:
            order = StageOrder(**dict(publication), place=place)
            ready = control.post("weights/stage", order, timeout_s=deadline_s)
            return ready
        ready = control.post("weights/prepare", publication, timeout_s=deadline_s)
        control.post("weights/transfer", FlightName(version=publication.version, epoch=publication.epoch))
        return ready

    def _land(
        self, control: ControlClient, order: Mapping[str, Any], sending: Sending, staged: bool
    ) -> PublicationResult:
        """Rank 0's thread: once it has sent, the engines that verified serve the version."""
        failures = sending.failures_here()
        message = (
            Landing(version=order["version"], failures=failures)
            if staged
            else CommitOrder(version=order["version"], epoch=order["epoch"], failures=failures)
        )
        path = "weights/land" if staged else "weights/commit"
        answer = control.post(path, message, timeout_s=control_deadline_s(self._config))
        return PublicationResult.model_validate(answer)


def _first_reason(missed: set[str], stats: PublishStats, result: PublicationResult | None) -> str:
    """Why the first of these engines did not take a version, as far as anybody said so."""
    told = {failure.engine: failure.reason for failure in stats.failures} | (result.failed if result else {})
    return next((told[name] for name in sorted(missed) if name in told), "")


def _outcome(flight: _Flight) -> dict[str, Any]:
    """What rank 0 learned, for all ranks."""
    assert flight.result is not None
    try:
        return {"result": flight.result.result().model_dump(), "error": ""}
    except ControlError as error:  # no engine took it; those that served before go on
        return {"result": None, "error": str(error)}
