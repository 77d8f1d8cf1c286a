"""Ray's settings that must be in the environment before Ray is imported; hence a module without Ray."""

from __future__ import annotations

import os
import secrets


def protect_ray() -> None:
    """Give this run's private cluster a token of its own; call it before the first import of Ray."""
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
        "RAY_worker_niceness": "0",  # the engines live below Ray's workers and must not yield to everybody
    }
