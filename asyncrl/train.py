"""A trainer rank: ``torchrun -m asyncrl.train CONFIG.toml [section.key=value ...]``.

The control port's address and token come from the environment (`asyncrl.control.client`); `asyncrl run`
sets them and starts torchrun itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from asyncrl.config import load_config
from asyncrl.trainer.start import LOG_DIR_VARIABLE, run_rank


def _log_to_file(directory: Path) -> None:
    """One log per rank instead of one interleaved stream."""
    target = os.open(
        directory / f"trainer-rank{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    os.dup2(target, 1)
    os.dup2(target, 2)


def main() -> None:
    if LOG_DIR_VARIABLE in os.environ:
        _log_to_file(Path(os.environ[LOG_DIR_VARIABLE]))
    run_rank(load_config(Path(sys.argv[1]), sys.argv[2:]))


if __name__ == "__main__":
    main()
