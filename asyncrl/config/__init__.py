"""The configuration: TOML, one typed section per component, dotted overrides on the command line.

    load_config(path, ["train.lr=1e-5", "parallel.tp=2"]) -> Config

A default lives here and nowhere else. Unknown keys, wrong types and combinations that cannot work
are refused when the file is read, by a `ConfigError` whose message names the value, the rule and
the nearest valid choice. Checks that need the model directory or the machine are in
`asyncrl.launch.preflight`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from asyncrl.config.checks import batch_problems, soundness_problems

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(ValueError):
    """The configuration cannot work; the message is one line per problem."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(Section):
    """The Hugging Face directory to train, and the precision to train it in."""

    path: Path  # config.json, *.safetensors, tokenizer.json
    dtype: Literal["float32", "bfloat16"] = "float32"  # of parameters; the optimizer keeps float32


class ParallelConfig(Section):
    """How the trainer is cut; the world size is tp * pp * cp * dp."""

    tp: Positive = 1  # tensor parallel: cuts every layer
    pp: Positive = 1  # pipeline parallel: cuts between layers
    vpp: Positive = 1  # virtual pipeline stages per pipeline rank
    cp: Positive = 1  # context parallel: cuts every sample
    dp: Positive = 1  # data parallel: replicas, each with a ring of its own
    sequence_parallel: bool = False  # also cut norms and dropout by tp
    distributed_optimizer: bool = True  # optimizer states cut over dp x cp

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} needs pp > 1; set vpp = 1 or pp = 2")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1; set it to false or tp = 2")
        return self


class TrainConfig(Section):
    """Batch arithmetic and the optimizer (AdamW)."""

    steps: Positive = 20  # optimizer updates, one per batch and policy version
    prompts_per_step: Positive = 16  # sample groups in a batch, over all replicas
    samples_per_prompt: Positive = 4  # size of a sample group
    microbatch_tokens: Positive = 2048  # token budget of one packed micro-batch, per CP group
    lr: PositiveFloat = 1e-6  # after the warm-up
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # the others fall to 0 at train.steps
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_grad: PositiveFloat = 1.0  # largest norm of the whole gradient
    warmup_steps: NonNegative = 0  # steps over which lr rises linearly from 0
    seed: int = 0
    batch_timeout_s: PositiveFloat = 600.0  # longest wait for a batch before the run fails

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt


class AlgorithmConfig(Section):
    """Advantage, objective, behaviour correction, aggregation."""

    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"  # from the rewards of a sample's group
    objective: Literal["ppo_clip", "gspo", "cispo", "sapo"] = "ppo_clip"
    clip_low: PositiveFloat = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: PositiveFloat = 0.2
    clip_dual: Annotated[float, Field(gt=1)] | None = None  # bound on -loss / advantage where it is < 0
    sapo_tau_positive: PositiveFloat = 1.0  # how fast SAPO's gate closes, by the advantage's sign
    sapo_tau_negative: PositiveFloat = 1.05
    # decoupled: ratio to the trainer's proximal logprobs, times min(prox/behav, cap) of the token or the
    # whole sample; none: ratio to the behaviour logprobs, sound on-policy only
    correction: Literal["truncated_is", "sequence_truncated_is", "none"] = "truncated_is"
    is_cap: PositiveFloat = 2.0  # largest importance weight
    # left out: tokens, or samples by geometric mean, with prox/behav out of bounds; or those samples of
    # negative advantage whose mean log(behav/current) exceeds reject_kl
    rejection: Literal["none", "token", "geometric", "off_policy_sequence"] = "none"
    reject_low: PositiveFloat = 0.5
    reject_high: PositiveFloat = 5.0
    reject_kl: PositiveFloat = 0.1
    # what counts the same: tokens; samples; or tokens over a fixed length (rollout.max_new_tokens)
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        if self.reject_low >= self.reject_high:
            raise ValueError(f"reject_low = {self.reject_low} is not below reject_high = {self.reject_high}")
        if self.clip_dual is not None and self.clip_dual <= 1 + self.clip_high:
            raise ValueError(f"clip_dual = {self.clip_dual} is inside the clip range; use for example 3.0")
        return self


class RolloutConfig(Section):
    """What is sampled, and how far behind the trainer it may be."""

    max_new_tokens: Positive = 256  # longest completion; longer ones are cut and still trained on
    max_prompt_tokens: Positive = 1024  # longer prompts are skipped
    temperature: PositiveFloat = 1.0  # of sampling, and of every logprob in the loss
    max_staleness: NonNegative = 1  # versions between a sample's oldest token and the trainer
    # running samples at a publication: abort ends them with what they have, to go on from there; retract
    # keeps them in the engine, to compute their keys and values anew; drain lets them end first; in_place
    # keeps them with the keys and values of the old weights, which costs nothing and needs a correction and
    # engine.extra_args = ["--disable-radix-cache"]
    interrupt: Literal["abort", "retract", "in_place", "drain"] = "abort"
    request_timeout_s: PositiveFloat = 300.0  # longest wait for one answer of an engine
    seed: int = 0


class EngineConfig(Section):
    """The SGLang engines."""

    replicas: Positive = 1  # engines, each with all of the weights
    tp: Positive = 1  # ranks of one engine
    dtype: Literal["float32", "bfloat16"] | None = None  # None: the model's
    context_length: Positive = 2048  # longest prompt + completion
    max_total_tokens: Positive | None = None  # KV cache size; None: SGLang decides (8192 on CPU)
    max_running_requests: Positive = 64  # samples that one engine generates at a time
    port: NonNegative = 0  # of the first engine, the next ones follow; 0: any free port
    start_timeout_s: PositiveFloat = 300.0  # longest wait for an engine to serve
    max_restarts: NonNegative = 2  # of each of several replicas; with one replica its death ends the run
    extra_args: tuple[str, ...] = ()  # handed to SGLang's launcher as they are


