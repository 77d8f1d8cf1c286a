"""What goes over the wire to SGLang and back, as pure functions.

    GenerateRequest -> generate_body            event bytes -> split_events -> read_generation -> Generation

Every sampling parameter is explicit: SGLang otherwise takes them from the model's generation_config.json,
and a top-k there would make the logprobs those of another distribution.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from asyncrl.engines.base import INTERRUPTED, Finish, GenerateRequest, Generation
from asyncrl.types import FinishReason, PolicyVersion, Segment, SegmentKind

LOAD_FORMAT: Final = "asyncrl"
"""The load format, and the backend, under which the engine's plugin takes orders."""

PLAIN_SAMPLING: Final[Mapping[str, Any]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


class WireError(ValueError):
    """The server refused, or its answer contradicts itself; the message follows an engine's name."""


def generate_body(request: GenerateRequest) -> dict[str, Any]:
    """The body of POST /generate for a streamed request."""
    sampling: dict[str, Any] = {
        **PLAIN_SAMPLING,
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


def order_body(order: Mapping[str, Any], group_name: str) -> dict[str, Any]:
    """The body of POST /init_weights_update_group for an order of ours: every other request about weights
    waits until no sample is running; this one does not."""
    return {
        "master_address": json.dumps(order),
        "master_port": 0,
        "rank_offset": 0,
        "world_size": 0,
        "group_name": group_name,
        "backend": LOAD_FORMAT,
    }


def new_weights_body(
    order: Mapping[str, Any], group_name: str, version: PolicyVersion, flush: bool
) -> dict[str, Any]:
    """The body of POST /update_weights_from_distributed for an order that brings ``version``; ``flush``: drop
    the keys and values of older ones."""
    return {
        "names": [json.dumps(order)],
        "dtypes": [],
        "shapes": [],
        "group_name": group_name,
        "load_format": LOAD_FORMAT,
        "flush_cache": flush,
        "weight_version": str(version),
    }


def split_events(pending: bytes, chunk: bytes) -> tuple[list[bytes], bytes]:
    """Append a chunk to a server-sent stream: the JSON events that are complete, and what is left."""
    *events, left = (pending + chunk).split(b"\n\n")
    return [event.removeprefix(b"data: ") for event in events if event.startswith(b"data: {")], left


def read_generation(rid: str, event: Mapping[str, Any], first: Mapping[str, Any]) -> Generation:
    """The answer so far, from any event of a stream and its first one.

    Only the last event of a finished request says which version sampled which token; all say which one the
    engine had when they were sent. So the tokens of a stream that was cut are known to be of one version if
    its first and its newest event name the same; otherwise none of them is returned.

    Raises:
        WireError: the server refused the request, or tokens, logprobs and versions do not agree.
    """
    if "error" in event:
        raise WireError(f"refused request {rid}: {read_message(event['error'])}")
    meta = event["meta_info"]
    return Generation(
        segments=_segments(rid, event["output_ids"], meta, _versions(event, first)),
        finish=_finish(rid, meta.get("finish_reason")),
        num_cached_tokens=meta.get("cached_tokens", 0),
    )


def read_version(text: str) -> PolicyVersion:
    """SGLang's weight version is a string; ours are decimal numbers.

    Raises:
        WireError: it is not one.
    """
    if not text.isdecimal():
        raise WireError(f"attests policy version {text!r}; start it with --weight-version 0")
    return int(text)


def read_message(answer: Any) -> str:
    """The server's reason on one line, from any of the shapes in which SGLang sends it."""
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except json.JSONDecodeError:
            return " ".join(answer.split()) or "no reason given"
    if isinstance(answer, Mapping):
        for key in ("message", "error", "detail"):
            if answer.get(key):
                return read_message(answer[key])
    return " ".join(str(answer).split())


def _versions(event: Mapping[str, Any], first: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The version of every token, as spans; None where the engine does not say."""
    meta = event["meta_info"]
    if "weight_versions" in meta:
        spans: list[Mapping[str, Any]] = meta["weight_versions"]
        return spans
    version = meta["weight_version"]
    if version != first["meta_info"]["weight_version"]:
        return None
    return [{"version": version, "start": 0, "end": len(event["output_ids"])}]


def _segments(
    rid: str, token_ids: list[int], meta: Mapping[str, Any], spans: list[Mapping[str, Any]] | None
) -> tuple[Segment, ...]:
    if not token_ids or spans is None:
        return ()
    logprobs = [row[0] for row in meta["output_token_logprobs"]]
    starts = [span["start"] for span in spans]
    ends = [span["end"] for span in spans]
    if len(logprobs) != len(token_ids) or starts != [0, *ends[:-1]] or ends[-1:] != [len(token_ids)]:
        raise WireError(
            f"answered request {rid} with {len(token_ids)} tokens, {len(logprobs)} logprobs and versions"
            f" {spans}; these must agree"
        )
    return tuple(
        Segment(
            kind=SegmentKind.MODEL,
            token_ids=tuple(token_ids[start:end]),
            logprobs=tuple(logprobs[start:end]),
            policy_version=read_version(span["version"]),
        )
        for start, end, span in zip(starts, ends, spans, strict=True)
        if end > start
    )


def _finish(rid: str, reason: Mapping[str, Any] | None) -> Finish:
    if reason is None:  # the stream was cut before its end
        return INTERRUPTED
    if reason["type"] in (FinishReason.STOP, FinishReason.LENGTH):
        return FinishReason(reason["type"])
    if reason.get("status_code") is not None:  # an abort of the engine's own accord
        raise WireError(f"gave up request {rid}: {read_message(reason)}")
    return INTERRUPTED
