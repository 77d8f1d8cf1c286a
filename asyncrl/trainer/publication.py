"""The trainer's side of publishing a policy version: rank 0 talks to the coordinator, all ranks send.

    rank 0:     prepare -> (engines pause) -> transfer -> (engines listen) ................ -> commit
    all ranks:                                  plan and hash known since connect, send buckets

Every decision that rank 0 takes is broadcast before the ranks act on it, so all of them take part in the
same transfers in the same order. An engine that fails is left out from then on; the run goes on while one
engine remains.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

import torch.distributed as dist

from asyncrl.config import Config
from asyncrl.control.client import ControlClient, ControlError
from asyncrl.control.messages import EngineInfo, Publication, PublicationResult, WeightGroup
from asyncrl.trainer.collectives import broadcast_json
from asyncrl.types import PolicyVersion
from asyncrl.weights.publisher import EngineEndpoint, Publisher


@dataclass(frozen=True)
class PublishTimes:
    """Seconds, as rank 0 saw them."""

    total_s: float
    transfer_s: float
    engine_paused_s: float  # the longest pause of any engine
    num_bytes: int  # that arrived at all engines


class PolicyPublisher:
    """All ranks construct it together and call its methods together."""

    def __init__(self, publisher: Publisher, control: ControlClient | None, config: Config) -> None:
        self._publisher = publisher
        self._control = control  # on rank 0 only
        self._config = config
        self._endpoints: dict[str, EngineEndpoint] = {}
        self.last_result: PublicationResult | None = None  # on rank 0 only

    def connect_engines(self) -> None:
        """Wait until all configured engines are up, and join a weight group with each.

        Raises:
            ControlError: an engine did not come up or did not join within its deadline.
        """
        engines = broadcast_json(
            [engine.model_dump() for engine in self._wait_for_engines()] if self._control else None
        )
        for engine in (EngineInfo.model_validate(item) for item in engines):
            self._connect(engine)

    def _wait_for_engines(self) -> list[EngineInfo]:
        control = self._require_control()
        expected = self._config.engine.replicas
        deadline = time.monotonic() + self._config.engine.start_timeout_s
        state = control.state()
        while len(state.engines) < expected:
            if time.monotonic() > deadline:
                raise ControlError(
                    f"{len(state.engines)} of {expected} engines came up within"
                    f" {self._config.engine.start_timeout_s:.0f} s; see the engines' logs"
                )
            state = control.state(after=state.revision, wait_s=2.0)
        return list(state.engines)

    def _connect(self, engine: EngineInfo) -> None:
        offer = None
        if self._control is not None:
            group = WeightGroup(
                engine=engine.name,
                master_address=self._config.control.host,
                master_port=_free_port(self._config.control.host),
                rank_offset=dist.get_world_size(),
                world_size=dist.get_world_size() + engine.tp,
                group_name=f"weights-{engine.name}",
                backend=dist.get_backend(),
            )
            self._control.post("weights/join", group)
            offer = group.model_dump()
        group = WeightGroup.model_validate(broadcast_json(offer))
        endpoint = EngineEndpoint(
            name=engine.name,
            tp_size=engine.tp,
            group_name=group.group_name,
            master_address=group.master_address,
            master_port=group.master_port,
        )
        self._publisher.connect(endpoint)
        if self._control is not None:
            self._control.post("weights/joined", engine.name, timeout_s=self._deadline_s)
        self._endpoints[engine.name] = endpoint

    def publish(self, version: PolicyVersion) -> PublishTimes:
        """Bring the current weights into every engine as ``version``.

        Raises:
            ControlError: no engine holds the version in the end.
        """
        started = time.monotonic()
        names = broadcast_json(self._prepare(version) if self._control else None)
        sending = time.monotonic()
        stats = self._publisher.publish([self._endpoints[name] for name in names], version)
        sent = time.monotonic()
        result = broadcast_json(self._commit().model_dump() if self._control else None)
        outcome = PublicationResult.model_validate(result)
        for name in outcome.failed:
            self._publisher.disconnect(name)
            del self._endpoints[name]
        self.last_result = outcome
        return PublishTimes(
            total_s=time.monotonic() - started,
            transfer_s=sent - sending,
            engine_paused_s=max(outcome.paused_s.values(), default=0.0),
            num_bytes=stats.bytes_received_total,
        )

    def _prepare(self, version: PolicyVersion) -> list[str]:
        control = self._require_control()
        hashes = {name: self._publisher.plan_hash(name) for name in self._endpoints}
        names: list[str] = control.post(
            "weights/prepare", Publication(version=version, plan_hashes=hashes), timeout_s=self._deadline_s
        )
        ready = [name for name in names if name in self._endpoints]
        control.post("weights/transfer", {name: self._endpoints[name].group_name for name in ready})
        return ready

    def _commit(self) -> PublicationResult:
        answer = self._require_control().post("weights/commit", timeout_s=self._deadline_s)
        return PublicationResult.model_validate(answer)

    @property
    def _deadline_s(self) -> float:
        """Longer than the engines' own deadline, whose message says more."""
        return 2 * self._config.weights.timeout_s + 10.0

    def _require_control(self) -> ControlClient:
        assert self._control is not None, "only rank 0 talks to the coordinator"
        return self._control


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
