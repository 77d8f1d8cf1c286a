"""The coordinator's control port: JSON over HTTP, one bearer token, bound to one interface.

Each route turns one validated message into one call of the `Coordinator`. Errors that the caller can
understand come back as ``{"error": "one line"}``: 409 for a request that the state does not allow, 502 for
an engine that failed, 400 for a malformed message, 401 for a wrong token.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, TypeAdapter, ValidationError

from asyncrl.control.coordinator import Coordinator
from asyncrl.control.messages import (
    CheckpointDone,
    CommitOrder,
    EngineFailed,
    EngineInfo,
    EngineLost,
    FlightName,
    HeldOut,
    Joined,
    JoinOrder,
    Landing,
    LinkOrder,
    Phase,
    ProcessInfo,
    Publication,
    RolloutReport,
    StageOrder,
    StepDone,
    TrainerStart,
)
from asyncrl.control.protocol import Refused
from asyncrl.engines.base import EngineError

LONGEST_POLL_S = 30.0

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(coordinator: Coordinator, token: str) -> web.Application:
    """The routes of the control port."""

    async def state(request: web.Request) -> web.Response:
        after = int(request.query.get("after", "-1"))
        wait_s = min(float(request.query.get("wait", "0")), LONGEST_POLL_S)
        return _answer(await coordinator.wait_for_change(after, wait_s))

    async def prepare(publication: Publication) -> list[str]:
        return list(await coordinator.prepare(publication))

    async def stage(order: StageOrder) -> list[str]:
        return list(await coordinator.stage(order))

    async def nothing(_: None) -> None:
        await coordinator.request_stop()

    app = web.Application(middlewares=[_errors, _authenticate(token)])
    app.router.add_get("/v1/state", state)
    routes: list[tuple[str, Handler]] = [
        ("engines", _route(EngineInfo, coordinator.register_engine)),
        ("engines/lost", _route(EngineLost, coordinator.engine_lost)),
        ("processes", _route(ProcessInfo, coordinator.register_process)),
        ("trainer/start", _route(TrainerStart, coordinator.trainer_started)),
        ("trainer/step", _route(StepDone, coordinator.step_done)),
        ("trainer/checkpoint", _route(CheckpointDone, coordinator.checkpoint_done)),
        ("rollout", _route(RolloutReport, coordinator.rollout_report)),
        ("held_out", _route(HeldOut, coordinator.held_out)),
        ("phase", _route(Phase, coordinator.set_phase)),
        ("stop", _route(type(None), nothing)),
        ("failure", _route(str, coordinator.fail)),
        ("weights/join", _route(JoinOrder, coordinator.join_weight_group)),
        ("weights/joined", _route(Joined, coordinator.joined)),
        ("weights/link", _route(LinkOrder, coordinator.link)),
        ("weights/prepare", _route(Publication, prepare)),
        ("weights/transfer", _route(FlightName, coordinator.transfer)),
        ("weights/commit", _route(CommitOrder, coordinator.commit)),
        ("weights/abort", _route(FlightName, coordinator.abort)),
        ("weights/stage", _route(StageOrder, stage)),
        ("weights/land", _route(Landing, coordinator.land)),
        ("weights/failed", _route(EngineFailed, coordinator.quarantine)),
    ]
    for path, handler in routes:
        app.router.add_post(f"/v1/{path}", handler)
    return app


async def serve(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Start listening; returns the runner (to clean up) and the URL."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    bound_port = runner.addresses[0][1]
    return runner, f"http://{host}:{bound_port}"


def _route(kind: type[T], call: Callable[[T], Awaitable[object]]) -> Handler:
    adapter: TypeAdapter[T] = TypeAdapter(kind)

    async def handler(request: web.Request) -> web.Response:
        message = adapter.validate_json(await request.read())
        return _answer(await call(message))

    return handler


def _answer(result: object) -> web.Response:
    if isinstance(result, BaseModel):
        return web.Response(text=result.model_dump_json(), content_type="application/json")
    return web.json_response(result)


def _authenticate(token: str) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, expected):
            return web.json_response({"error": "wrong or missing control token"}, status=401)
        return await handler(request)

    return middleware


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ValidationError as error:
        return web.json_response({"error": f"{request.path}: {error.errors()[0]['msg']}"}, status=400)
    except Refused as error:
        return web.json_response({"error": str(error)}, status=409)
    except EngineError as error:
        return web.json_response({"error": str(error)}, status=502)
