"""An engine without a model, for tests of orchestration at speed.

Tokens are a pure function of the prefix, the seed and the policy version (`scripted_token`), so a test knows
what any schedule of pauses, aborts and publications must yield. Behaviour towards its caller is that of
`SGLangEngine`: every token carries the version at which it was sampled; "abort" ends running requests as
interrupted with what they have; "retract" holds them; requests that arrive during a pause wait; a death
interrupts those that have tokens and is an `EngineError` to all others. Time passes only by
`token_interval_s`, 0 of which yields to the event loop once per token.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence

from asyncrl.engines.base import (
    INTERRUPTED,
    EngineError,
    EngineLoad,
    Finish,
    GenerateRequest,
    Generation,
    PauseMode,
    ReplicaLink,
    StagePlace,
    WeightAction,
    WeightGroup,
)
from asyncrl.types import FinishReason, PolicyVersion, Segment, SegmentKind

VOCAB_SIZE = 1000


def scripted_token(
    prefix: Sequence[int], version: PolicyVersion, seed: int | None = None, *, vocab_size: int = VOCAB_SIZE
) -> int:
    """The token that follows ``prefix`` under ``version``."""
    digest = hashlib.blake2b(repr((tuple(prefix), version, seed)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % vocab_size


def scripted_logprob(token: int, version: PolicyVersion) -> float:
    """The logprob of ``token`` under ``version``; exact in float32."""
    return -(1 + token % 64) / 64 - version


class ScriptedEngine:
    """See the module. Not thread-safe: use it from one event loop.

    ``versioned_tokens`` False makes tokens independent of the version (logprobs still depend on it), for
    tests that compare interrupted runs with uninterrupted ones. ``peers`` is set by who has several: it finds
    an engine by its address, which is its name.
    """

    def __init__(
        self,
        name: str = "scripted",
        *,
        token_interval_s: float = 0.0,
        vocab_size: int = VOCAB_SIZE,
        versioned_tokens: bool = True,
    ) -> None:
        self._name = name
        self._token_interval_s = token_interval_s
        self._vocab_size = vocab_size
        self._versioned_tokens = versioned_tokens
        self._version: PolicyVersion = 0
        self._paused = False
        self._changed = asyncio.Event()  # set, and replaced, whenever a held request may have to move
        self._aborted: dict[str, bool] = {}  # rid of a request in the engine -> whether it was aborted
        self._dead: str | None = None
        self._failures: dict[str, str] = {}  # method name -> message of its next failure
        self._staged: PolicyVersion = -1
        self.given: dict[str, PolicyVersion] = {}  # group of an offer -> version
        self.peers: Callable[[str], ScriptedEngine | None] = lambda address: None
        self.weight_groups: set[str] = set()
        self.links: list[ReplicaLink] = []
        self.plan_hashes: list[tuple[WeightAction, PolicyVersion, str]] = []

    @property
    def name(self) -> str:
        return self._name

    def kill(self, reason: str = "was killed") -> None:
        """Every later call fails, and every running one but a request that has tokens to hand back."""
        self._dead = reason
        self._announce()

    def fail_next(self, method: str, message: str) -> None:
        """Make the next call of ``method`` raise an EngineError with ``message``."""
        self._failures[method] = message

    async def generate(self, request: GenerateRequest, timeout_s: float) -> Generation:
        self._check("generate")
        if request.rid in self._aborted:
            raise self._error(f"already runs a request {request.rid}")
        self._aborted[request.rid] = False
        try:
            async with asyncio.timeout(timeout_s):
                return await self._run(request)
        except TimeoutError:
            raise self._error(f"request {request.rid} took longer than {timeout_s:g} s") from None
        finally:
            del self._aborted[request.rid]

    async def abort(self, rid: str) -> None:
        self._check("abort")
        if rid in self._aborted:
            self._aborted[rid] = True
            self._announce()

    async def abort_all(self) -> None:
        self._check("abort_all")
        for rid in self._aborted:
            self._aborted[rid] = True
        self._announce()

    async def pause(self, mode: PauseMode) -> None:
        self._check("pause")
        self._paused = True
        if mode == "abort":
            await self.abort_all()

    async def resume(self) -> None:
        self._check("resume")
        self._paused = False
        self._announce()

    async def join_weight_group(self, group: WeightGroup, timeout_s: float) -> None:
        self._check("join_weight_group")
        self.weight_groups.add(group.name)

    async def leave_weight_group(self, group_name: str) -> None:
        self._check("leave_weight_group")
        self.weight_groups.discard(group_name)

    async def receive_weights(
        self, action: WeightAction, group_name: str, version: PolicyVersion, plan_hash: str, timeout_s: float
    ) -> None:
        self._check("receive_weights")
        if group_name not in self.weight_groups:
            raise self._error(f"is not in weight group {group_name}; join_weight_group first")
        if action != "connect" and not self._paused:
            raise self._error("must be paused before it receives weights")
        if action == "take" and self._staged != version:
            raise self._error(f"staged version {self._staged}, not {version}")
        self.plan_hashes.append((action, version, plan_hash))
        if action != "connect":
            self._version = version

    async def stage_weights(
        self, place: StagePlace, group_name: str, version: PolicyVersion, plan_hash: str, timeout_s: float
    ) -> None:
        self._check("stage_weights")
        if group_name not in self.weight_groups:
            raise self._error(f"is not in weight group {group_name}; join_weight_group first")
        self._staged = version

    async def link_replicas(self, group_name: str, link: ReplicaLink) -> None:
        self._check("link_replicas")
        if group_name not in self.weight_groups:
            raise self._error(f"is not in weight group {group_name}; join_weight_group first")
        self.links.append(link)

    async def give_weights(self, group_name: str, version: PolicyVersion, timeout_s: float) -> str:
        self._check("give_weights")
        if self._version != version:
            raise self._error(f"attests version {self._version}, not {version}")
        self.given[group_name] = version
        return self._name

    async def take_weights(
        self, group_name: str, address: str, version: PolicyVersion, timeout_s: float
    ) -> None:
        self._check("take_weights")
        if not self._paused:
            raise self._error("must be paused before it takes weights")
        source = self.peers(address)
        if source is None or source._dead is not None or source.given.get(group_name) != version:
            raise self._error(f"finds nobody at {address} who offers version {version}")
        self._version = version

    async def update_from_disk(self, path: str, version: PolicyVersion, timeout_s: float) -> None:
        self._check("update_from_disk")
        self._version = version

    async def checksums(self) -> list[dict[str, str]]:
        self._check("checksums")
        return [{"weights": f"{self._version:016x}"}]

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        self._check("logprobs")
        return [scripted_logprob(token, self._version) for token in token_ids[1:]]

    async def load(self) -> EngineLoad:
        self._check("load")
        held = len(self._aborted) if self._paused else 0
        return EngineLoad(num_running=len(self._aborted) - held, num_queued=held)

    async def ready(self) -> bool:
        return self._dead is None and not self._paused

    async def version(self) -> PolicyVersion:
        self._check("version")
        return self._version

    async def close(self) -> None:
        """Nothing to release."""

    async def _run(self, request: GenerateRequest) -> Generation:
        prefix = list(request.token_ids)
        sampled: list[tuple[int, PolicyVersion]] = []
        finish: Finish = FinishReason.LENGTH
        while len(sampled) < request.max_new_tokens:
            await asyncio.sleep(self._token_interval_s)
            await self._until_running(request.rid)
            if not sampled:
                self._check_alive()
            if self._aborted[request.rid] or self._dead is not None:
                finish = INTERRUPTED
                break
            seen_version = self._version if self._versioned_tokens else 0
            token = scripted_token(prefix, seen_version, request.seed, vocab_size=self._vocab_size)
            prefix.append(token)
            sampled.append((token, self._version))
            if token in request.stop_token_ids:
                finish = FinishReason.STOP
                break
        return Generation(segments=_segments(sampled), finish=finish)

    async def _until_running(self, rid: str) -> None:
        while self._paused and not self._aborted[rid] and self._dead is None:
            await self._changed.wait()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _check(self, method: str) -> None:
        self._check_alive()
        message = self._failures.pop(method, None)
        if message is not None:
            raise self._error(message)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._error(f"does not answer ({self._dead})")

    def _error(self, what: str) -> EngineError:
        return EngineError(f"engine {self._name} {what}")


def _segments(sampled: Sequence[tuple[int, PolicyVersion]]) -> tuple[Segment, ...]:
    """One model segment per run of tokens of one version."""
    segments: list[Segment] = []
    start = 0
    for end in range(1, len(sampled) + 1):
        version = sampled[start][1]
        if end == len(sampled) or sampled[end][1] != version:
            tokens = tuple(token for token, _ in sampled[start:end])
            logprobs = tuple(scripted_logprob(token, version) for token in tokens)
            segments.append(Segment(SegmentKind.MODEL, tokens, logprobs, version))
            start = end
    return tuple(segments)
