"""What the rest of asyncrl knows of an inference engine.

    rollout -- GenerateRequest --> Engine.generate --> Generation (segments, one per attested policy version)
    control -- pause / receive_weights / resume -->    (policy version + 1, or EngineError and no new version)
            -- stage_weights --> .. pause / receive_weights("take") / resume -->  the same, paused for a copy
            -- give_weights --> one engine serves on, while another one is paused: take_weights --> the same

Invariants that every implementation keeps:

* the policy version of a token is the one that the engine attests for it, never the caller's clock;
* an interruption (abort, pause in mode "abort") ends a running `generate` normally, with every token
  sampled so far and finish "interrupted"; sending the prompt and those tokens again goes on from there;
* tokens sampled after new weights never read keys and values that the old weights computed, except those of a
  request that was paused in place: its logprobs are of what sampled it, which is no version by itself;
* `version()` changes only when every rank holds and has verified the whole new version;
* an engine that dies hands back the tokens that had left it, as an interruption;
* a request that cannot be served, a dead engine and a missed deadline are `EngineError`s whose one line
  names the engine.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from asyncrl.types import FinishReason, PolicyVersion, Segment

INTERRUPTED: Final = "interrupted"

Finish = FinishReason | Literal["interrupted"]
"""Why a generation ended; "interrupted" means that it can go on from its tokens."""

PauseMode = Literal["abort", "retract", "in_place"]
"""What a pause does to running requests: "abort" ends them as interrupted; "retract" keeps them in the
engine, to be prefilled again and to go on under whatever weights are there after `resume`; "in_place" keeps
them with their keys and values."""

Interrupt = Literal[PauseMode, "drain"]
"""What a publication does to running requests: a pause, or a pause once they have ended."""

WeightAction = Literal["connect", "publish", "take"]
"""A step of the weight receiver: "connect" agrees on the transfer plan, while the engine samples if it does;
"publish" moves one version, "take" puts the version that was staged in the place of the live weights."""

StagePlace = Literal["device", "host"]
"""Where a second copy of the weights is: on the engine's device, or in pinned memory of the host."""


LinkStrategy = Literal["relay", "broadcast"]
"""How linked engines pass buckets of weights on to each other: in stripes to all, or whole to the next."""


def new_rid() -> str:
    """A request id of fixed width that no other request has."""
    return uuid.uuid4().hex


class EngineError(RuntimeError):
    """An engine refused, failed, died or missed a deadline; the message is one line that names it."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Sample up to ``max_new_tokens`` tokens after ``token_ids``.

    ``rid`` must be unique among the requests in the engine and of fixed width (SGLang aborts every rid that
    begins with the one named); `new_rid` makes one. ``temperature`` 0 is greedy. ``seed`` makes the sampling
    a function of (seed, position) on an engine in deterministic mode and is None elsewhere.
    """

    rid: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(f"request {self.rid} has no tokens to go on from")
        if self.max_new_tokens < 1:
            raise ValueError(f"request {self.rid} asks for {self.max_new_tokens} tokens; ask for 1 or more")
        if self.temperature < 0:
            raise ValueError(f"request {self.rid} has temperature {self.temperature}; use 0 or more")


