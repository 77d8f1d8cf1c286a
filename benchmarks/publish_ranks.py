"""What the ranks of the publication benchmark do: three ways to bring a version into the engines."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from publish_world import (
    DTYPE,
    ENGINE_TP,
    NUM_ENGINE_RANKS,
    NUM_ENGINES,
    NUM_TRAINERS,
    PP,
    TIMEOUT_S,
    TP,
    Meter,
    Setup,
    expected,
    set_up_rank,
)
from safetensors import safe_open

from asyncrl.weights.engine_layout import engine_shards
from asyncrl.weights.export import write_hf
from asyncrl.weights.groups import host_store
from asyncrl.weights.layout import Block, ShardLayout, hf_tensors, matrix_shape
from asyncrl.weights.megatron_layout import MegatronCoord, megatron_shards
from asyncrl.weights.publisher import EngineEndpoint, Publisher
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.routes import LinkOrder, ready_key
from asyncrl.weights.transport import join_group
from asyncrl.weights.wire import Deadline

Tensors = dict[str, torch.Tensor]
FILL_ROWS = 4096  # as many rows are made at a time, so that making them needs little memory
CHECKPOINT, WEIGHTS = "checkpoint", "model.safetensors"


def run_trainer(setup: Setup, pipe: Connection, rank: int) -> None:
    set_up_rank()
    start_default_group(setup.ports[0], rank, NUM_TRAINERS)
    layouts = trainer_layouts(setup, rank // TP, rank % TP)
    tensors = {layout.name: torch.empty(layout.shape, dtype=DTYPE) for layout in layouts}
    per_engine = setup.bucket_bytes // NUM_ENGINES  # as the trainer does: they are sent to side by side
    size = rank, NUM_TRAINERS, layouts, tensors, setup.geometry, per_engine, TIMEOUT_S
    publisher = Publisher(*size, choose=lambda plan: "relay")
    endpoints = [endpoint(setup, engine_idx) for engine_idx in range(NUM_ENGINES)]
    for each in endpoints:
        publisher.connect(each)
    if rank == 0:
        order = link_order(setup, 0)
        store = host_store(order.host, order.port, TIMEOUT_S)
        store.wait([ready_key(order.name, idx, j) for idx in range(NUM_ENGINES) for j in range(ENGINE_TP)])
    stages = [dist.new_group([stage * TP + tp_rank for tp_rank in range(TP)]) for stage in range(PP)]
    gatherer = Gatherer(setup, rank, stages[rank // TP], layouts, tensors)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        method, version = order
        fill(layouts, tensors, version)
        if method == "asyncrl, relay":
            publisher.link(publisher.linkable(), 1, "relay")
        else:
            publisher.unlink()
        setup.barrier.wait()
        meter = Meter()
        if method in ("asyncrl", "asyncrl, relay"):
            stats = publisher.publish(endpoints, version)
            assert not stats.failures, stats.failures
            meter.bytes_sent = stats.bytes_sent
        elif method == "asyncrl, staged":
            stats = publisher.finish(publisher.begin(endpoints, version, staged=True, from_copy=True))
            assert not stats.failures, stats.failures
            meter.bytes_sent = stats.bytes_sent
            meter.kept_bytes = sum(tensor.nbytes for tensor in tensors.values())
        elif method == "disk":
            write_checkpoint(setup, rank, layouts, tensors)
            meter.bytes_sent = (setup.directory / CHECKPOINT / WEIGHTS).stat().st_size if rank == 0 else 0
            setup.barrier.wait()
        else:
            gatherer.publish(meter)
        report = meter.report()
        setup.barrier.wait()
        pipe.send(report)


def run_engine(setup: Setup, pipe: Connection, engine_idx: int, tp_rank: int) -> None:
    set_up_rank()
    start_default_group(setup.ports[1 + engine_idx], tp_rank, ENGINE_TP)
    layouts = engine_shards(setup.geometry, ENGINE_TP, tp_rank)
    tensors = {layout.name: torch.zeros(layout.shape, dtype=DTYPE) for layout in layouts}
    group = join_group(endpoint(setup, engine_idx), NUM_TRAINERS + tp_rank, NUM_TRAINERS, "gloo", TIMEOUT_S)
    receiver = Receiver(tensors, group, range(NUM_TRAINERS), all_agree)
    receiver.connect(TIMEOUT_S)
    receiver.link(link_order(setup, engine_idx), tp_rank)
    place = 1 + engine_idx * ENGINE_TP + tp_rank
    stages = [join_group(broadcast_point(setup, s), place, 1, "gloo", TIMEOUT_S) for s in range(PP)]
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        method, version = order
        setup.barrier.wait()
        meter = Meter()
        if method in ("asyncrl", "asyncrl, relay"):
            receiver.receive(version, receiver._plan_hash, TIMEOUT_S)
            meter.bytes_received = sum(bucket.num_bytes for bucket in receiver._buckets)
        elif method == "asyncrl, staged":
            receiver.stage(version, receiver._plan_hash, TIMEOUT_S, "device")
            assert receiver._second is not None
            receiver._second.require(version, Deadline(TIMEOUT_S))
            paused = time.monotonic()
            receiver.take(version, TIMEOUT_S)
            meter.pause_s = time.monotonic() - paused
            meter.bytes_received = sum(bucket.num_bytes for bucket in receiver._buckets)
            meter.kept_bytes = sum(tensor.nbytes for tensor in tensors.values())
        elif method == "disk":
            setup.barrier.wait()  # it goes on serving until the files are there
            resumed = time.monotonic()
            read_checkpoint(setup, layouts, tensors)
            meter.bytes_received = sum(tensor.nbytes for tensor in tensors.values())
            meter.pause_s = time.monotonic() - resumed
        else:
            receive_broadcasts(setup, stages, layouts, tensors, meter)
        meter.pause_s = meter.pause_s or time.monotonic() - meter.began
        report = meter.report()
        setup.barrier.wait()
        wrong = first_mismatch(layouts, tensors, version)
        pipe.send(replace(report, mismatch=wrong))


# ---- Gathering and broadcasting whole tensors ----------------------------------------------------------


class Gatherer:
    """One trainer rank's part: gather within the pipeline stage, broadcast by the stage's first rank."""

    def __init__(
        self,
        setup: Setup,
        rank: int,
        group: dist.ProcessGroup,
        layouts: list[ShardLayout],
        tensors: Tensors,
    ) -> None:
        self._setup = setup
        self._stage, self._tp_rank = divmod(rank, TP)
        self._group = group
        self._tensors = tensors
        self._shapes = hf_tensors(setup.geometry)
        per_rank = [trainer_layouts(setup, self._stage, tp_rank) for tp_rank in range(TP)]
        self._peers = [{layout.name: layout for layout in peer} for peer in per_rank]
        self._layouts = layouts
        if self._tp_rank == 0:
            self._engines = join_group(broadcast_point(setup, self._stage), 0, 1, "gloo", TIMEOUT_S)

    def publish(self, meter: Meter) -> None:
        whole: Tensors = {}
        pending = 0
        for layout in self._layouts:
            whole |= self._gather(layout, meter)
            pending = sum(tensor.nbytes for tensor in whole.values())
            if pending >= self._setup.bucket_bytes:
                self._broadcast(whole, meter)
                whole = {}
        if whole:
            self._broadcast(whole, meter)

    def _gather(self, layout: ShardLayout, meter: Meter) -> Tensors:
        """The whole Hugging Face tensors that make up one parameter; on the first rank alone."""
        own = self._tensors[layout.name]
        parts = [own]
        if len({peer[layout.name].blocks for peer in self._peers}) > 1:
            shapes = [peer[layout.name].shape for peer in self._peers]
            parts = [torch.empty(shape, dtype=DTYPE) for shape in shapes]
            dist.all_gather(parts, own, group=self._group)
            meter.bytes_sent += own.nbytes * (TP - 1)
            meter.bytes_received += own.nbytes * (TP - 1)
        if self._tp_rank != 0:
            return {}
        names = dict.fromkeys(block.tensor for block in layout.blocks)
        whole = {name: torch.empty(self._shapes[name], dtype=DTYPE) for name in names}
        for peer, part in zip(self._peers, parts, strict=False):
            matrix = part.view(matrix_shape(part.shape))
            for block in peer[layout.name].blocks:
                target = whole[block.tensor].view(matrix_shape(whole[block.tensor].shape))
                target[block.row : block.row + block.rows, block.col : block.col + block.cols] = matrix[
                    block.local_row : block.local_row + block.rows,
                    block.local_col : block.local_col + block.cols,
                ]
        return whole

    def _broadcast(self, whole: Tensors, meter: Meter) -> None:
        if self._tp_rank != 0:
            return
        works = [
            dist.broadcast(tensor, group=self._engines, group_src=0, async_op=True)
            for tensor in whole.values()
        ]
        for work in works:
            work.wait(timedelta(seconds=TIMEOUT_S))
        meter.bytes_sent += sum(tensor.nbytes for tensor in whole.values())


def receive_broadcasts(
    setup: Setup,
    stages: list[dist.ProcessGroup],
    layouts: tuple[ShardLayout, ...],
    tensors: Tensors,
    meter: Meter,
) -> None:
    """Take every whole tensor in the senders' order and keep the slices of this rank."""
    wanted: dict[str, list[tuple[str, Block]]] = {}
    for layout in layouts:
        for block in layout.blocks:
            wanted.setdefault(block.tensor, []).append((layout.name, block))
    shapes = hf_tensors(setup.geometry)
    for stage, group in enumerate(stages):
        for names in buckets_of(setup, stage):
            whole = {name: torch.empty(shapes[name], dtype=DTYPE) for name in names}
            works = [dist.broadcast(t, group=group, group_src=0, async_op=True) for t in whole.values()]
            for work in works:
                work.wait(timedelta(seconds=TIMEOUT_S))
            for name, tensor in whole.items():
                meter.bytes_received += tensor.nbytes
                for parameter, block in wanted.get(name, []):
                    place(tensors[parameter], block).copy_(source(tensor, block))