class DataConfig(Section):
    """Where prompts come from: a reasoning-gym task, or rows of a JSONL or parquet file."""

    reasoning_gym: str | None = None  # task name, for example "basic_arithmetic"
    task_args: dict[str, Any] = {}  # handed to reasoning_gym.create_dataset
    path: Path | None = None  # .jsonl or .parquet, or a Hugging Face dataset folder
    prompt_key: str = "prompt"  # column with text or chat messages
    answer_key: str = "answer"  # column handed to the reward as the truth
    system_prompt: str | None = None  # put before conversations that have none
    prompt_suffix: str = ""  # appended to the user message
    seed: int = 0  # of the order of rows, or of the tasks

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if (self.reasoning_gym is None) == (self.path is None):
            raise ValueError("name exactly one source of prompts: data.reasoning_gym or data.path")
        return self


class RewardConfig(Section):
    """`reasoning_gym`, `last_number`, `exact_match`, or FILE.py:FUNCTION."""

    function: str = "last_number"
    timeout_s: PositiveFloat = 10.0  # a call that takes longer is killed and counts as an error
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.05  # a larger share of errors stops the run


class EvalConfig(Section):
    """Greedy accuracy on held-out tasks, before and after training."""

    num_tasks: NonNegative = 0  # 0: no evaluation
    seed_offset: int = 1_000_003  # held-out tasks use data.seed + seed_offset
    path: Path | None = None  # held-out rows where data.path is used
    every: NonNegative = 0  # also after every k steps


class WeightsConfig(Section):
    """How a new policy version reaches the engines."""

    bucket_mib: PositiveFloat = 32.0  # size of a staging buffer; each side has two
    timeout_s: PositiveFloat = 120.0  # longest wait for a publication
    # how engines of one plan get a version: p2p, each from the trainer; relay and broadcast, every byte from
    # the trainer once, and from replica to replica in stripes or chunks; auto: the cheapest by the cost model
    strategy: Literal["auto", "p2p", "relay", "broadcast"] = "auto"
    link_gb_s: PositiveFloat = (
        50.0  # for the cost model: 1e9 bytes a second that a rank's link moves each way
    )
    link_latency_us: PositiveFloat = 150.0  # for the cost model: before the first byte of a message
    # send what changed since the version that an engine holds, where that is less, exact to the bit: for thin
    # links and weights in bfloat16; each trainer rank keeps a second copy of its parameters
    delta: bool = False
    # receive a version beside the weights that an engine serves: requests wait for a local copy alone; costs
    # each engine rank room for a second copy, on its device or in pinned memory of its host
    stage: Literal["none", "device", "host"] = "none"
    # train on while a version is sent, from a copy of the parameters: for trainers with room for it
    overlap: bool = False
    # after every publication, record the engine's parameter checksums and compare logprobs of
    # fixed prompts between engine and trainer (slow: for tests and new models)
    verify: bool = False


class RingConfig(Section):
    """The shared-memory ring of samples, one per data-parallel replica."""

    directory: Path = Path("/dev/shm")  # must be in memory
    arena_mib: PositiveFloat = 64.0  # bytes of samples in one ring
    num_slots: Positive = 4096  # samples in one ring at most


class CheckpointConfig(Section):
    """When the trainer's state becomes durable."""

    every: NonNegative = 10  # steps; 0: only at the end
    keep: Positive = 2  # newest checkpoints that stay
    resume: str = "never"  # auto | never | path of a run or checkpoint directory
    export_hf: bool = True  # a Hugging Face folder beside each checkpoint


class ControlConfig(Section):
    """The coordinator's control port."""

    host: str = "127.0.0.1"  # where the coordinator listens
    port: NonNegative = 0  # 0: any free port
    heartbeat_timeout_s: PositiveFloat = 120.0  # silence after which a process counts as dead


class ObserveConfig(Section):
    display: Literal["auto", "live", "plain"] = "auto"  # auto: live on a terminal, else a line per step
    tensorboard: bool = True  # write tensorboard/ in the run directory
    rollouts: bool = True  # write rollouts/step_N.jsonl


class Config(Section):
    name: str = "run"  # of the run directory
    runs_dir: Path = Path("runs")  # where run directories are made
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    ring: RingConfig = RingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    control: ControlConfig = ControlConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def engine_dtype(self) -> str:
        return self.engine.dtype or self.model.dtype

    @model_validator(mode="after")
    def _check(self) -> Config:
        problems = [*batch_problems(self), *soundness_problems(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply ``section.key=value`` overrides (values in TOML syntax, or bare strings).

    Raises:
        ConfigError: the file is missing, is not TOML, or the configuration cannot work.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        _apply(tree, override)
    return parse_config(tree)


def parse_config(tree: dict[str, Any]) -> Config:
    """Validate a nested dictionary as a `Config`, or raise `ConfigError`."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, leaf = key.strip().split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {section} is a value, not a section")
    tree[leaf] = value


def _explain(item: Any) -> str:
    where = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key{_suggestion(item['loc'])}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where} = {item['input']!r}: {message}" if item["type"] != "missing" else f"{where}: missing"


def _suggestion(location: tuple[Any, ...]) -> str:
    import difflib

    fields: Any = Config.model_fields
    for part in location[:-1]:
        fields = fields[part].annotation.model_fields
    close = difflib.get_close_matches(str(location[-1]), list(fields), n=1)
    return f"; did you mean {close[0]}?" if close else f"; known keys: {', '.join(fields)}"