@dataclass(frozen=True, slots=True)
class Generation:
    """What came back: model segments in order, one per run of tokens of one version; none for no tokens."""

    segments: tuple[Segment, ...]
    finish: Finish
    num_cached_tokens: int = 0  # prompt tokens whose keys and values were still in the engine

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(logprob for segment in self.segments for logprob in segment.logprobs)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests in the engine."""

    num_running: int
    num_queued: int


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """The process group that joins trainer ranks and the ranks of one engine for weight transfer.

    Engine rank j takes rank ``rank_offset + j`` of ``world_size``.
    """

    name: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: Literal["gloo", "nccl"] = "gloo"


@dataclass(frozen=True, slots=True)
class ReplicaLink:
    """What joins rank j of several engines with rank j of the others, to pass buckets of weights on.

    The engine is replica ``replica``; a store at ``host``:``port`` hears of every rank that has joined.
    """

    name: str
    number: int
    strategy: LinkStrategy
    host: str
    port: int
    replica: int
    num_replicas: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


class Engine(Protocol):
    """One serving instance. Methods are safe to call concurrently from one event loop."""

    @property
    def name(self) -> str:
        """How messages call this engine."""
        ...

    async def generate(self, request: GenerateRequest, timeout_s: float) -> Generation:
        """Run a request to its end or its interruption.

        Raises:
            EngineError: the engine refused the request, died, or needed more than ``timeout_s`` seconds.
        """
        ...

    async def abort(self, rid: str) -> None:
        """Interrupt one request; an unknown rid is not an error (it may just have ended)."""
        ...

    async def abort_all(self) -> None:
        """Interrupt every request."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. Requests that arrive during a pause are held until `resume`."""
        ...

    async def resume(self) -> None:
        """Go on after a pause."""
        ...

    async def join_weight_group(self, group: WeightGroup, timeout_s: float) -> None:
        """Make every engine rank a member of ``group``; returns when all members have met."""
        ...

    async def leave_weight_group(self, group_name: str) -> None:
        """Forget a weight group."""
        ...

    async def link_replicas(self, group_name: str, link: ReplicaLink) -> None:
        """Begin to join a link, in the place of the last one; returns at once, and sampling goes on.

        Raises:
            EngineError: the engine is not connected over ``group_name``, or died.
        """
        ...

    async def receive_weights(
        self, action: WeightAction, group_name: str, version: PolicyVersion, plan_hash: str, timeout_s: float
    ) -> None:
        """Take part in a transfer; the engine must be paused for "publish" and "take".

        After these two the engine serves ``version`` and holds no keys and values of older weights but those
        of requests that were paused in place.

        Raises:
            EngineError: a rank could not receive or verify; the version is unchanged, the weights may be
                partly new, and the engine must not serve until another "publish" succeeds.
        """
        ...

    async def stage_weights(
        self, place: StagePlace, group_name: str, version: PolicyVersion, plan_hash: str, timeout_s: float
    ) -> None:
        """Begin to receive ``version`` into a second copy of the weights while the live ones serve.

        Returns at once; the senders hear from every rank whether it has verified the version.

        Raises:
            EngineError: the engine refused, or died.
        """
        ...

    async def give_weights(self, group_name: str, version: PolicyVersion, timeout_s: float) -> str:
        """Offer the live weights to one other engine, rank j to rank j, and go on sampling.

        Returns at once the address "host:port" at which the ranks wait for the other engine's, for at most
        ``timeout_s`` seconds; the weights must not change until then. No two offers share ``group_name``.

        Raises:
            EngineError: the engine does not attest ``version``, refused, or died.
        """
        ...

    async def take_weights(
        self, group_name: str, address: str, version: PolicyVersion, timeout_s: float
    ) -> None:
        """Take ``version`` from the engine that offered it under ``group_name``; this one must be paused.

        Afterwards it serves ``version`` and holds no keys and values of older weights.

        Raises:
            EngineError: a rank could not receive or verify; the version is unchanged, the weights may be
                partly new, and the engine must not serve until it has received a whole version.
        """
        ...

    async def update_from_disk(self, path: str, version: PolicyVersion, timeout_s: float) -> None:
        """Load a Hugging Face folder as ``version``."""
        ...

    async def checksums(self) -> list[dict[str, str]]:
        """Checksum of every local parameter, one dictionary per tensor-parallel rank."""
        ...

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log p(token i | tokens before i) for i = 1 .. T-1 under the current weights, [T-1]."""
        ...

    async def load(self) -> EngineLoad:
        """How many requests run and wait."""
        ...

    async def ready(self) -> bool:
        """Whether the engine answers and is not paused."""
        ...

    async def version(self) -> PolicyVersion:
        """The policy version that the engine attests."""
        ...

    async def close(self) -> None:
        """Release the connections of this client; the engine itself goes on."""
        ...
