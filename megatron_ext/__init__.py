"""megatron-core as asyncrl uses it; the only package that imports `megatron.core`.

    parallel -> model -> optimizer -> policy (what the trainer sees) -> checkpoint

Importing this package first installs `cpu_view`, so that the same megatron code runs where there is
no CUDA device; where there is one, nothing is changed.
"""

from __future__ import annotations

from megatron_ext import cpu_view

cpu_view.install()
