"""SGLang over HTTP, as an `Engine`.

    generate  -- POST /generate, streamed -->  one growing answer; its last event becomes a Generation
    control   -- POST, one JSON answer    -->  None, or EngineError with the server's message

Why things are as they are:

* Every event of a stream carries the whole answer so far, so only the newest is kept, and parsed once.
  Requests without a stream lose their tokens when they are retracted and then aborted.
* A request that the server holds during a pause, or has not read yet, does not hear an abort. So a stream
  that outlives its abort by `ABORT_GRACE_S` is cut here: what has arrived is complete and attested.
* Versions are read from the spans that the scheduler records token by token; the engine's current
  version says nothing about tokens that were sampled before an update.
* Sampling parameters are all explicit: SGLang otherwise takes them from the model's generation_config.json,
  and a top-k there would make the logprobs those of another distribution.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import aiohttp

from asyncrl.engines.base import (
    INTERRUPTED,
    EngineError,
    EngineLoad,
    Finish,
    GenerateRequest,
    Generation,
    PauseMode,
    WeightAction,
    WeightGroup,
)
from asyncrl.types import FinishReason, PolicyVersion, Segment, SegmentKind

ABORT_GRACE_S: Final = 2.0
LOAD_FORMAT: Final = "asyncrl"
"""The load format under which the engine's plugin receives weights."""


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

    @property
    def name(self) -> str:
        return self._name

    async def generate(self, request: GenerateRequest, timeout_s: float) -> Generation:
        event: Mapping[str, Any] | None = None
        try:
            async with asyncio.timeout(timeout_s):
                event = await self._newest_event(request)
        except TimeoutError:
            with contextlib.suppress(EngineError):  # the missed deadline is the error to report
                await self.abort(request.rid)
            raise self._error(f"request {request.rid} took longer than {timeout_s:g} s") from None
        if event is None:
            return Generation(segments=(), finish=INTERRUPTED)
        if "error" in event:
            raise self._error(f"refused request {request.rid}: {_message(event['error'])}")
        return self._generation(request.rid, event)

    async def abort(self, rid: str) -> None:
        await self._post("/abort_request", {"rid": rid})
        if rid in self._graces:
            self._start_grace(self._graces[rid])

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"rid": "", "abort_all": True})
        for grace in self._graces.values():
            self._start_grace(grace)

    async def pause(self, mode: PauseMode) -> None:
        # SGLang's own mode "abort" polls once a second for the last request to end.
        await self._post("/pause_generation", {"mode": "retract"})
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
        publish = action == "publish"
        body = {
            "names": [json.dumps(order)],
            "dtypes": [],
            "shapes": [],
            "group_name": group_name,
            "load_format": LOAD_FORMAT,
            "flush_cache": publish,
            "weight_version": str(version) if publish else None,
        }
        async with self._weight_update():
            # The ranks keep the deadline themselves and answer; the margin lets that answer arrive.
            await self._post("/update_weights_from_distributed", body, timeout_s + self._control_timeout_s)

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
            "sampling_params": {"max_new_tokens": 1, **_PLAIN_SAMPLING},
        }
        answer = await self._post("/generate", body)
        rows = answer["meta_info"]["input_token_logprobs"]
        if [row[1] for row in rows] != list(token_ids):
            raise self._error(f"scored {len(rows)} tokens that are not the {len(token_ids)} asked for")
        return [float(row[0]) for row in rows[1:]]

    async def load(self) -> EngineLoad:
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
        return self._version(answer["weight_version"])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

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

    async def _newest_event(self, request: GenerateRequest) -> Mapping[str, Any] | None:
        """Follow a request's stream to its end, or to its abort plus grace; None if nothing arrived."""
        newest = b""
        try:
            async with asyncio.timeout(None) as grace:
                self._graces[request.rid] = grace
                async for event in self._events(_generate_body(request)):
                    newest = event
        except TimeoutError:
            if not grace.expired():
                raise
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error
        finally:
            self._graces.pop(request.rid, None)
        return json.loads(newest) if newest else None

    async def _events(self, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The newest complete event of a server-sent stream, each time that bytes arrive."""
        async with self._http().post(f"{self._url}/generate", json=body, timeout=_total(None)) as response:
            if response.status != 200:
                yield json.dumps({"error": await response.text()}).encode()
                return
            pending = b""
            async for chunk in response.content.iter_any():
                *events, pending = (pending + chunk).split(b"\n\n")
                answers = [event for event in events if event.startswith(b"data: {")]
                if answers:
                    yield answers[-1].removeprefix(b"data: ")

    def _generation(self, rid: str, event: Mapping[str, Any]) -> Generation:
        meta = event["meta_info"]
        return Generation(
            segments=self._segments(rid, event["output_ids"], meta),
            finish=self._finish(rid, meta.get("finish_reason")),
            num_cached_tokens=meta.get("cached_tokens", 0),
        )

    def _segments(self, rid: str, token_ids: list[int], meta: Mapping[str, Any]) -> tuple[Segment, ...]:
        if not token_ids:
            return ()
        logprobs = [row[0] for row in meta["output_token_logprobs"]]
        spans = meta["weight_versions"]
        ends = [span["end"] for span in spans]
        starts = [span["start"] for span in spans]
        if len(logprobs) != len(token_ids) or starts != [0, *ends[:-1]] or ends[-1] != len(token_ids):
            raise self._error(
                f"answered request {rid} with {len(token_ids)} tokens, {len(logprobs)} logprobs and versions"
                f" {spans}; these must agree"
            )
        return tuple(
            Segment(
                kind=SegmentKind.MODEL,
                token_ids=tuple(token_ids[start:end]),
                logprobs=tuple(logprobs[start:end]),
                policy_version=self._version(span["version"]),
            )
            for start, end, span in zip(starts, ends, spans, strict=True)
            if end > start
        )

    def _finish(self, rid: str, reason: Mapping[str, Any] | None) -> Finish:
        if reason is None:
            return INTERRUPTED
        if reason["type"] in (FinishReason.STOP, FinishReason.LENGTH):
            return FinishReason(reason["type"])
        if reason.get("status_code") is not None:  # an abort of the engine's own accord
            raise self._error(f"gave up request {rid}: {_message(reason)}")
        return INTERRUPTED

    def _version(self, text: str) -> PolicyVersion:
        if not text.isdecimal():
            raise self._error(f"attests policy version {text!r}; start it with --weight-version 0")
        return int(text)

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
            raise self._error(f"refused {path}: {_message(text)}")
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


_PLAIN_SAMPLING: Final[Mapping[str, Any]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


def _generate_body(request: GenerateRequest) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        **_PLAIN_SAMPLING,
        "temperature": request.temperature,
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": list(request.stop_token_ids),
    }
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed
    return {
        "rid": request.rid,
        "input_ids": list(request.token_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
    }


def _message(answer: Any) -> str:
    """The server's reason on one line, from any of the shapes in which SGLang sends it."""
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except json.JSONDecodeError:
            return " ".join(answer.split()) or "no reason given"
    if isinstance(answer, Mapping):
        for key in ("message", "error", "detail"):
            if answer.get(key):
                return _message(answer[key])
    return " ".join(str(answer).split())


def _total(timeout_s: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
