"""The processes of the tests of faults in publications: who dies, stalls or lies, when, and what follows.

    python -m tests.distributed.fault_worker DIRECTORY

The parent wrote DIRECTORY/cases.json. Every case has processes of its own: two trainer ranks, engine 0 of two
ranks, engine 1 of one, and the successors of engine 0 where it dies. ``fault`` is WHO:WHEN or refill:HOW:

    sender:PHASE   trainer rank 1 dies: every rank of every engine fails in time
    engine:PHASE   rank 1 of engine 0 dies: engine 1 gets the version; engine 0 starts again, is met in a new
                   weight group, gets the whole version alone, and takes part in the next one
    refill:HOW     engine 0 does not take the version, and lives: it leaves, is met again, and is refilled
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from asyncrl.weights import handshake as handshake_module
from asyncrl.weights import receiver as receiver_module
from asyncrl.weights import transport as transport_module
from asyncrl.weights.publisher import EngineEndpoint, Publisher
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.wire import WeightUpdateError
from tests.distributed.forked import run_roles
from tests.distributed.publish_case import TIMEOUT_S, Case
from tests.distributed.publish_worker import (
    all_agree,
    flip_one_bit,
    join_as_engine,
    publish,
    start_default_group,
    take_version,
    trainer_chunks,
)
from tests.shard_reference import Tensors, first_difference

VICTIM = 1  # rank
CASES_AT_ONCE = 4


class FaultCase(Case):
    """A case with its fault taken apart."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self.who, self.when, *victim = self.fault.split(":")
        self.victim = int(victim[0]) if victim else 1  # of linked engines

    def again(self) -> EngineEndpoint:
        """Where engine 0 is met for the second time."""
        return replace(
            self.endpoint(0),
            group_name=f"{self.name}-again",
            master_port=self.ports[2 * len(self.engines) + 2],
        )

    def with_timeout(self, timeout_s: float) -> FaultCase:
        other = copy(self)
        other.timeout_s = timeout_s
        return other

    @property
    def again_port(self) -> int:
        """Where the ranks of engine 0's successor meet."""
        return self.ports[2 * len(self.engines) + 1]


# --- what goes wrong ---


def die_before(owner: object, method: str, is_now: Callable[..., bool]) -> None:
    """Make this process vanish when ``method`` is called with arguments for which ``is_now`` holds."""
    original = getattr(owner, method)

    def fatal(*arguments: Any) -> Any:
        if is_now(*arguments):
            os._exit(0)
        return original(*arguments)

    setattr(owner, method, fatal)


def arm_sender(phase: str) -> None:
    if phase == "connect":  # joined, and gone before the engine is told anything
        die_before(handshake_module.Handshake, "_agree_on_plan", lambda *_: True)
    elif phase == "bucket":
        die_before(transport_module.BucketSender, "_start", lambda _, bucket, idx, *rest: idx >= 2)
    else:
        words = {"header": "the header", "digests": "digests"}[phase]
        die_before(
            transport_module.BucketSender, "_send_to_all", lambda _, to, data, name, end: name == words
        )


def arm_receiver(phase: str) -> None:
    words = {"header": "waiting for version", "bucket": "waiting for bucket 2", "digests": "the digests"}
    words["result"] = "telling the first sender"
    if phase == "connect":
        die_before(Receiver, "_exchange", lambda *_: True)
    else:
        die_before(receiver_module.Deadline, "wait", lambda _, work, what: words[phase] in what)


# --- the trainer ---


def run_trainer(case: FaultCase, rank: int) -> str:
    start_default_group(case.ports[0], rank, case.num_trainers, TIMEOUT_S)
    layouts, tensors = trainer_chunks(case, rank, version=1)
    publisher = Publisher(
        rank,
        case.num_trainers,
        layouts,
        tensors,
        case.geometry,
        case.bucket_bytes,
        case.timeout_s,
        case.delta,
    )
    if case.who == "sender":
        if rank == VICTIM:
            arm_sender(case.when)
        try:
            publisher.connect(case.endpoint(0))
            publish(case, publisher, [case.endpoint(0)], tensors, 1)
        except RuntimeError:  # of ours or of torch: a trainer that lost a rank cannot go on
            return ""
        return "the trainer did not notice that its rank 1 is gone"
    return publish_around_the_fault(case, rank, publisher, tensors)


def publish_around_the_fault(case: FaultCase, rank: int, publisher: Publisher, tensors: Tensors) -> str:
    reasons = [connect(publisher, case.endpoint(idx)) for idx in range(len(case.engines))]
    if reasons[1] or bool(reasons[0]) != (case.fault == "engine:connect"):
        return f"connecting: {reasons}"
    started = time.monotonic()
    taking_part = [case.endpoint(idx) for idx, reason in enumerate(reasons) if not reason]
    failed = {f.engine for f in publish(case, publisher, taking_part, tensors, 1).failures}
    if failed - {"engine0"} or time.monotonic() - started > case.timeout_s + 5.0:
        return f"failed: {failed}, after {time.monotonic() - started:.1f} s"
    publisher.disconnect("engine0")
    # A busy machine may be slow to start a successor; only the fault itself gets the short deadline.
    publisher._handshake = replace(publisher._handshake, timeout_s=TIMEOUT_S)
    for name, tensor in trainer_chunks(case, rank, version=1)[1].items():
        tensors[name].copy_(tensor)
    publisher.connect(case.again())
    refill = publisher.publish([case.again()], 1)
    for name, tensor in trainer_chunks(case, rank, version=2)[1].items():
        tensors[name].copy_(tensor)
    following = publish(case, publisher, [case.again(), case.endpoint(1)], tensors, 2)
    return "; ".join(str(failure) for failure in (*refill.failures, *following.failures))


