"""Reading SGLang's answers: streams cut anywhere, spans of versions, reasons in every shape."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.base import INTERRUPTED, GenerateRequest, Generation, new_rid
from asyncrl.engines.sglang_wire import (
    WireError,
    generate_body,
    new_weights_body,
    order_body,
    read_generation,
    read_message,
    read_version,
    split_events,
)
from asyncrl.types import FinishReason


def answer(
    num_tokens: int, versions: list[tuple[str, int, int]], finish: dict[str, Any] | None
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "output_token_logprobs": [[-0.5 * token, token, None] for token in range(num_tokens)],
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in versions],
        "finish_reason": finish,
        "cached_tokens": 3,
    }
    return {"output_ids": list(range(num_tokens)), "meta_info": meta}


def unfinished(num_tokens: int, version: str) -> dict[str, Any]:
    """An event before the end: it has no spans, only the version that the engine had when it was sent."""
    event = answer(num_tokens, [], None)
    del event["meta_info"]["weight_versions"]
    event["meta_info"]["weight_version"] = version
    return event


def read(event: dict[str, Any]) -> Generation:
    """From a stream of one event."""
    return read_generation("r", event, event)


@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_a_stream_cut_anywhere_yields_the_newest_event(cuts: list[int]) -> None:
    events = [answer(count, [("0", 0, count)], None) for count in (1, 2, 3)]
    stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    stream += b"data: [DONE]\n\n"
    edges = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    newest, pending = None, b""
    for start, end in itertools.pairwise(edges):
        complete, pending = split_events(pending, stream[start:end])
        newest = complete[-1] if complete else newest
    assert newest is not None
    assert json.loads(newest) == events[-1]
    assert pending == b""


def test_spans_become_segments() -> None:
    generation = read(answer(5, [("3", 0, 2), ("4", 2, 2), ("5", 2, 5)], {"type": "length"}))
    assert [segment.policy_version for segment in generation.segments] == [3, 5]
    assert [segment.token_ids for segment in generation.segments] == [(0, 1), (2, 3, 4)]
    assert generation.logprobs == (0.0, -0.5, -1.0, -1.5, -2.0)
    assert generation.finish is FinishReason.LENGTH
    assert generation.num_cached_tokens == 3


@pytest.mark.parametrize("versions", [[], [("0", 0, 4)], [("0", 1, 5)], [("0", 0, 2), ("1", 3, 5)]])
def test_tokens_without_an_attested_version_are_refused(versions: list[tuple[str, int, int]]) -> None:
    with pytest.raises(WireError, match="request r with 5 tokens"):
        read(answer(5, versions, None))


@pytest.mark.parametrize("finish", [None, {"type": "abort", "message": "Abort in waiting queue"}])
def test_a_cut_and_an_abort_are_interruptions(finish: dict[str, Any] | None) -> None:
    assert read(answer(2, [("0", 0, 2)], finish)).finish == INTERRUPTED
    assert read(answer(0, [], finish)).segments == ()


def test_an_abort_of_the_engines_own_accord_is_an_error() -> None:
    finish = {"type": "abort", "message": "out of\nmemory", "status_code": 503}
    with pytest.raises(WireError, match="gave up request r: out of memory"):
        read(answer(0, [], finish))
    with pytest.raises(WireError, match="refused request r: too long"):
        read({"error": {"message": "too long"}})


def test_versions_are_numbers() -> None:
    assert read_version("12") == 12
    with pytest.raises(WireError, match="attests policy version 'default'"):
        read_version("default")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ('{"error": {"message": "a\\n b"}}', "a b"),
        ('{"success": false, "message": "no"}', "no"),
        ({"detail": "gone"}, "gone"),
        ("", "no reason given"),
        ("<html>", "<html>"),
    ],
)
def test_reasons_are_one_line(shape: Any, message: str) -> None:
    assert read_message(shape) == message


def test_every_sampling_parameter_is_explicit() -> None:
    body = generate_body(GenerateRequest(new_rid(), (1, 2), 8, temperature=0.7, stop_token_ids=(9,)))
    sampling = body["sampling_params"]
    assert sampling["top_k"] == -1
    assert sampling["top_p"] == 1.0
    assert sampling["temperature"] == 0.7
    assert "sampling_seed" not in sampling
    assert generate_body(GenerateRequest(new_rid(), (1,), 8, seed=0))["sampling_params"]["sampling_seed"] == 0


def test_a_cut_stream_is_of_the_version_that_its_first_and_newest_event_name() -> None:
    generation = read_generation("r", unfinished(3, "4"), unfinished(1, "4"))
    assert [(s.token_ids, s.policy_version) for s in generation.segments] == [((0, 1, 2), 4)]
    assert generation.finish == INTERRUPTED
    across = read_generation("r", unfinished(3, "5"), unfinished(1, "4"))  # which token is whose is unknown
    assert across.segments == () and across.finish == INTERRUPTED


def test_orders_travel_where_sglang_does_not_look() -> None:
    order = {"action": "give", "version": 3, "timeout_s": 2.0}
    body = order_body(order, "group")
    assert json.loads(body["master_address"]) == order
    assert (body["backend"], body["group_name"], body["world_size"]) == ("asyncrl", "group", 0)
    body = new_weights_body(order, "group", 3, flush=True)
    assert json.loads(body["names"][0]) == order and body["dtypes"] == body["shapes"] == []
    assert (body["load_format"], body["flush_cache"], body["weight_version"]) == ("asyncrl", True, "3")
