"""SGLang over HTTP, as an `Engine`.

    generate  -- POST /generate, streamed -->  one growing answer; its last event becomes a Generation
    control   -- POST, one JSON answer    -->  None, or EngineError with the server's message

Why things are as they are:

* Every event of a stream carries the whole answer so far, so only the first and the newest are kept, and
  parsed once.
  Requests without a stream lose their tokens when they are retracted and then aborted.
* A request that the server holds during a pause, or has not read yet, does not hear an abort. So a stream
  that outlives its abort by `ABORT_GRACE_S` is cut here, which keeps what has arrived. The same holds where
  the engine dies: its last event is an interruption, and the next request finds it dead.
* Versions are read from the spans that the scheduler records token by token and sends with the end of a
  request. A stream that was cut has only the versions that the engine had when it sent its events.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import aiohttp

from asyncrl.engines.base import (
    INTERRUPTED,
    EngineError,
    EngineLoad,
    GenerateRequest,
    Generation,
    PauseMode,
    ReplicaLink,
    StagePlace,
    WeightAction,
    WeightGroup,
)
from asyncrl.engines.sglang_wire import (
    PLAIN_SAMPLING,
    WireError,
    generate_body,
    new_weights_body,
    order_body,
    read_generation,
    read_message,
    read_version,
    split_events,
)
from asyncrl.types import PolicyVersion

ABORT_GRACE_S: Final = 2.0


class SGLangEngine:
    """A client of one SGLang server, which may have any tensor-parallel size."""

    def __init__(self, name: str, url: str, token: str, *, control_timeout_s: float = 60.0) -> None:
        """``url`` is http://HOST:PORT of the server; ``control_timeout_s`` bounds calls that only steer."""
        self._name = name
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._control_timeout_s = control_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._graces: dict[str, asyncio.Timeout] = {}
        self._in_place = False  # how the engine was paused last
        self._seeded: bool | None = None  # whether the server samples from seeds; None: not asked yet

    @property
    def name(self) -> str:
        return self._name

    async def generate(self, request: GenerateRequest, timeout_s: float) -> Generation:
        if request.seed is not None:
            await self._require_seeding()
        try:
            async with asyncio.timeout(timeout_s):
                events = await self._first_and_newest(request)
        except TimeoutError:
            with contextlib.suppress(EngineError):  # the missed deadline is the error to report
                await self.abort(request.rid)
            raise self._error(f"request {request.rid} took longer than {timeout_s:g} s") from None
        if events is None:
            return Generation(segments=(), finish=INTERRUPTED)
        first, newest = events
        try:
            return read_generation(request.rid, newest, first)
        except WireError as error:
            raise self._error(str(error)) from None

    async def abort(self, rid: str) -> None:
        await self._post("/abort_request", {"rid": rid})
        if rid in self._graces:
            self._start_grace(self._graces[rid])

    async def abort_all(self) -> None:
        for grace in self._graces.values():  # first, because the server may hang
            self._start_grace(grace)
        await self._post("/abort_request", {"rid": "", "abort_all": True})

    async def pause(self, mode: PauseMode) -> None:
        # SGLang's own mode "abort" polls once a second for the last request to end.
        self._in_place = mode == "in_place"
        await self._post("/pause_generation", {"mode": "in_place" if self._in_place else "retract"})
        if mode == "abort":
            await self.abort_all()

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def join_weight_group(self, group: WeightGroup, timeout_s: float) -> None:
        body = {
            "master_address": group.master_address,
            "master_port": group.master_port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("/init_weights_update_group", body, timeout_s)

    async def leave_weight_group(self, group_name: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": group_name})

    async def receive_weights(
        self, action: WeightAction, group_name: str, version: PolicyVersion, plan_hash: str, timeout_s: float
    ) -> None:
        order = {"action": action, "version": version, "plan_hash": plan_hash, "timeout_s": timeout_s}
        if action == "connect":
            await self._order(order, group_name, timeout_s)
        else:
            await self._new_weights(order, group_name, version, timeout_s)

    async def stage_weights(
        self, place: StagePlace, group_name: str, version: PolicyVersion, plan_hash: str, timeout_s: float
    ) -> None:
        order = {"place": place, "version": version, "plan_hash": plan_hash, "timeout_s": timeout_s}
        await self._order({"action": "stage", **order}, group_name)

    async def link_replicas(self, group_name: str, link: ReplicaLink) -> None:
        order = {"version": -1, "timeout_s": link.timeout_s, "link": dataclasses.asdict(link)}
        await self._order({"action": "link", **order}, group_name)

    async def give_weights(self, group_name: str, version: PolicyVersion, timeout_s: float) -> str:
        attested = await self.version()
        if attested != version:
            raise self._error(f"attests version {attested} and cannot give version {version}")
        host = urllib.parse.urlsplit(self._url).hostname
        order = {"action": "give", "host": host, "version": version, "timeout_s": timeout_s}
        answer = await self._order(order, group_name)
        return f"{host}:{answer['message']}"

    async def take_weights(
        self, group_name: str, address: str, version: PolicyVersion, timeout_s: float
    ) -> None:
        order = {"action": "refill", "address": address, "version": version, "timeout_s": timeout_s}
        await self._new_weights(order, group_name, version, timeout_s)

    async def update_from_disk(self, path: str, version: PolicyVersion, timeout_s: float) -> None:
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        await self._post("/update_weights_from_disk", body, timeout_s)

    async def checksums(self) -> list[dict[str, str]]:
        answer = await self._post("/weights_checker", {"action": "checksum"})
        return [dict(rank["checksums"]) for rank in answer["ranks"]]

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        body = {
            "input_ids": list(token_ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1, **PLAIN_SAMPLING},
        }
        answer = await self._post("/generate", body)
        rows = answer["meta_info"]["input_token_logprobs"]
        if [row[1] for row in rows] != list(token_ids):
            raise self._error(f"scored {len(rows)} tokens that are not the {len(token_ids)} asked for")
        return [float(row[0]) for row in rows[1:]]

    async def load(self) -> EngineLoad:
        # A snapshot that the scheduler publishes while it runs batches, so it lags when it stops.
        answer = await self._request("GET", "/v1/loads", None, self._control_timeout_s)
        loads = answer["loads"]
        return EngineLoad(
            num_running=sum(load["num_running_reqs"] for load in loads),
            num_queued=sum(load["num_waiting_reqs"] for load in loads),
        )

    async def ready(self) -> bool:
        try:
            async with self._http().get(f"{self._url}/ready", timeout=_total(5.0)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def version(self) -> PolicyVersion:
        answer = await self._request("GET", "/model_info", None, self._control_timeout_s)
        try:
            return read_version(answer["weight_version"])
        except WireError as error:
            raise self._error(str(error)) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _order(self, order: Mapping[str, Any], group_name: str, timeout_s: float = 0.0) -> Any:
        """Something that the engine does while it samples. The ranks keep the deadline and answer; the margin
        lets that answer arrive."""
        body = order_body(order, group_name)
        return await self._post("/init_weights_update_group", body, timeout_s + self._control_timeout_s)

    async def _new_weights(
        self, order: Mapping[str, Any], group_name: str, version: PolicyVersion, timeout_s: float
    ) -> None:
        # SGLang cannot flush beside running requests, and would refuse though the weights did change.
        body = new_weights_body(order, group_name, version, flush=not self._in_place)
        async with self._weight_update():
            await self._post("/update_weights_from_distributed", body, timeout_s + self._control_timeout_s)

    @contextlib.asynccontextmanager
    async def _weight_update(self) -> AsyncIterator[None]:
        """SGLang takes weights only inside a session, and keeps one open if its opener dies."""
        try:
            await self._post("/begin_weight_update", {})
        except EngineError:
            await self._post("/end_weight_update", {})
            await self._post("/begin_weight_update", {})
        try:
            yield
        except EngineError:
            # A dead engine cannot end its session either; the first error is the one to report.
            with contextlib.suppress(EngineError):
                await self._post("/end_weight_update", {})
            raise
        await self._post("/end_weight_update", {})

    async def _require_seeding(self) -> None:
        """SGLang ignores a seed outside its deterministic mode."""
        if self._seeded is None:
            answer = await self._request("GET", "/server_info", None, self._control_timeout_s)
            self._seeded = bool(answer["enable_deterministic_inference"])
        if not self._seeded:
            raise self._error("ignores seeds; add --enable-deterministic-inference to engine.extra_args")

    async def _first_and_newest(
        self, request: GenerateRequest
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """Follow a request's stream to its end, or to its abort plus grace; None if nothing arrived."""
        first = newest = b""
        try:
            async with asyncio.timeout(None) as grace:
                self._graces[request.rid] = grace
                async for events in self._events(generate_body(request)):
                    first, newest = first or events[0], events[-1]
        except TimeoutError as error:
            if isinstance(error, aiohttp.ClientError):  # of connecting
                raise self._unreachable(error) from error
            if not grace.expired():
                raise
        except (aiohttp.ClientError, OSError) as error:
            if not newest:
                raise self._unreachable(error) from error
        finally:
            self._graces.pop(request.rid, None)
        return (json.loads(first), json.loads(newest)) if newest else None

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[list[bytes]]:
        """The events of a server-sent stream, all those together that arrive together."""
        async with self._http().post(f"{self._url}/generate", json=body, timeout=_total(None)) as response:
            if response.status != 200:
                yield [json.dumps({"error": await response.text()}).encode()]
                return
            pending = b""
            async for chunk in response.content.iter_any():
                events, pending = split_events(pending, chunk)
                if events:
                    yield events

    def _start_grace(self, grace: asyncio.Timeout) -> None:
        if grace.when() is None:
            grace.reschedule(asyncio.get_running_loop().time() + ABORT_GRACE_S)

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        return await self._request("POST", path, body, timeout_s or self._control_timeout_s)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """One call with a JSON answer (None for an empty one)."""
        url = self._url + path
        try:
            async with self._http().request(method, url, json=body, timeout=_total(timeout_s)) as response:
                text = await response.text()
        except TimeoutError:
            raise self._error(f"did not answer {path} within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error
        if response.status != 200:
            raise self._error(f"refused {path}: {read_message(text)}")
        return json.loads(text) if text.strip().startswith(("{", "[")) else None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit: the engine bounds concurrency. No reuse: the server closes idle connections, and a
            # request sent at that moment would look like a dead engine.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        return self._session

    def _error(self, what: str) -> EngineError:
        return EngineError(f"engine {self._name} {what}")

    def _unreachable(self, error: Exception) -> EngineError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return self._error(f"at {self._url} does not answer ({reason}); see its log")


def _total(timeout_s: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
