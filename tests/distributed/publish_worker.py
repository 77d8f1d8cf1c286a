"""The processes of the publication tests: trainer ranks and engine ranks, through a list of cases.

    python -m tests.distributed.publish_worker DIRECTORY

The parent wrote DIRECTORY/cases.json. Every case has its own default group on each side and its own weight
groups; processes that a case does not use skip it. Each compares with its own reference and appends a JSON
line per case, {"case", "seconds", "error"}, to its reports; an empty error means that all was as expected.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from asyncrl.weights import receiver as receiver_module
from asyncrl.weights import routes as routes_module
from asyncrl.weights.layout import ShardLayout
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards
from asyncrl.weights.publisher import EngineEndpoint, Publisher, PublishStats
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.wire import Deadline, WeightUpdateError, start_exchange
from tests.distributed.forked import fork_roles
from tests.distributed.publish_case import TIMEOUT_S, Case, dtype_of
from tests.shard_reference import Tensors, first_difference, megatron_tensors

PADDED_VOCAB = 128
NUM_PER_SIDE = 4
REFUSED_MODELS = {
    "other_model": "model.norm.weight has shape (5,)",
    "other_padding": "model.embed_tokens.weight has shape (96,",
}
"""What the refusal must name, on both sides."""


WRONG_DIGEST = ("did not arrive as it was sent", "another rank of this engine failed")


def wait_for_store(port: int) -> None:
    """Until somebody listens: torch's own clients look ever more rarely, which idle processes pay for."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError(f"nobody listened at port {port} within {TIMEOUT_S:.0f} s")


def start_default_group(port: int, rank: int, world_size: int, timeout_s: float) -> None:
    if rank > 0:
        wait_for_store(port)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=TIMEOUT_S))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


def trainer_chunks(case: Case, rank: int, version: int) -> tuple[list[ShardLayout], Tensors]:
    """Layouts and values of one trainer rank; its chunks' names are made unique by a prefix."""
    tp_rank, pp_rank = rank % case.tp, rank // (case.tp * case.dp)
    g, model, cut = case.geometry, case.model(version), case.expert_cut(rank)
    num_chunks = case.pp * case.vpp
    per_chunk = g.num_layers // num_chunks
    layouts: list[ShardLayout] = []
    tensors: Tensors = {}
    for chunk_idx in range(case.vpp):
        stage = chunk_idx * case.pp + pp_rank
        layers = tuple(range(stage * per_chunk, (stage + 1) * per_chunk))
        ends = stage == 0, stage == num_chunks - 1
        numbers = tuple(idx + 1 for idx in layers)
        experts = cut.ep_size, cut.ep_rank, cut.etp_size, cut.etp_rank
        coord = MegatronCoord(case.tp, tp_rank, numbers, *ends, PADDED_VOCAB, *experts, cut.te, cut.grouped)
        held = megatron_tensors(g, model, case.tp, tp_rank, layers, *ends, PADDED_VOCAB, cut)
        for shard in megatron_shards(g, coord):
            layouts.append(replace(shard, name=f"{chunk_idx}.{shard.name}"))
            tensors[layouts[-1].name] = held[shard.name].to(dtype_of(shard.name, case.trainer_dtype))
    return layouts, tensors


def run_trainer(case: Case, rank: int) -> str:
    start_default_group(case.ports[0], rank, case.num_trainers, TIMEOUT_S)
    layouts, tensors = trainer_chunks(case, rank, version=1)
    publisher = Publisher(
        rank,
        case.num_trainers,
        layouts,
        tensors,
        case.geometry,
        case.bucket_bytes,
        TIMEOUT_S,
        case.delta,
        lambda _: case.link or "p2p",
    )
    endpoints = [case.endpoint(engine_idx) for engine_idx in range(len(case.engines))]
    try:
        for endpoint in endpoints:
            publisher.connect(endpoint)
    except WeightUpdateError as error:
        expected = case.fault in REFUSED_MODELS and REFUSED_MODELS[case.fault] in str(error)
        return "" if expected else str(error)
    if case.link:
        case.link_engines(publisher, rank)
    # Joining may be slow on a busy machine; only the publication itself gets the short deadline.
    publisher._handshake = replace(publisher._handshake, timeout_s=case.timeout_s)
    for version in case.versions:
        for name, tensor in trainer_chunks(case, rank, version)[1].items():
            tensors[name].copy_(tensor)
        stats = publish(case, publisher, endpoints, tensors, version)
        problem = check_stats(case, version, stats)
        if problem or case.is_over_after(version):
            return problem
    for endpoint in endpoints:
        publisher.disconnect(endpoint.name)
    return ""


def publish(
    case: Case, publisher: Publisher, endpoints: list[EngineEndpoint], tensors: Tensors, version: int
) -> PublishStats:
    """From the parameters, or from a copy while they change."""
    sending = publisher.begin(endpoints, version, staged=case.staged, from_copy=case.staged)
    if case.staged:
        for tensor in tensors.values():
            tensor.fill_(3.0)
    return publisher.finish(sending)


