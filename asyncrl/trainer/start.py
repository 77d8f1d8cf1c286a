"""One rank from its configuration to the end of training.

process groups -> model from the Hugging Face directory -> checkpoint, if any -> ring of this replica
               -> publisher -> TrainingLoop.run
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.algo.learning_rate import LrSchedule
from asyncrl.config import Config
from asyncrl.control.client import ControlAddress, ControlClient
from asyncrl.control.messages import ProcessInfo
from asyncrl.observe.events import EventLog
from asyncrl.observe.metrics import MetricsWriter
from asyncrl.ring.ring import Ring
from asyncrl.trainer.checkpoints import Checkpoints
from asyncrl.trainer.loop import TrainingLoop
from asyncrl.trainer.publication import PolicyPublisher
from asyncrl.trainer.record import StepRecorder
from asyncrl.trainer.verify import Verifier
from asyncrl.weights.cost import Links, Strategy, cheapest_strategy
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.plan import TransferPlan
from asyncrl.weights.probe import probe_prompts
from asyncrl.weights.publisher import Publisher
from megatron_ext.optimizer import OptimizerSettings
from megatron_ext.parallel import ParallelLayout, RankInfo, initialize, shutdown
from megatron_ext.policy import MegatronPolicy

MIB = 1 << 20
RING_DIR_VARIABLE = "ASYNCRL_RING_DIR"
LOG_DIR_VARIABLE = "ASYNCRL_LOG_DIR"
VERIFY_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # nats


def run_rank(config: Config) -> None:
    """Train as one of the ranks that torchrun or srun started."""
    control = ControlClient(ControlAddress.from_environment())
    _register(control)
    layout = ParallelLayout(**config.parallel.model_dump())
    rank = initialize(layout, config.train.seed, timeout_s=config.train.batch_timeout_s)
    geometry = ModelGeometry.from_hf(config.model.path)
    policy = MegatronPolicy.build(
        config.model.path, geometry, layout, getattr(torch, config.model.dtype), _optimizer(config)
    )
    checkpoints = Checkpoints(config)
    first_step = checkpoints.restore(policy)
    leader = control if rank.rank == 0 else None
    ring_paths = _ring_paths(config)
    ring = _open_ring(config, ring_paths[rank.dp_rank], rank)
    publisher = Publisher(
        rank.rank,
        rank.world_size,
        policy.layouts(),
        policy.tensors(),
        geometry,
        # Engines are sent to side by side, so that their staging buffers share the room of two.
        int(config.weights.bucket_mib * MIB) // config.engine.replicas,
        config.weights.timeout_s,
        delta=config.weights.delta,
        choose=_strategy(config),
    )
    loop = TrainingLoop(
        config,
        rank,
        policy,
        ring,
        PolicyPublisher(publisher, leader, config),
        checkpoints,
        _verifier(config, policy, rank) if config.weights.verify else None,
        leader,
        _recorder(config) if leader else None,
    )
    loop.run(first_step, tuple(str(path) for path in ring_paths))
    ring.detach()
    shutdown()


def _strategy(config: Config) -> Callable[[TransferPlan], Strategy]:
    """How engines are to be sent to, once the plan of one is known."""
    weights, replicas = config.weights, config.engine.replicas
    if weights.strategy != "auto":
        fixed = weights.strategy
        return lambda plan: fixed
    links = Links(weights.link_gb_s * 1e9, weights.link_latency_us * 1e-6)
    return lambda plan: cheapest_strategy(plan, replicas, links)


def _register(control: ControlClient) -> None:
    """Let the launcher watch this rank."""
    global_rank = os.environ["RANK"]
    log = None
    if LOG_DIR_VARIABLE in os.environ:
        log = str(Path(os.environ[LOG_DIR_VARIABLE]) / f"trainer-rank{global_rank}.log")
    control.post("processes", ProcessInfo(name=f"trainer rank {global_rank}", pid=os.getpid(), log=log))


def _optimizer(config: Config) -> OptimizerSettings:
    train = config.train
    return OptimizerSettings(
        schedule=LrSchedule(train.lr, train.lr_schedule, train.warmup_steps, train.steps),
        beta1=train.beta1,
        beta2=train.beta2,
        weight_decay=train.weight_decay,
        clip_grad=train.clip_grad,
    )


def _ring_paths(config: Config) -> list[Path]:
    directory = Path(os.environ[RING_DIR_VARIABLE])
    return [directory / f"replica-{dp_rank}" for dp_rank in range(config.parallel.dp)]


def _open_ring(config: Config, path: Path, rank: RankInfo) -> Ring:
    """The leader of each replica creates the replica's ring; the other ranks open it."""
    if rank.is_replica_leader:
        path.parent.mkdir(parents=True, exist_ok=True)
        Ring.create(
            path, arena_bytes=int(config.ring.arena_mib * MIB), num_slots=config.ring.num_slots
        ).detach()
    dist.barrier()
    return Ring.open(path, role="reader", name=f"trainer-rank{rank.rank}")


def _verifier(config: Config, policy: MegatronPolicy, rank: RankInfo) -> Verifier:
    return Verifier(
        policy,
        probe_prompts(policy.geometry.vocab_size),
        VERIFY_TOLERANCE[config.model.dtype],
        config,
        EventLog(config.run_dir) if rank.rank == 0 else None,
    )


def _recorder(config: Config) -> StepRecorder:
    writer = MetricsWriter(config.run_dir, tensorboard=config.observe.tensorboard)
    return StepRecorder(writer, EventLog(config.run_dir))
