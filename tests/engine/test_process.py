"""An engine that does not start is an error with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import EngineConfig
from asyncrl.engines.base import EngineError
from asyncrl.engines.ports import free_port
from asyncrl.engines.process import engine_command, wait_until_ready
from asyncrl.engines.sglang import SGLangEngine
from tests.engine.conftest import start_process


async def test_a_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "engine.log"
    command = engine_command(
        EngineConfig(),
        model_path=tmp_path / "no-model",
        dtype="float32",
        port=port,
        token="",
        device="cpu",
    )
    process = start_process(command, log)
    engine = SGLangEngine("e0", f"http://127.0.0.1:{port}", "token")
    with pytest.raises(EngineError, match=r"(?s)^engine e0 ended with status 1 at start;.*TOKEN is not set"):
        await wait_until_ready(engine, exit_status=process.poll, log=log, timeout_s=120)
    await engine.close()


async def test_a_start_that_takes_too_long_is_reported(tmp_path: Path) -> None:
    engine = SGLangEngine("e0", f"http://127.0.0.1:{free_port()}", "token")
    with pytest.raises(EngineError, match=r"^engine e0 not ready after 0.5 s; it wrote no log at"):
        await wait_until_ready(engine, exit_status=lambda: None, log=tmp_path / "engine.log", timeout_s=0.5)
    await engine.close()