def check_stats(case: Case, version: int, stats: PublishStats) -> str:
    failed = [failure.engine for failure in stats.failures]
    # An engine that refuses a version takes none of it, so that the sender's deadline passes.
    refusing = ("plan_mismatch", "version_mismatch", "receiver_stalled", "base_mismatch")
    if case.staged:  # and one that could not verify it says so
        refusing = (*refusing, "bit_flipped", "bit_flipped_in_changes", "base_spoiled")
    expected = ["engine0"] if case.fault in refusing and case.is_over_after(version) else []
    if case.fault == "not_linked":
        expected = ["engine0", "engine1"]
    if case.fault == "stripe_flipped" and case.staged:  # replica 0 has passed something wrong on
        expected = ["engine1"]
    if failed != expected:
        return f"failed engines {stats.failures}, expected {expected}"
    if stats.seconds > case.timeout_s + 10.0:
        return f"the publication took {stats.seconds:.1f} s"
    num_received = stats.bytes_received_total
    if case.link and case.num_trainers == 1 and stats.bytes_sent * len(case.engines) != num_received:
        return f"{stats.bytes_sent} bytes sent for {num_received} received by all engines"
    needed = sum(
        case.wire_bytes(tp_size, tp_rank)
        for engine_idx, tp_size in enumerate(case.engines)
        if f"engine{engine_idx}" not in failed
        for tp_rank in range(tp_size)
    )
    # Padding rows are the receiver's own business and never sent.
    if version > 1 and case.share_changed(version) < 0.3:
        # Every unit of two bytes, which may be two elements, is told in six; a quarter is left to chance.
        told = 1.25 * (6 if case.fp8 else 3) * case.share_changed(version) * needed
        if case.fp8 and case.share_changed(version):  # where the largest of a block changes, all of it does
            told += 2 * 3 * 128 * 128
        if stats.bytes_received_total > told:
            return f"{stats.bytes_received_total} bytes received for changes in {needed}"
    elif not 0.8 * needed <= stats.bytes_received_total <= needed:
        return f"{stats.bytes_received_total} bytes received, {needed} held by the engines"
    return ""


