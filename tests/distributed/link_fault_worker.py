"""The processes of the tests of deaths among linked engines: all of them fail in time, and the others go on.

    python -m tests.distributed.link_fault_worker DIRECTORY

The parent wrote DIRECTORY/cases.json. Every case has two trainer ranks and linked engines of one rank.
``fault`` is link:PHASE or link:PHASE:ENGINE: that engine, else engine 1, dies in version 1, at that phase.
Those that are left lack what it had to pass on. They leave, are met again and get version 1 one by one, are
linked anew, and get version 2 together.

How long they take to notice counts from when the victim is gone: it alone holds a FIFO open for writing,
which the kernel closes together with its connections. A busy machine may let it die seconds later.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from asyncrl.weights import receiver as receiver_module
from asyncrl.weights.publisher import EngineEndpoint, Publisher
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.wire import Deadline, WeightUpdateError
from tests.distributed.fault_worker import FaultCase, die_before, report, run_cases
from tests.distributed.publish_case import FAULT_TIMEOUT_S, TIMEOUT_S
from tests.distributed.publish_worker import (
    all_agree,
    join_as_engine,
    publish,
    start_default_group,
    take_version,
    trainer_chunks,
)
from tests.shard_reference import Tensors, first_difference

NOTICED_WITHIN_S = 4.0
"""Of a staged version, once the victim is gone."""
LATE = ("digests", "result")
"""Phases at which the others may have all that they need."""
WORDS = {
    "header": "waiting for version",
    "arrival": "of bucket 2 of sender",  # of its stripe of a bucket
    "exchange": "exchanging bucket 2",
    "passing": "replica 2 taking bucket 2",
    "chain": "waiting for bucket 2 of",
    "digests": "the digests",
    "result": "telling the first sender",
}


def survivors(case: FaultCase) -> list[int]:
    return [engine_idx for engine_idx in range(len(case.engines)) if engine_idx != case.victim]


def met_again(case: FaultCase, engine_idx: int) -> EngineEndpoint:
    port = case.ports[1 + 2 * len(case.engines) + survivors(case).index(engine_idx)]
    return replace(case.endpoint(engine_idx), group_name=f"{case.name}-again{engine_idx}", master_port=port)


class DeathWatch:
    """Sees when the process that holds a FIFO open for writing is gone; opened before that one can die."""

    def __init__(self, fifo: Path) -> None:
        self._fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        self._seen_at = math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._fd, 0)  # hanging up is always told
        if poller.poll(1000 * TIMEOUT_S):
            self._seen_at = time.monotonic()

    @property
    def seconds_ago(self) -> float:
        """Negative as long as it has not been seen."""
        return time.monotonic() - self._seen_at


def run_trainer(case: FaultCase, rank: int, fifo: Path) -> str:
    death = DeathWatch(fifo)
    start_default_group(case.ports[0], rank, case.num_trainers, TIMEOUT_S)
    layouts, tensors = trainer_chunks(case, rank, version=1)
    size = case.num_trainers, layouts, tensors, case.geometry, case.bucket_bytes, TIMEOUT_S, False
    publisher = Publisher(rank, *size, choose=lambda plan: case.link)
    for engine_idx in range(len(case.engines)):
        publisher.connect(case.endpoint(engine_idx))
    case.link_engines(publisher, rank)
    publisher._handshake = replace(publisher._handshake, timeout_s=case.timeout_s)
    started = time.monotonic()
    endpoints = [case.endpoint(idx) for idx in range(len(case.engines))]
    everyone = {endpoint.name for endpoint in endpoints}
    failed = {failure.engine for failure in publish(case, publisher, endpoints, tensors, 1).failures}
    seconds = time.monotonic() - started
    noticed_after = min(seconds, death.seconds_ago)  # not before anything was sent
    # All together; but what few bytes there are may have left before the trainer could notice a death. Then
    # the engines know, which is what counts: they fail below, or tell the trainer that they could not verify.
    noticed = failed == everyone or (not failed and not case.staged) or case.when in LATE
    # Who serves on beside what arrives cannot leave: it must take what the senders still send.
    allowed_s = case.timeout_s / 2 if case.staged else case.timeout_s + 5.0
    in_time = seconds <= allowed_s and (not case.staged or noticed_after <= NOTICED_WITHIN_S)
    if not in_time or not noticed:
        return f"failed: {failed}, after {seconds:.1f} s, {noticed_after:.1f} s after the victim was gone"
    for name in everyone:
        publisher.disconnect(name)
    if publisher.linked:
        return f"still linked: {publisher.linked}"
    publisher._handshake = replace(publisher._handshake, timeout_s=TIMEOUT_S)
    for name, tensor in trainer_chunks(case, rank, version=1)[1].items():
        tensors[name].copy_(tensor)
    endpoints = [met_again(case, engine_idx) for engine_idx in survivors(case)]
    for endpoint in endpoints:
        publisher.connect(endpoint)
    failures = publisher.publish(endpoints, 1).failures
    case.link_engines(publisher, rank, number=2)
    for name, tensor in trainer_chunks(case, rank, version=2)[1].items():
        tensors[name].copy_(tensor)
    failures += publish(case, publisher, endpoints, tensors, 2).failures
    return "; ".join(map(str, failures))


def run_engine(case: FaultCase, engine_idx: int, fifo: Path) -> str:
    if engine_idx == case.victim:
        os.open(fifo, os.O_RDWR)  # without waiting for a reader; closed by its death
    start_default_group(case.ports[1 + engine_idx], 0, 1, TIMEOUT_S)
    parameters = case.engine_tensors(0, 1, 0)
    group = join_as_engine(case, case.endpoint(engine_idx), 0)
    receiver = Receiver(parameters, group, range(case.num_trainers), all_agree)
    receiver.connect(TIMEOUT_S)
    receiver.link(case.link_order(engine_idx), 0)
    assert receiver._link is not None
    receiver._link.group(Deadline(TIMEOUT_S))  # nobody dies before
    if engine_idx == case.victim:
        words = WORDS[case.when]
        die_before(receiver_module.Deadline, "wait", lambda _, work, what: words in what)
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    started = time.monotonic()
    reason = "it was taken"
    try:
        take_version(case, receiver, parameters, 1, receiver._plan_hash)
    except WeightUpdateError as error:
        reason = str(error)
        if case.staged and (difference := first_difference(parameters, before)):
            return f"the live weights changed: {difference}"
    seconds = time.monotonic() - started
    if seconds > FAULT_TIMEOUT_S + 7.0 or (reason == "it was taken" and case.when not in LATE):
        return f"after {seconds:.1f} s: {reason}"
    receiver.close()
    dist.destroy_process_group(group)
    del receiver, group  # only now are the connections closed, and the trainer's sends fail
    return come_back(case, parameters, engine_idx)


def come_back(case: FaultCase, parameters: Tensors, engine_idx: int) -> str:
    patient = case.with_timeout(TIMEOUT_S)
    group = join_as_engine(case, met_again(case, engine_idx), 0)
    receiver = Receiver(parameters, group, range(case.num_trainers), all_agree)
    receiver.connect(TIMEOUT_S)
    receiver.receive(1, receiver._plan_hash, TIMEOUT_S)
    if difference := first_difference(parameters, case.engine_tensors(1, 1, 0)):
        return f"version 1: {difference}"
    others = survivors(case)
    receiver.link(case.link_order(others.index(engine_idx), 2, len(others)), 0)
    difference = take_version(patient, receiver, parameters, 2, receiver._plan_hash)
    return difference or first_difference(parameters, case.engine_tensors(2, 1, 0))


def roles_of(case: FaultCase, directory: Path) -> dict[str, Callable[[], None]]:
    prefix = case.name.replace(":", "-")
    fifo = directory / f"{prefix}.fifo"
    os.mkfifo(fifo)
    work: dict[str, Callable[[], str]] = {
        f"trainer{rank}": partial(run_trainer, case, rank, fifo) for rank in range(case.num_trainers)
    }
    work |= {f"engine{idx}": partial(run_engine, case, idx, fifo) for idx in range(len(case.engines))}
    return {f"{prefix}.{role}": partial(report, case, role, do, directory) for role, do in work.items()}


if __name__ == "__main__":
    run_cases(roles_of)
