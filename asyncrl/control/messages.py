"""What the coordinator, the trainer, the rollouter, the engines' owners and the launcher tell each other.

JSON over HTTP; every message is one frozen model, validated on arrival. Requests carry what changed, the
answer to a poll is the whole `RunState`, with a revision that grows with every change.
"""

from __future__ import annotations

import enum

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Phase(enum.StrEnum):
    """What the run as a whole is doing."""

    STARTING = "starting"  # engines and trainer come up, the first publication
    TRAINING = "training"
    FINISHING = "finishing"  # the trainer has done its last step; held-out evaluation
    FINISHED = "finished"


class EngineStatus(enum.StrEnum):
    """Where one engine stands in the publication protocol."""

    JOINING = "joining"  # registered, not yet in a weight group
    SERVING = "serving"  # verified and answering
    PAUSED = "paused"  # prepared for a publication, or receiving it
    QUARANTINED = "quarantined"  # its weights may be partly new; it gets no traffic


class EngineInfo(Message):
    name: str
    url: str
    api_key: str
    tp: int
    status: EngineStatus = EngineStatus.JOINING
    policy_version: int = -1
    reason: str = ""  # why it is quarantined


class ProcessInfo(Message):
    """A process whose death ends the run."""

    name: str
    pid: int
    log: str | None = None


class RolloutReport(Message):
    """The rollouter's counters, sent about once a second."""

    issued: int = 0
    pending: int = 0
    running: int = 0
    interrupted: int = 0
    rewarded: int = 0
    in_ring: int = 0
    consumed: int = 0
    acknowledged: int = 0
    dropped: dict[str, int] = {}  # by reason
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


class WeightGroup(Message):
    """Where an engine meets the trainer's ranks: a TCP store at the trainer's rank 0."""

    engine: str
    master_address: str
    master_port: int
    rank_offset: int  # number of trainer ranks; engine rank r joins as rank_offset + r
    world_size: int
    group_name: str
    backend: str


class Publication(Message):
    """One version for the named engines; the plan hash per engine must match the receiver's."""

    version: int
    plan_hashes: dict[str, str]


class EngineVerification(Message):
    """What one engine holds after a publication, for comparison with another source of the same weights."""

    checksums: tuple[dict[str, str], ...]  # one per TP rank: parameter name -> checksum
    logprobs: tuple[tuple[float, ...], ...]  # of the fixed prompts


class PublicationResult(Message):
    version: int
    committed: tuple[str, ...]
    failed: dict[str, str]  # engine -> reason
    paused_s: dict[str, float]  # engine -> how long it answered nobody
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
