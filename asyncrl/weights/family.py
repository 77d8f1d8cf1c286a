"""The words in which a family of models is described: which tensors a layer has, and how each side cuts them.

    Family.layer(geometry, layer index) -> LayerTable
        tensors:   Hugging Face name -> shape          megatron, engine: one `Row` per parameter of that side

Names are relative to the layer. A name with ``{expert}`` stands for one tensor per expert; a row of experts
is repeated for (Megatron) or stacked over (SGLang) the experts that a rank holds. Pure data; `cuts` does the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from asyncrl.weights.geometry import MlaGeometry, ModelGeometry, MoeGeometry


class Cut(Enum):
    """What a rank holds of a parameter's parts, which lie below each other in the order of the row."""

    WHOLE = "every rank holds all of every part"
    ROWS = "an equal run of rows of each part (column-parallel)"
    COLS = "an equal run of columns (row-parallel)"
    GROUPED_QKV = "Megatron: q, k, v dealt out per key/value head as [its query heads, k, v], then cut"
    QKV_HEADS = "SGLang: q heads cut; k and v heads cut, or repeated where there are fewer than ranks"


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter of a layer on one side.

    ``te`` and ``grouped`` are Megatron's other names for it: in Transformer Engine modules, and in grouped
    expert modules; empty means the same name. ``te_cut`` is how Transformer Engine cuts it, where it differs.
    ``dtype`` is fixed whatever the model's own, for example float32; empty means the model's. ``never_fp8``:
    a matrix that an engine keeps as it is where it holds the others as fp8 blocks.
    """

    name: str
    cut: Cut
    parts: tuple[str, ...]
    te: str = ""
    te_cut: Cut | None = None
    grouped: str = ""
    dtype: str = ""
    never_fp8: bool = False

    @property
    def has_experts(self) -> bool:
        return "{expert}" in self.parts[0]


@dataclass(frozen=True, slots=True)
class LayerTable:
    """Everything that one layer, or one part of it, holds; parts are joined by ``+``."""

    tensors: Mapping[str, tuple[int, ...]]
    megatron: tuple[Row, ...]
    engine: tuple[Row, ...]

    def __add__(self, other: LayerTable) -> LayerTable:
        return LayerTable(
            {**self.tensors, **other.tensors}, self.megatron + other.megatron, self.engine + other.engine
        )


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of config.json: how to read it, and the table of each of its layers."""

    name: str
    architecture: str
    layer: Callable[[ModelGeometry, int], LayerTable]
    qk_norm: bool = False  # an RMSNorm on each query and key head
    qkv_bias: bool = False  # a bias on q, k and v
    rope_is_its_own: bool = False  # neither the default nor Llama 3's; no parameter depends on it
    read_moe: Callable[[Path, dict[str, Any]], MoeGeometry] | None = None
    read_mla: Callable[[Path, dict[str, Any]], MlaGeometry] | None = None