def join_as_engine(case: Case, endpoint: EngineEndpoint, tp_rank: int) -> dist.ProcessGroup:
    """What SGLang's init_weights_update_group does."""
    world_size = case.num_trainers + endpoint.tp_size
    address = f"tcp://{endpoint.master_address}:{endpoint.master_port}"
    timeout = timedelta(seconds=TIMEOUT_S)
    wait_for_store(endpoint.master_port)
    store, rank, _ = next(dist.rendezvous(address, case.num_trainers + tp_rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    store = dist.PrefixStore(endpoint.group_name, store)
    group, _ = _new_process_group_helper(
        world_size, rank, [], dist.Backend("gloo"), store, group_name=endpoint.group_name, timeout=timeout
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def all_agree(ok: bool) -> bool:
    flag = torch.tensor([int(ok)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def flip_what_is_passed_on() -> None:
    """Corrupt one bit of every stripe that this rank passes on; its own copy is as it came."""

    def exchange(
        group: dist.ProcessGroup, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]
    ) -> list[dist.Work]:
        wrong = {peer: data.clone() for peer, data in sends.items()}
        for data in wrong.values():
            data[0] ^= 1
        KEPT.append(wrong)
        return start_exchange(group, wrong, receives)

    routes_module.start_exchange = exchange


KEPT: list[object] = []
"""What is on its way out."""


def flip_one_bit(bucket_idx: int) -> None:
    """Corrupt one bit of a bucket between its arrival and its unpacking."""
    original = receiver_module.BucketCopies.unpack
    unpacked = 0

    def unpack(
        self: receiver_module.BucketCopies,
        parameters: list[torch.Tensor],
        space: torch.Tensor,
        digests: torch.Tensor,
    ) -> None:
        nonlocal unpacked
        if unpacked == bucket_idx:
            space[len(space) // 2] ^= 4
        unpacked += 1
        original(self, parameters, space, digests)

    receiver_module.BucketCopies.unpack = unpack  # type: ignore[method-assign]


def run_engine(case: Case, engine_idx: int, tp_rank: int) -> str:
    tp_size = case.engines[engine_idx]
    start_default_group(case.ports[1 + engine_idx], tp_rank, tp_size, TIMEOUT_S)
    group = join_as_engine(case, case.endpoint(engine_idx), tp_rank)
    parameters = case.engine_tensors(0, tp_size, tp_rank)
    if case.fault == "other_model" and engine_idx == 0:
        parameters["model.norm.weight"] = torch.zeros(5)
    if case.fault == "other_padding" and engine_idx == 0:
        embedding = parameters["model.embed_tokens.weight"]
        parameters["model.embed_tokens.weight"] = torch.zeros(96, embedding.shape[1])  # 192 rows over 2 ranks
    for tensor in parameters.values():
        tensor.copy_(torch.full(tensor.shape, 7.0))  # padding included: it must become zero
    receiver = Receiver(parameters, group, range(case.num_trainers), all_agree)
    victim = engine_idx == 0 and tp_rank == tp_size - 1
    if case.fault == "bit_flipped" and victim:
        flip_one_bit(bucket_idx=3)
    try:
        receiver.connect(TIMEOUT_S)
    except WeightUpdateError as error:
        expected = case.fault in REFUSED_MODELS and REFUSED_MODELS[case.fault] in str(error)
        return "" if expected else str(error)
    if case.link and case.fault != "not_linked":
        receiver.link(case.link_order(engine_idx), tp_rank)
    if case.fault == "stripe_flipped" and engine_idx == 0 and victim:
        flip_what_is_passed_on()
    if case.fault == "receiver_stalled" and engine_idx == 0:
        time.sleep(case.timeout_s + 2.0)
        return ""
    plan_hash = "0" * 64 if case.fault == "plan_mismatch" else receiver._plan_hash
    return receive_versions(case, receiver, parameters, plan_hash, engine_idx, tp_rank)


def receive_versions(
    case: Case, receiver: Receiver, parameters: Tensors, plan_hash: str, engine_idx: int, tp_rank: int
) -> str:
    victim = engine_idx == 0 and tp_rank == case.engines[0] - 1
    for version in (5,) if case.fault == "version_mismatch" else case.versions:
        if version > 1 and victim:
            spoil_what_is_held(case, receiver, parameters)
        started = time.monotonic()
        before = {name: tensor.clone() for name, tensor in parameters.items()}
        try:
            difference = take_version(case, receiver, parameters, version, plan_hash)
        except WeightUpdateError as error:
            if case.staged and (difference := first_difference(parameters, before)):
                return f"failed, and changed the live weights: {difference}"
            return check_engine_failure(case, str(error), time.monotonic() - started, engine_idx, tp_rank)
        if difference:
            return difference
        expected = case.engine_tensors(version, case.engines[engine_idx], tp_rank)
        difference = first_difference(parameters, expected)
        if difference or case.is_over_after(version):
            return difference
    return ""


def take_version(case: Case, receiver: Receiver, parameters: Tensors, version: int, plan_hash: str) -> str:
    """Into the live weights, or beside them; returns what of them changed too early."""
    if not case.staged:
        receiver.receive(version, plan_hash, case.timeout_s)
        return ""
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    receiver.stage(version, plan_hash, case.timeout_s, "device")
    assert receiver._second is not None
    try:
        receiver._second.require(version, Deadline(case.timeout_s))
    except WeightUpdateError:
        receiver.take(version, case.timeout_s)  # all ranks together
    difference = first_difference(parameters, before)
    receiver.take(version, case.timeout_s)
    return f"the live weights changed before they were to: {difference}" if difference else ""


def spoil_what_is_held(case: Case, receiver: Receiver, parameters: Tensors) -> None:
    """Before the second publication, which tells changes."""
    if case.fault == "base_mismatch":
        receiver._held = 7
    if case.fault == "base_spoiled":  # somebody else wrote into the live weights
        parameters["model.norm.weight"][0] += 1.0
    if case.fault == "bit_flipped_in_changes":
        flip_one_bit(bucket_idx=2)


def check_engine_failure(case: Case, reason: str, seconds: float, engine_idx: int, tp_rank: int) -> str:
    wanted = {
        "bit_flipped": WRONG_DIGEST,
        "bit_flipped_in_changes": WRONG_DIGEST,
        "base_spoiled": WRONG_DIGEST,
        "base_mismatch": ("changes of version 1, this rank holds version 7", "another rank of this engine"),
        "plan_mismatch": ("follows plan 000000",),
        "version_mismatch": ("sends version 1",),
        "stripe_flipped": WRONG_DIGEST,
        "not_linked": ("send over link 1, this rank is in no link",),
    }.get(case.fault)
    guilty = case.fault == "not_linked" or engine_idx == (1 if case.fault == "stripe_flipped" else 0)
    if wanted is None or not guilty or not any(part in reason for part in wanted):
        return f"unexpected: {reason}"
    return "" if seconds < case.timeout_s + 5.0 else f"failed only after {seconds:.1f} s: {reason}"


def main(role: str, process: int, directory: Path) -> None:
    for fields in json.loads((directory / "cases.json").read_text()):
        case = Case(fields)
        started = time.monotonic()
        if role == "trainer":
            rank = case.trainer_of(process)
            if rank is None:
                continue
            error = run_trainer(case, rank)
        else:
            place = case.engine_of(process)
            if place is None:
                continue
            error = run_engine(case, *place)
            routes_module.start_exchange = start_exchange
        seconds = round(time.monotonic() - started, 2)
        report = {"case": case.name, "seconds": seconds, "error": error}
        with (directory / f"{role}{process}.reports").open("a") as reports:
            reports.write(json.dumps(report) + "\n")
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    into = Path(sys.argv[1])
    fork_roles(
        {
            f"{role}{process}": partial(main, role, process, into)
            for role in ("trainer", "engine")
            for process in range(NUM_PER_SIDE)
        },
        into,
    )