def buckets_of(setup: Setup, stage: int) -> Iterator[list[str]]:
    """The names of the whole tensors of one stage, as its first rank broadcasts them together."""
    shapes = hf_tensors(setup.geometry)
    names: list[str] = []
    for layout in trainer_layouts(setup, stage, 0):
        names += dict.fromkeys(block.tensor for block in layout.blocks)
        if sum(torch.Size(shapes[name]).numel() * DTYPE.itemsize for name in names) >= setup.bucket_bytes:
            yield names
            names = []
    if names:
        yield names


# ---- A checkpoint on disk ------------------------------------------------------------------------------


def write_checkpoint(setup: Setup, rank: int, layouts: list[ShardLayout], tensors: Tensors) -> None:
    if rank == 0:
        shutil.rmtree(setup.directory / CHECKPOINT, ignore_errors=True)
        (setup.directory / "source").mkdir(exist_ok=True)
        (setup.directory / "source" / "config.json").write_text(json.dumps({}))
    dist.barrier()
    write_hf(
        setup.directory / CHECKPOINT, setup.directory / "source", setup.geometry, layouts, tensors, DTYPE
    )


def read_checkpoint(setup: Setup, layouts: tuple[ShardLayout, ...], tensors: Tensors) -> None:
    with safe_open(setup.directory / CHECKPOINT / WEIGHTS, "pt") as file:
        for layout in layouts:
            for block in layout.blocks:
                part = file.get_slice(block.tensor)
                rows = part[block.row : block.row + block.rows]
                columns = rows.view(block.rows, -1)[:, block.col : block.col + block.cols]
                place(tensors[layout.name], block).copy_(columns)


