"""A stream that ends before its time, from a server that dies: what has arrived is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from asyncrl.engines.base import INTERRUPTED, EngineError, GenerateRequest, new_rid
from asyncrl.engines.sglang import SGLangEngine
from tests.pace import idle
from tests.unit.test_sglang_wire import unfinished


class DyingServer:
    """Streams ``num_events`` growing answers, half of the next one, and closes the connection."""

    def __init__(self) -> None:
        self.num_events = 0
        self.versions = ["3"] * 10  # that the engine has, by event
        self.hangs = False
        self.aborts = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for count in range(1, self.num_events + 1):
            event = json.dumps(unfinished(count, self.versions[count - 1])).encode()
            await response.write(b"data: " + event + b"\n\n")
        if self.hangs:
            await asyncio.sleep(60.0)
        await response.write(b'data: {"output_ids": [0, 1')
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.close()
        return response

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts += 1
        await asyncio.sleep(60.0 if self.hangs else 0.0)
        return web.Response()


@pytest.fixture
async def server() -> AsyncIterator[tuple[DyingServer, SGLangEngine]]:
    dying = DyingServer()
    app = web.Application()
    app.router.add_post("/generate", dying.generate)
    app.router.add_post("/abort_request", dying.abort)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = SGLangEngine("e7", f"http://127.0.0.1:{runner.addresses[0][1]}", "token")
    yield dying, engine
    await engine.close()
    await runner.cleanup()


async def test_tokens_that_left_a_dying_engine_are_an_interruption(
    server: tuple[DyingServer, SGLangEngine],
) -> None:
    dying, engine = server
    dying.num_events = 3
    generation = await engine.generate(GenerateRequest(new_rid(), (1, 2), 10), 5.0)
    assert generation.finish == INTERRUPTED
    assert generation.token_ids == (0, 1, 2)
    assert [segment.policy_version for segment in generation.segments] == [3]


async def test_tokens_of_unknown_versions_are_not_kept(server: tuple[DyingServer, SGLangEngine]) -> None:
    """The new version came between events that arrived together, or not: the first one is decisive."""
    dying, engine = server
    dying.num_events, dying.versions = 3, ["3", "4", "4"]
    generation = await engine.generate(GenerateRequest(new_rid(), (1, 2), 10), 5.0)
    assert generation.finish == INTERRUPTED and generation.segments == ()


async def test_an_engine_that_dies_before_the_first_token_is_an_error(
    server: tuple[DyingServer, SGLangEngine],
) -> None:
    _, engine = server
    with pytest.raises(EngineError, match=r"^engine e7 at http://127.0.0.1:\d+ does not answer"):
        await engine.generate(GenerateRequest(new_rid(), (1, 2), 10), 5.0)


async def test_a_hanging_engine_gives_its_requests_back_after_the_grace(
    server: tuple[DyingServer, SGLangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it never answers the abort."""
    monkeypatch.setattr("asyncrl.engines.sglang.ABORT_GRACE_S", 0.1)
    dying, engine = server
    dying.num_events, dying.hangs = 2, True
    running = asyncio.ensure_future(engine.generate(GenerateRequest(new_rid(), (1, 2), 10), 30.0))
    await idle(0.2)
    aborting = asyncio.ensure_future(engine.abort_all())
    generation = await asyncio.wait_for(running, 2.0)
    assert (generation.finish, generation.token_ids) == (INTERRUPTED, (0, 1))
    aborting.cancel()
