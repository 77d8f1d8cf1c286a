"""Make transformers importable where torchvision's C++ part does not load.

PyPI's torchvision is built against the CUDA build of torch. Beside the CPU build its library fails
to load, and importing it (transformers imports it for every model class) fails because two operator
schemas are missing. Declaring those schemas is enough: nothing here ever calls them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_torchvision_operators() -> None:
    """Declare the operators that an unloadable torchvision lacks; harmless anywhere else."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _loads(Path(spec.origin).with_name("_C.so")):
        return
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", SCHEMA)


def _loads(library: Path) -> bool:
    import torch

    if not library.exists():
        return False
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return True
