"""Start an SGLang server: ``python -m asyncrl.engines.launcher [SGLang server arguments]``.

Every process of the server runs what stands at the top level here: the launcher itself, and each process
that it spawns, because multiprocessing's spawn imports the parent's main module again. So the three
preparations below reach every scheduler and tokenizer without a change to an installed package:

1. torchvision's operators are declared beside a CPU build of torch, which cannot load them;
2. `sgl_kernel`, which has no CPU wheel, gets a stand-in where it is missing (`sgl_kernel_cpu`);
3. the plugin with our weight receiver is activated (`plugin`).

The token that clients must present comes from the environment (`TOKEN_VARIABLE`), not from an argument
that every user of the machine could read.
"""

from __future__ import annotations

import logging
import os
import sys

import torch

from asyncrl.engines import sgl_kernel_cpu

TOKEN_VARIABLE = "ASYNCRL_ENGINE_TOKEN"


def declare_torchvision_operators() -> None:
    """Declare the two operators that torchvision's Python part refers to when it is imported.

    PyPI's torchvision is built against the CUDA build of torch; beside a CPU build its library does not load.
    """
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


def prepare_process() -> None:
    """Make this process able to import and run SGLang."""
    if torch.version.cuda is None:
        declare_torchvision_operators()
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        sgl_kernel_cpu.install()
    from asyncrl.engines import plugin  # imports SGLang, which needs the two steps above

    plugin.activate()


def take_token() -> str:
    """The token from the environment, which the server's children need not inherit."""
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        sys.exit(f"{TOKEN_VARIABLE} is not set: an engine serves only clients that present its token")
    return token


def main(arguments: list[str], token: str) -> None:
    """Run the server until it ends."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from asyncrl.engines import plugin

    logging.getLogger("sglang.srt.entrypoints.engine").addFilter(_Redact(token))
    load_plugins()
    plugin.require_hooks()
    run_server(prepare_server_args([*arguments, "--api-key", token]))


class _Redact(logging.Filter):
    """Keeps the token out of the engine's log, to which SGLang writes all its arguments."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = record.getMessage().replace(self._token, "(token)")
        record.args = None
        return True


if __name__ == "__main__":
    token = take_token()  # before the imports, which take a while
    prepare_process()
    main(sys.argv[1:], token)
else:
    prepare_process()
