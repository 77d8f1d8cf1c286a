"""Bytes of a trajectory's durable event: a fixed little-endian layout, no pickle, exact both ways.

    event   = u8 finish | u32 num_segments | segment*
    segment = u8 kind | i32 policy version | u32 T | i32[T] token ids | f64[T] logprobs (model only)

Logprobs stay in the double precision in which the engine's JSON gave them, so a resumed sample is
bit-identical to one that was never interrupted.
"""

from __future__ import annotations

import struct

import numpy as np

from asyncrl.engines.base import INTERRUPTED, Finish
from asyncrl.rollout.records import JournalError
from asyncrl.rollout.trajectory import DurableEvent, Generated, Observed
from asyncrl.types import FinishReason, Segment, SegmentKind

_EVENT = struct.Struct("<BI")
_SEGMENT = struct.Struct("<BiI")
_KINDS = (SegmentKind.MODEL, SegmentKind.TOOL, SegmentKind.TEMPLATE)
_FINISHES: tuple[Finish, ...] = (INTERRUPTED, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)
_OBSERVED, _OBSERVED_DONE = 16, 17


def encode_event(event: DurableEvent) -> bytes:
    """The bytes of ``event``; token ids must fit 32 bits."""
    if isinstance(event, Generated):
        code = _FINISHES.index(event.finish)
    else:
        code = _OBSERVED_DONE if event.done else _OBSERVED
    return _EVENT.pack(code, len(event.segments)) + b"".join(map(_encode_segment, event.segments))


def decode_event(data: bytes) -> DurableEvent:
    """The event of ``data``; raises JournalError when the bytes are not what `encode_event` writes."""
    try:
        code, num_segments = _EVENT.unpack_from(data)
        segments, offset = [], _EVENT.size
        for _ in range(num_segments):
            segment, offset = _decode_segment(data, offset)
            segments.append(segment)
        if offset != len(data):
            raise ValueError(f"{len(data) - offset} bytes too many")
        if code in (_OBSERVED, _OBSERVED_DONE):
            return Observed(tuple(segments), done=code == _OBSERVED_DONE)
        return Generated(tuple(segments), _FINISHES[code])
    except (struct.error, ValueError, IndexError) as error:
        raise JournalError(f"a journaled event of {len(data)} bytes is damaged ({error})") from error


def _encode_segment(segment: Segment) -> bytes:
    head = _SEGMENT.pack(_KINDS.index(segment.kind), segment.policy_version, len(segment.token_ids))
    tokens = np.asarray(segment.token_ids, "<i4").tobytes()
    return head + tokens + np.asarray(segment.logprobs, "<f8").tobytes()


def _decode_segment(data: bytes, offset: int) -> tuple[Segment, int]:
    kind_idx, version, count = _SEGMENT.unpack_from(data, offset)
    kind = _KINDS[kind_idx]
    offset += _SEGMENT.size
    token_ids = np.frombuffer(data, "<i4", count, offset)
    offset += 4 * count
    num_logprobs = count if kind is SegmentKind.MODEL else 0
    logprobs = np.frombuffer(data, "<f8", num_logprobs, offset)
    offset += 8 * num_logprobs
    return Segment(kind, tuple(token_ids.tolist()), tuple(logprobs.tolist()), version), offset