# ---- Both sides ----------------------------------------------------------------------------------------


def start_default_group(port: int, rank: int, size: int) -> None:
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def endpoint(setup: Setup, engine_idx: int) -> EngineEndpoint:
    port = setup.ports[1 + NUM_ENGINES + engine_idx]
    return EngineEndpoint(f"engine{engine_idx}", ENGINE_TP, f"weights{engine_idx}", "127.0.0.1", port)


def link_order(setup: Setup, engine_idx: int) -> LinkOrder:
    where = "link", "127.0.0.1", setup.ports[-1]
    return LinkOrder(1, "relay", *where, engine_idx, NUM_ENGINES, "gloo", TIMEOUT_S)


def broadcast_point(setup: Setup, stage: int) -> EngineEndpoint:
    """Where the first rank of a stage meets all engine ranks."""
    port = setup.ports[1 + 2 * NUM_ENGINES + stage]
    return EngineEndpoint(f"stage{stage}", NUM_ENGINE_RANKS, f"stage{stage}", "127.0.0.1", port)


def all_agree(agreed: bool) -> bool:
    flag = torch.tensor([int(agreed)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def trainer_layouts(setup: Setup, stage: int, tp_rank: int) -> list[ShardLayout]:
    per_stage = setup.geometry.num_layers // PP
    numbers = tuple(range(stage * per_stage + 1, (stage + 1) * per_stage + 1))
    padded = -(-setup.geometry.vocab_size // (128 * TP)) * 128 * TP
    coord = MegatronCoord(TP, tp_rank, numbers, stage == 0, stage == PP - 1, padded)
    return list(megatron_shards(setup.geometry, coord))


def place(parameter: torch.Tensor, block: Block) -> torch.Tensor:
    matrix = parameter.view(matrix_shape(parameter.shape))
    return matrix[
        block.local_row : block.local_row + block.rows, block.local_col : block.local_col + block.cols
    ]


def source(whole: torch.Tensor, block: Block) -> torch.Tensor:
    matrix = whole.view(matrix_shape(whole.shape))
    return matrix[block.row : block.row + block.rows, block.col : block.col + block.cols]


def rectangles(layout: ShardLayout, version: int) -> Iterator[tuple[Block, torch.Tensor]]:
    """What a parameter must hold, a few rows at a time."""
    for block in layout.blocks:
        for first in range(0, block.rows, FILL_ROWS):
            rows = min(FILL_ROWS, block.rows - first)
            top = block.row + first
            part = Block(
                block.tensor, top, block.col, rows, block.cols, block.local_row + first, block.local_col
            )
            columns = slice(block.col, block.col + block.cols)
            yield part, expected(block.tensor, version, slice(top, top + rows), columns)


def fill(layouts: list[ShardLayout], tensors: Tensors, version: int) -> None:
    for layout in layouts:
        tensors[layout.name].zero_()
        for block, values in rectangles(layout, version):
            place(tensors[layout.name], block).copy_(values)


def first_mismatch(layouts: tuple[ShardLayout, ...], tensors: Tensors, version: int) -> str:
    for layout in layouts:
        for block, values in rectangles(layout, version):
            held = place(tensors[layout.name], block)
            if not torch.equal(held.view(torch.int16), values.view(torch.int16)):
                return f"{layout.name} is not version {version} at local row {block.local_row}"
    return ""
