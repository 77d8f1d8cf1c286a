"""How the parts of a run reach the coordinator: blocking for trainer and launcher, async for the rollouter.

Both faces send the messages of `asyncrl.control.messages`; every call has a deadline, and a coordinator
that does not answer within it is a `ControlError` that says so.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.parse
from dataclasses import dataclass
from typing import Any

import aiohttp
from pydantic import BaseModel

from asyncrl.control.messages import RunState

URL_VARIABLE = "ASYNCRL_CONTROL_URL"
TOKEN_VARIABLE = "ASYNCRL_CONTROL_TOKEN"
DEFAULT_TIMEOUT_S = 30.0


class ControlError(RuntimeError):
    """The coordinator refused a request or cannot be reached."""


class ControlRefused(ControlError):
    """The state of the run does not allow the request; nothing was changed."""


@dataclass(frozen=True)
class ControlAddress:
    url: str
    token: str

    @classmethod
    def from_environment(cls) -> ControlAddress:
        """The address that the launcher put into this process's environment.

        Raises:
            ControlError: it is not there.
        """
        if URL_VARIABLE not in os.environ or TOKEN_VARIABLE not in os.environ:
            raise ControlError(
                f"{URL_VARIABLE} and {TOKEN_VARIABLE} are not set; start the trainer with `asyncrl run`,"
                " or set them to the control port of a running coordinator"
            )
        return cls(os.environ[URL_VARIABLE], os.environ[TOKEN_VARIABLE])

    def environment(self) -> dict[str, str]:
        return {URL_VARIABLE: self.url, TOKEN_VARIABLE: self.token}


def _body(message: object) -> bytes:
    if isinstance(message, BaseModel):
        return message.model_dump_json().encode()
    return json.dumps(message).encode()


def _result(status: int, payload: bytes, path: str) -> Any:
    if status == 200:
        return json.loads(payload)
    reason = f"HTTP {status} {payload.decode(errors='replace')[:200]}"
    if payload.startswith(b"{"):
        reason = json.loads(payload)["error"]
    raise (ControlRefused if status == 409 else ControlError)(f"coordinator, {path}: {reason}")


class ControlClient:
    """Blocking client; one connection per request. Thread-safe."""

    def __init__(self, address: ControlAddress) -> None:
        self._address = address
        parts = urllib.parse.urlsplit(address.url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)

    def post(self, path: str, message: object = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Send one message; returns the decoded answer.

        Raises:
            ControlError: refused, or no answer within ``timeout_s`` seconds.
        """
        return self._request("POST", path, _body(message), timeout_s)

    def state(self, after: int = -1, wait_s: float = 0.0) -> RunState:
        """The run's state, at once or when its revision exceeds ``after`` (at most ``wait_s`` seconds)."""
        answer = self._request("GET", f"state?after={after}&wait={wait_s}", None, wait_s + DEFAULT_TIMEOUT_S)
        return RunState.model_validate(answer)

    def _request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.request(
                method, f"/v1/{path}", body, {"Authorization": f"Bearer {self._address.token}"}
            )
            response = connection.getresponse()
            return _result(response.status, response.read(), path)
        except (OSError, http.client.HTTPException) as error:
            raise ControlError(
                f"coordinator at {self._address.url}: no answer to {path} within {timeout_s:.0f} s: {error!r}"
            ) from error
        finally:
            connection.close()


class AsyncControlClient:
    """The same for one event loop."""

    def __init__(self, address: ControlAddress) -> None:
        self._address = address
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, message: object = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        return await self._request("POST", path, _body(message), timeout_s)

    async def state(self, after: int = -1, wait_s: float = 0.0) -> RunState:
        answer = await self._request(
            "GET", f"state?after={after}&wait={wait_s}", None, wait_s + DEFAULT_TIMEOUT_S
        )
        return RunState.model_validate(answer)

    async def _request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._address.token}"})
        url = f"{self._address.url}/v1/{path}"
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.request(method, url, data=body, timeout=timeout) as response:
                return _result(response.status, await response.read(), path)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ControlError(
                f"coordinator at {self._address.url}: no answer to {path} within {timeout_s:.0f} s: {error!r}"
            ) from error

    async def close(self) -> None:
        """Release the connections; a later request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None
