"""A producer that never waits: what does not fit in the ring goes to a file, and into the ring later.

    put -> [ring has room and nothing is spilled] -> ring
        -> [else] -> file --drain--> ring

Order is kept: while anything is spilled, new samples go behind it. The file outlives the process. A sample is
safe once `put` has returned: it is in the ring, or in the file with a CRC-32C and on the disk. Every spilled
sample has a key, so a crash between the ring and the file's truncation publishes nothing twice.

File: frames of ``magic u32 | bytes u32 | crc32c u32`` and then a JSON line (scalars, shapes, key, version)
and the arrays' bytes. A torn last frame is a put that did not return: it is cut off when the file is opened.
"""

from __future__ import annotations

import json
import os
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import asyncrl._C as _C
from asyncrl.ring.codec import FIELDS
from asyncrl.ring.errors import RecordStale, RingCorrupt, RingFull
from asyncrl.ring.ring import Key, Ring
from asyncrl.types import FinishReason, PolicyVersion, Sample

FRAME = struct.Struct("<III")
MAGIC = 0x4C4C5053  # "SPLL"


@dataclass(frozen=True, slots=True)
class SpilledSample:
    sample: Sample
    version: PolicyVersion | None
    key: Key


def encode(spilled: SpilledSample) -> bytes:
    """One frame."""
    scalars: dict[str, Any] = {}
    arrays: list[bytes] = []
    for field in FIELDS:
        value = getattr(spilled.sample, field.name)
        if field.num_dims:
            scalars[field.name] = list(value.shape)
            arrays.append(np.ascontiguousarray(value).tobytes())
        else:
            scalars[field.name] = value
    head = json.dumps({"fields": scalars, "version": spilled.version, "key": spilled.key}).encode()
    body = b"".join([head, b"\n", *arrays])
    return FRAME.pack(MAGIC, len(body), _C.ring.crc32c(body)) + body


def decode(body: bytes) -> SpilledSample:
    """The sample in a frame's body."""
    head, _, data = body.partition(b"\n")
    entry = json.loads(head)
    values: dict[str, Any] = dict(entry["fields"])
    at = 0
    for field in FIELDS:
        if field.num_dims:
            shape, dtype = values[field.name], np.dtype(field.dtype)
            size = int(np.prod(shape)) * dtype.itemsize
            values[field.name] = np.frombuffer(data[at : at + size], dtype).reshape(shape).copy()
            at += size
    values["finish_reason"] = FinishReason(values["finish_reason"])
    uid, seq = entry["key"]
    return SpilledSample(Sample(**values), entry["version"], (uid, seq))


def read_frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """(end of the frame, its body) for every whole frame.

    Raises:
        RingCorrupt: a frame that is not the last one is damaged.
    """
    data = path.read_bytes()
    at = 0
    while at + FRAME.size <= len(data):
        magic, size, checksum = FRAME.unpack_from(data, at)
        end = at + FRAME.size + size
        body = data[at + FRAME.size : end]
        if end > len(data):
            return
        if magic != MAGIC or _C.ring.crc32c(body) != checksum:
            if end == len(data):
                return
            raise RingCorrupt(f"{path}: frame at byte {at} is damaged; move the file away")
        yield end, body
        at = end


class SpillingProducer:
    """One producer's way into a ring opened with ``when_full="fail"``, with a spill file behind it.

    Not safe for several threads, and one process at a time per file.
    """

    def __init__(self, ring: Ring, path: Path) -> None:
        self._ring = ring
        self._path = path
        path.touch()
        frames = list(read_frames(path))
        os.truncate(path, frames[-1][0] if frames else 0)
        self._waiting = [decode(body) for _, body in frames]
        self._file = path.open("ab")
        self._uid = f"spill-{uuid.uuid4().hex}"
        self._serial = 0
        self.num_stale = 0  # spilled samples that were too old when their turn came

    @property
    def num_spilled(self) -> int:
        return len(self._waiting)

    def put(self, sample: Sample, *, version: PolicyVersion | None = None, key: Key | None = None) -> None:
        """Publish now, or spill; never waits for room.

        Raises:
            RingClosed, RecordTooLarge, RecordStale: as `Ring.put`; nothing was spilled.
        """
        if key is None:
            key = (self._uid, self._serial)
            self._serial += 1
        if self.drain():
            try:
                self._ring.put(sample, version=version, key=key, timeout=0)
                return
            except RingFull:
                pass  # to the file
        spilled = SpilledSample(sample, version, key)
        self._file.write(encode(spilled))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._waiting.append(spilled)

    def drain(self) -> bool:
        """Move what fits into the ring, oldest first; True when nothing is spilled any more. Call it now and
        then while nothing is put."""
        done = 0
        try:
            for spilled in self._waiting:
                try:
                    self._ring.put(spilled.sample, version=spilled.version, key=spilled.key, timeout=0)
                except RecordStale:
                    self.num_stale += 1  # the version bound passed it while it waited
                done += 1
        except RingFull:
            pass  # the rest waits
        finally:
            del self._waiting[:done]
        if done and not self._waiting:
            os.truncate(self._path, 0)
        return not self._waiting

    def close(self) -> None:
        """Close the file. What is spilled stays there for the next `SpillingProducer`."""
        self._file.close()
