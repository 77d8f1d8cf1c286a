"""`Sample` <-> record: one table of fields, in the order in which they lie in a record."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import asyncrl._C as _C
from asyncrl.types import FinishReason, Sample

if TYPE_CHECKING:
    from asyncrl.ring.batch import Record


@dataclass(frozen=True, slots=True)
class Field:
    """One attribute of `Sample`; ``num_dims`` 0 is a scalar, dtype "str" a string."""

    name: str
    dtype: str
    num_dims: int


FIELDS = (
    Field("group_id", "int64", 0),
    Field("sample_idx", "int64", 0),
    Field("num_prompt_tokens", "int64", 0),
    Field("reward", "float64", 0),
    Field("finish_reason", "str", 0),
    Field("group_rewards", "float32", 1),
    Field("token_ids", "int32", 1),
    Field("loss_mask", "uint8", 1),
    Field("behav_logprobs", "float32", 1),
    Field("policy_versions", "int32", 1),
)

FORMAT = _C.ring.RecordFormat(
    [(field.name, field.dtype, field.num_dims) for field in FIELDS], weight="token_ids"
)

sample_values = attrgetter(*(field.name for field in FIELDS))
"""A sample's values in the order of `FIELDS`."""


def read_sample(record: Record) -> Sample:
    """Copy a record out of the ring."""
    values: dict[str, Any] = record.values()
    for field in FIELDS:
        if field.num_dims:
            values[field.name] = values[field.name].copy()
    values["finish_reason"] = FinishReason(values["finish_reason"])
    return Sample(**values)
