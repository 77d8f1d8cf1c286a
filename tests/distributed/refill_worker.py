"""The processes of the tests of refills: the ranks of a source, of a target, and of the target's successor.

    python -m tests.distributed.refill_worker DIRECTORY

The parent wrote DIRECTORY/cases.json. The source holds version 1, the target version 0. While it gives, every
rank of the source goes on with collectives of its engine, as one that samples does. ``fault`` is WHO:WHEN:

    source:PHASE   the last rank of the source dies: every rank of the target fails in time
    target:PHASE   the last rank of the target dies: the source is unharmed, and gives to the successor
    refuse:WHAT    the target does not take it; afterwards the source gives to the successor
    absent:WHO     the target, or the source, does not come
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.weights import peers
from asyncrl.weights.wire import Deadline, WeightUpdateError
from tests.distributed.fault_worker import die_before
from tests.distributed.forked import run_roles
from tests.distributed.publish_case import FAULT_TIMEOUT_S, TIMEOUT_S, Case
from tests.distributed.publish_worker import all_agree, flip_one_bit, start_default_group
from tests.shard_reference import Tensors, first_difference

CASES_AT_ONCE = 4
MARGIN_S = 7.0
TARGET_WORDS = {
    "manifest": "waiting for a message",
    "bucket": "waiting for bucket 2",
    "digests": "waiting for the digests",
}
REFUSALS = {
    "flipped bit": "did not arrive as it was sent",
    "other shape": "model.norm.weight is [[24], 'float32'] at the source, [[5], 'float32'] on this rank",
    "other dtype": "model.norm.weight is [[24], 'float32'] at the source, [[24], 'bfloat16'] on this rank",
    "one more": "extra is ['missing'] at the source, [[3], 'float32'] on this rank",
    "other version": "it gives version 1",
}


class RefillCase(Case):
    """``ports``: where the ranks of the source, of the target, of the successor meet each other."""

    def __init__(self, fields: dict[str, Any], directory: Path) -> None:
        super().__init__(fields)
        self.tp_size = self.engines[0]
        self.who, _, self.when = self.fault.partition(":")
        self.file_name = self.name.replace(":", "-").replace(" ", "-")
        self.directory = directory

    @property
    def has_successor(self) -> bool:
        return self.who in ("target", "refuse")

    def tell(self, group: str, address: str) -> None:
        path = self.directory / f"{self.file_name}.{group}.address"
        path.with_suffix(".written").write_text(address)
        path.with_suffix(".written").rename(path)

    def hear(self, group: str) -> str:
        path = self.directory / f"{self.file_name}.{group}.address"
        end = time.monotonic() + TIMEOUT_S
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"no address of {group}")
            time.sleep(0.02)
        return path.read_text()

    def is_victim(self, tp_rank: int) -> bool:
        return tp_rank == self.tp_size - 1


def add_up(number: int) -> int:
    total = torch.tensor([number])
    dist.all_reduce(total)
    return int(total)


# --- the source ---


def run_source(case: RefillCase, tp_rank: int) -> str:
    start_default_group(case.ports[0], tp_rank, case.tp_size, TIMEOUT_S)
    parameters = case.engine_tensors(1, case.tp_size, tp_rank)
    if case.fault == "absent:source":
        return ""
    if case.who == "source" and case.is_victim(tp_rank):
        arm_source(case.when)
    try:
        failure, seconds = give(case, parameters, tp_rank, "first", case.timeout_s)
    except RuntimeError as error:  # another rank of this engine died
        return "" if case.who == "source" else str(error)
    if (not failure) == (case.fault != ""):
        return f"the offer ended with {failure!r}"
    if seconds > case.timeout_s + MARGIN_S:
        return f"the offer ended after {seconds:.1f} s"
    if case.has_successor:
        failure, _ = give(case, parameters, tp_rank, "again", TIMEOUT_S)
    else:
        failure = ""
    return failure or first_difference(parameters, case.engine_tensors(1, case.tp_size, tp_rank))


def give(
    case: RefillCase, parameters: Tensors, tp_rank: int, group: str, timeout_s: float
) -> tuple[str, float]:
    """Until the offer has ended on all ranks; returns why it failed on this one, and seconds."""
    started = time.monotonic()
    port, offer = peers.give(
        parameters,
        "127.0.0.1",
        group,
        1,
        tp_rank=tp_rank,
        tp_size=case.tp_size,
        total=add_up,
        timeout_s=timeout_s,
        bucket_bytes=case.bucket_bytes,
    )
    if tp_rank == 0:
        case.tell(group, f"127.0.0.1:{port}")
    while not all_agree(offer.wait(0.01)):  # a step of sampling
        pass
    return offer.failure, time.monotonic() - started


def arm_source(phase: str) -> None:
    if phase == "join":
        die_before(peers.Offer, "_run", lambda *_: True)
    elif phase == "manifest":
        die_before(peers.Offer, "_give", lambda *_: True)
    elif phase == "bucket":
        die_before(Deadline, "wait", lambda _, work, what: "taking bucket 2" in what)
    else:  # digests are the only numbers that are sent together
        die_before(peers, "start_send", lambda group, peer, data: data.dtype == torch.int64 and len(data) > 1)


# --- the target ---


def run_target(case: RefillCase, tp_rank: int) -> str:
    start_default_group(case.ports[1], tp_rank, case.tp_size, TIMEOUT_S)
    parameters = case.engine_tensors(0, case.tp_size, tp_rank)
    if case.fault == "absent:target":
        return ""
    if case.is_victim(tp_rank):
        arm_target(case, parameters)
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    address = "127.0.0.1:9" if case.fault == "absent:source" else case.hear("first")
    started = time.monotonic()
    version = 2 if case.when == "other version" else 1
    reason = ""
    try:
        take(parameters, address, "first", version, tp_rank, case.timeout_s)
    except RuntimeError as error:  # of torch, where a rank of this engine died
        reason = str(error)
    if not case.fault:
        return reason or first_difference(parameters, case.engine_tensors(1, case.tp_size, tp_rank))
    return check_failure(case, reason, time.monotonic() - started, parameters, before, tp_rank)


def take(parameters: Tensors, address: str, group: str, version: int, tp_rank: int, timeout_s: float) -> None:
    peers.take(parameters, address, group, version, tp_rank=tp_rank, all_agree=all_agree, timeout_s=timeout_s)


def arm_target(case: RefillCase, parameters: Tensors) -> None:
    if case.who == "target" and case.when == "join":
        die_before(peers._Taker, "meet", lambda *_: True)
    elif case.who == "target":
        die_before(Deadline, "wait", lambda _, work, what: TARGET_WORDS[case.when] in what)
    elif case.when == "flipped bit":
        flip_one_bit(bucket_idx=3)
    elif case.when == "other shape":
        parameters["model.norm.weight"] = torch.zeros(5)
    elif case.when == "other dtype":
        parameters["model.norm.weight"] = parameters["model.norm.weight"].bfloat16()
    elif case.when == "one more":
        parameters["extra"] = torch.zeros(3)


def check_failure(
    case: RefillCase, reason: str, seconds: float, parameters: Tensors, before: Tensors, tp_rank: int
) -> str:
    if not reason or ("\n" in reason and case.who != "target"):
        return f"after {seconds:.1f} s: {reason!r}"
    # Who dies while it is reached may cost the time-out twice: see `peer_shard.reach`.
    limit_s = case.timeout_s * (2 if case.when == "join" else 1) + MARGIN_S
    if seconds > limit_s:
        return f"failed only after {seconds:.1f} s: {reason}"
    wanted = REFUSALS.get(case.when, "") if case.who == "refuse" else ""
    if wanted not in reason and not (case.tp_size > 1 and "another rank of this engine failed" in reason):
        return f"unexpected: {reason}"
    if (
        case.who != "target"
        and f"taking version {2 if case.when == 'other version' else 1} from" not in reason
    ):
        return f"names no peer: {reason}"
    untouched = case.when in ("join", "manifest") or (case.who == "refuse" and case.when != "flipped bit")
    difference = first_difference(parameters, before) if untouched else ""
    return f"the live weights changed: {difference}" if difference else ""


def run_successor(case: RefillCase, tp_rank: int) -> str:
    start_default_group(case.ports[2], tp_rank, case.tp_size, TIMEOUT_S)
    parameters = case.engine_tensors(0, case.tp_size, tp_rank)
    try:
        take(parameters, case.hear("again"), "again", 1, tp_rank, TIMEOUT_S)
    except WeightUpdateError as error:
        return str(error)
    return first_difference(parameters, case.engine_tensors(1, case.tp_size, tp_rank))


def report(case: RefillCase, role: str, work: Callable[[], str]) -> None:
    started = time.monotonic()
    error = work()
    line = {"case": case.name, "seconds": round(time.monotonic() - started, 2), "error": error}
    (case.directory / f"{case.file_name}.{role}.reports").write_text(json.dumps(line) + "\n")
    os._exit(0)  # peers may be dead: an orderly end would wait for them


def roles_of(case: RefillCase) -> dict[str, Callable[[], None]]:
    sides = {"source": run_source, "target": run_target}
    if case.has_successor:
        sides["successor"] = run_successor
    return {
        f"{case.file_name}.{side}{tp_rank}": partial(
            report, case, f"{side}{tp_rank}", partial(work, case, tp_rank)
        )
        for side, work in sides.items()
        for tp_rank in range(case.tp_size)
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    into = Path(sys.argv[1])
    cases = [RefillCase(fields, into) for fields in json.loads((into / "cases.json").read_text())]
    assert all(case.timeout_s == (FAULT_TIMEOUT_S if case.fault else TIMEOUT_S) for case in cases)
    failed: list[str] = []
    for first in range(0, len(cases), CASES_AT_ONCE):
        roles: dict[str, Callable[[], None]] = {}
        for case in cases[first : first + CASES_AT_ONCE]:
            roles |= roles_of(case)
        failed += run_roles(roles, into)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
