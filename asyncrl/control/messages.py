"""What the coordinator, the trainer, the rollouter, the engines' owners and the launcher tell each other.

JSON over HTTP; every message is one frozen model, validated on arrival. Requests carry what changed, the
answer to a poll is the whole `RunState`, with a revision that grows with every change.
"""

from __future__ import annotations

import enum
from typing import Literal

from pydantic import BaseModel, ConfigDict

from asyncrl.control.ledger import LedgerCounts
from asyncrl.engines.base import LinkStrategy, StagePlace, WeightGroup


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Phase(enum.StrEnum):
    """What the run as a whole is doing."""

    STARTING = "starting"  # engines and trainer come up, the first publication
    TRAINING = "training"
    FINISHING = "finishing"  # the trainer has done its last step; held-out evaluation
    FINISHED = "finished"


class EngineStatus(enum.StrEnum):
    """Where one engine stands in the publication protocol (`asyncrl.control.protocol`)."""

    JOINING = "joining"  # up, without a version of the trainer's
    SERVING = "serving"  # verified and answering
    PREPARED = "prepared"  # out of service for a version that is on its way
    QUARANTINED = "quarantined"  # its weights may be partly new; it gets no traffic until it is refilled
    LOST = "lost"  # its process is gone, or fails whatever it is given


class EngineInfo(Message):
    name: str
    url: str
    api_key: str
    tp: int
    incarnation: int = 0  # how often the engine was started before
    status: EngineStatus = EngineStatus.JOINING
    policy_version: int = -1  # that its weights are known to hold whole
    joined: bool = False  # in a weight group with the trainer, and agreed on a plan
    reason: str = ""  # why it is quarantined or lost


class EngineLost(Message):
    """The process of one start of an engine is gone."""

    name: str
    incarnation: int
    reason: str


class ProcessInfo(Message):
    """A process whose death ends the run, or the engine to which it belongs."""

    name: str
    pid: int
    log: str | None = None
    engine: str = ""
    incarnation: int = 0  # of that engine


class RolloutReport(Message):
    """The rollouter's counters, sent about once a second."""

    counts: LedgerCounts = LedgerCounts()
    tokens_generated: int = 0
    engine_busy_s: float = 0.0  # summed over engines, since the rollouter started
    num_engines: int = 0
    reward_errors: int = 0
    next_prompt_idx: int = 0
    released_batches: int = 0


class TrainerStart(Message):
    """The trainer has its model and its rings and wants to publish."""

    step: int
    policy_version: int
    rings: tuple[str, ...]  # ring directories, one per DP replica


class StepDone(Message):
    """Batch ``batch_idx`` was trained on; the trainer's policy version is now ``batch_idx + 1``."""

    batch_idx: int


class CheckpointDone(Message):
    """The first ``step`` steps are durable; no kept checkpoint is older than ``oldest_step``."""

    step: int
    oldest_step: int


class JoinOrder(Message):
    """Let an engine meet the trainer's ranks in a new weight group."""

    engine: str
    group: WeightGroup


class LinkOrder(Message):
    """Let engines of one plan pass buckets on to each other, as the link's replicas in this order."""

    engines: tuple[str, ...]
    name: str
    number: int
    strategy: LinkStrategy
    host: str  # of the store that hears who has joined
    port: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


class Plan(Message):
    """On what trainer and engine agreed when they met: who sends what, and what the engine holds."""

    plan_hash: str
    manifest_hash: str  # of name, shape and dtype of every parameter of every rank

    def __str__(self) -> str:
        return f"plan {self.plan_hash[:12]} for manifest {self.manifest_hash[:12]}"


class Joined(Message):
    """The trainer's side of a meeting: the plan, or why there is none."""

    engine: str
    plan: Plan | None = None
    failure: str = ""


class Publication(Message):
    """One version for the engines of ``plans``, of the membership that the trainer knows."""

    version: int
    epoch: int
    plans: dict[str, Plan]


class StageOrder(Publication):
    """Let engines receive a version beside the weights that they serve."""

    place: StagePlace


class Landing(Message):
    """The trainer's leader has sent a staged version; ``failures`` are the engines that did not verify it."""

    version: int
    failures: dict[str, str] = {}


class EngineFailed(Message):
    """An engine has lost its weight group, or the trust in its weights."""

    name: str
    reason: str


class FlightName(Message):
    """Which publication a TRANSFER, COMMIT or ABORT is about."""

    version: int
    epoch: int


class CommitOrder(FlightName):
    """All trainer ranks have sent; ``failures`` are the engines to which one of them could not."""

    failures: dict[str, str] = {}


class EngineVerification(Message):
    """What one engine holds after a publication, for comparison with another source of the same weights."""

    checksums: tuple[dict[str, str], ...]  # one per TP rank: parameter name -> checksum
    logprobs: tuple[tuple[float, ...], ...]  # of the fixed prompts


class PublicationResult(Message):
    version: int
    committed: tuple[str, ...]
    failed: dict[str, str]  # engine -> reason
    paused_s: dict[str, float]  # engine that served before -> how long it answered nobody
    verification: dict[str, EngineVerification] = {}


class HeldOut(Message):
    """Greedy accuracy on the held-out tasks under one policy version."""

    label: str  # "before", "after", or "step N"
    policy_version: int
    accuracy: float
    num_tasks: int
    seconds: float


class RunState(Message):
    revision: int = 0
    phase: Phase = Phase.STARTING
    stop_requested: bool = False
    policy_version: int = -1  # last committed
    epoch: int = 0  # grows with every change of the engines' membership
    start_step: int = -1  # -1 until the trainer has started; > 0 after a resume
    batches_trained: int = 0
    checkpoint_step: int = -1
    oldest_checkpoint_step: int = -1
    publications: int = 0  # committed in this attempt
    draining: bool = False  # the rollouter must let running samples finish and start none
    rings: tuple[str, ...] = ()
    engines: tuple[EngineInfo, ...] = ()
    processes: tuple[ProcessInfo, ...] = ()
    rollout: RolloutReport = RolloutReport()
    held_out: tuple[HeldOut, ...] = ()
    failure: str = ""

    def engine(self, name: str) -> EngineInfo:
        for engine in self.engines:
            if engine.name == name:
                return engine
        raise KeyError(f"no engine named {name}; there are {[e.name for e in self.engines]}")