def connect(publisher: Publisher, endpoint: EngineEndpoint) -> str:
    try:
        publisher.connect(endpoint)
    except WeightUpdateError as error:
        return str(error)
    return ""


# --- the engines ---


def run_engine(case: FaultCase, engine_idx: int, tp_rank: int) -> str:
    tp_size = case.engines[engine_idx]
    start_default_group(case.ports[1 + engine_idx], tp_rank, tp_size, TIMEOUT_S)
    group = join_as_engine(case, case.endpoint(engine_idx), tp_rank)
    parameters = case.engine_tensors(0, tp_size, tp_rank)
    receiver = Receiver(parameters, group, range(case.num_trainers), all_agree)
    if case.who != "sender" and engine_idx == 1:
        receiver.connect(TIMEOUT_S)
        return receive(case, receiver, parameters, tp_size, tp_rank)
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    started = time.monotonic()
    reason = fail(case, receiver, parameters, tp_rank)
    seconds = time.monotonic() - started
    if not reason or seconds > case.timeout_s + 7.0:
        return f"after {seconds:.1f} s: {reason or 'the version was taken'}"
    if case.who == "sender" and not any(word in reason for word in ("rank", "sender")):
        return f"names no peer: {reason}"
    if case.staged and (difference := first_difference(parameters, before)):
        return f"the live weights changed: {difference}"
    if case.who != "refill":
        return ""
    dist.destroy_process_group(group)
    return come_back(case, parameters, tp_rank)


def fail(case: FaultCase, receiver: Receiver, parameters: Tensors, tp_rank: int) -> str:
    """Take part until the fault; returns the error, or an empty string if there was none."""
    if case.who == "engine" and tp_rank == VICTIM:
        arm_receiver(case.when)
    if case.who == "refill" and case.when == "flipped bit" and tp_rank == VICTIM:
        flip_one_bit(bucket_idx=3)
    try:
        receiver.connect(case.timeout_s)
        if case.when == "stalled":
            time.sleep(case.timeout_s + 1.0)
            return "stalled"
        plan_hash = "0" * 64 if case.when == "other plan" else receiver._plan_hash
        take_version(case, receiver, parameters, 1, plan_hash)
    except RuntimeError as error:  # of torch, where a rank of this engine died
        return str(error)
    return ""


def run_successor(case: FaultCase, tp_rank: int) -> str:
    """A new process of engine 0, with weights of its own."""
    start_default_group(case.again_port, tp_rank, case.engines[0], TIMEOUT_S)
    return come_back(case, case.engine_tensors(0, case.engines[0], tp_rank), tp_rank)


def come_back(case: FaultCase, parameters: Tensors, tp_rank: int) -> str:
    group = join_as_engine(case, case.again(), tp_rank)
    receiver = Receiver(parameters, group, range(case.num_trainers), all_agree)
    receiver.connect(TIMEOUT_S)
    receiver.receive(1, receiver._plan_hash, TIMEOUT_S)  # alone, so not beside anything
    expected = case.engine_tensors(1, case.engines[0], tp_rank)
    difference = first_difference(parameters, expected)
    return difference or receive(case, receiver, parameters, case.engines[0], tp_rank, first=2)


def receive(
    case: FaultCase, receiver: Receiver, parameters: Tensors, tp_size: int, tp_rank: int, first: int = 1
) -> str:
    """Versions up to 2, each byte-equal to the reference."""
    for version in range(first, 3):
        # A busy machine may be slow to start a successor; who has no fault waits for it.
        patient = case.with_timeout(TIMEOUT_S)
        difference = take_version(patient, receiver, parameters, version, receiver._plan_hash)
        expected = case.engine_tensors(version, tp_size, tp_rank)
        difference = difference or first_difference(parameters, expected)
        if difference:
            return f"version {version}: {difference}"
    return ""


def report(case: FaultCase, role: str, work: Callable[[], str], directory: Path) -> None:
    started = time.monotonic()
    error = work()
    line = {"case": case.name, "seconds": round(time.monotonic() - started, 2), "error": error}
    (directory / f"{case.name.replace(':', '-')}.{role}.reports").write_text(json.dumps(line) + "\n")
    os._exit(0)  # peers may be dead: an orderly end would wait for them


def roles_of(case: FaultCase, directory: Path) -> dict[str, Callable[[], None]]:
    work: dict[str, Callable[[], str]] = {
        f"trainer{rank}": partial(run_trainer, case, rank) for rank in range(case.num_trainers)
    }
    for engine_idx, tp_size in enumerate(case.engines):
        for tp_rank in range(tp_size):
            work[f"engine{engine_idx}-{tp_rank}"] = partial(run_engine, case, engine_idx, tp_rank)
    if case.who == "engine":
        for tp_rank in range(case.engines[0]):
            work[f"successor{tp_rank}"] = partial(run_successor, case, tp_rank)
    prefix = case.name.replace(":", "-").replace(" ", "-")
    return {f"{prefix}.{role}": partial(report, case, role, do, directory) for role, do in work.items()}


def run_cases(roles_of: Callable[[FaultCase, Path], dict[str, Callable[[], None]]]) -> NoReturn:
    """All cases of the directory in the first argument, a few at a time."""
    torch.set_num_threads(1)
    into = Path(sys.argv[1])
    cases = [FaultCase(fields) for fields in json.loads((into / "cases.json").read_text())]
    failed: list[str] = []
    for first in range(0, len(cases), CASES_AT_ONCE):
        roles: dict[str, Callable[[], None]] = {}
        for case in cases[first : first + CASES_AT_ONCE]:
            roles |= roles_of(case, into)
        failed += run_roles(roles, into)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    run_cases(roles_of)
