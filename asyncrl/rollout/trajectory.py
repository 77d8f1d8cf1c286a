"""One sample as it grows: a pure state machine over segments; all I/O is the caller's.

    READY --Submit--> GENERATING --Generated--> READY       interrupted: goes on from its prefix
      ^                   |   \\--Lost--> READY              the engine failed, nothing came back
      |                   +--Generated--> FINISHED          stop token, length, or last turn
      +----Observed---- OBSERVING <--Generated              a turn ended, the environment answers

Invariants:

* replaying the durable events (`Generated`, `Observed`) rebuilds the state exactly; `Submit` and `Lost`
  leave no trace in it, so a trajectory whose owner died is READY at its last saved token;
* the model tokens of a trajectory never exceed ``max_new_tokens``, whatever the number of interruptions;
* the prefix that is sent is the prompt and every saved token, in order; so any schedule of interruptions
  gives the tokens of an uninterrupted run when the sampler is a function of the prefix.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from asyncrl.engines.base import INTERRUPTED, Finish
from asyncrl.types import NO_VERSION, FinishReason, PolicyVersion, Segment, SegmentKind


class Phase(enum.StrEnum):
    """What the trajectory waits for."""

    READY = "ready"
    GENERATING = "generating"
    OBSERVING = "observing"
    FINISHED = "finished"


class TrajectoryError(RuntimeError):
    """An event that cannot happen in this state: an engine or a caller broke the contract."""


@dataclass(frozen=True, slots=True)
class TrajectorySpec:
    """What is fixed when a sample is issued.

    ``max_new_tokens`` is the budget of model tokens over all turns; ``max_turns`` is 1 without tools.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    max_turns: int = 1


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The state; ``turn`` counts the finished model turns."""

    spec: TrajectorySpec
    segments: tuple[Segment, ...] = ()
    phase: Phase = Phase.READY
    turn: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_model_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if s.kind is SegmentKind.MODEL)

    @property
    def remaining_tokens(self) -> int:
        """The budget that is left: the limit less the model tokens of the whole trajectory."""
        return self.spec.max_new_tokens - self.num_model_tokens

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        """Every token after the prompt."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def prefix(self) -> tuple[int, ...]:
        """What an engine continues: the prompt and every saved token."""
        return self.spec.prompt_ids + self.new_token_ids

    @property
    def finished(self) -> bool:
        return self.phase is Phase.FINISHED

    @property
    def version_spans(self) -> tuple[tuple[PolicyVersion, int], ...]:
        """(policy version, number of tokens) of each run of model tokens of one version."""
        return merge_spans((s.policy_version, len(s.token_ids)) for s in self.segments)


def merge_spans(spans: Iterable[tuple[PolicyVersion, int]]) -> tuple[tuple[PolicyVersion, int], ...]:
    """Join neighbours of one version and leave out tokens that no policy sampled."""
    merged: list[tuple[PolicyVersion, int]] = []
    for version, count in spans:
        if version == NO_VERSION:
            continue
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + count)
        else:
            merged.append((version, count))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Submit:
    """The trajectory is handed to an engine."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The engine failed; whatever it sampled in this attempt is unknown and does not count."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The engine answered: model segments, none for no tokens, and why it ended."""

    segments: tuple[Segment, ...]
    finish: Finish


@dataclass(frozen=True, slots=True)
class Observed:
    """The environment answered a turn with tool and template segments; ``done`` ends the trajectory."""

    segments: tuple[Segment, ...]
    done: bool = False


Event = Submit | Lost | Generated | Observed
DurableEvent = Generated | Observed


@dataclass(frozen=True, slots=True)
class Generate:
    """Ask an engine to continue ``token_ids`` by at most ``max_new_tokens``."""

    token_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Save:
    """Make ``event`` durable before anything else is done for this trajectory."""

    event: DurableEvent


@dataclass(frozen=True, slots=True)
class Observe:
    """Ask the environment to answer turn ``turn``, whose tokens may be many segments."""

    turn: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The trajectory can be rewarded."""

    reason: FinishReason


Action = Generate | Save | Observe | Finished


def step(state: Trajectory, event: Event) -> tuple[Trajectory, tuple[Action, ...]]:
    """The next state and what the caller has to do, in order.

    Raises:
        TrajectoryError: the event does not belong to the state, or breaks the budget or the kinds.
    """
    match event:
        case Submit():
            _expect(state, Phase.READY, event)
            return (
                replace(state, phase=Phase.GENERATING),
                (Generate(state.prefix, state.remaining_tokens),),
            )
        case Lost():
            _expect(state, Phase.GENERATING, event)
            return replace(state, phase=Phase.READY), ()
        case Generated():
            _expect(state, Phase.GENERATING, event)
            return _generated(state, event)
        case Observed():
            _expect(state, Phase.OBSERVING, event)
            return _observed(state, event)


def replay(spec: TrajectorySpec, events: Iterable[DurableEvent]) -> Trajectory:
    """The state after ``events``; of an unfinished trajectory: ready to go on, or its turn unanswered."""
    state = Trajectory(spec)
    for event in events:
        if isinstance(event, Generated):
            state, _ = step(state, Submit())
        state, _ = step(state, event)
    return state


def _generated(state: Trajectory, event: Generated) -> tuple[Trajectory, tuple[Action, ...]]:
    if any(segment.kind is not SegmentKind.MODEL for segment in event.segments):
        raise TrajectoryError("an engine returned a segment that is not the model's")
    grown = replace(state, segments=state.segments + event.segments)
    if grown.remaining_tokens < 0:
        raise TrajectoryError(
            f"an engine sampled {grown.num_model_tokens} tokens of a budget of {state.spec.max_new_tokens}"
        )
    save: tuple[Action, ...] = (Save(event),)
    reason = _turn_end(grown, event.finish)
    if reason is None:
        return replace(grown, phase=Phase.READY), save if event.segments else ()
    turn = state.turn + 1
    if reason is FinishReason.STOP and turn < state.spec.max_turns:
        return replace(grown, phase=Phase.OBSERVING, turn=turn), (*save, Observe(turn))
    return _finish(replace(grown, turn=turn), reason, save)


def _turn_end(grown: Trajectory, finish: Finish) -> FinishReason | None:
    """Why the turn is over, or None when it goes on.

    An interruption can come between the last token and the engine's own notice of the end; going on
    would then sample past a stop token or past the budget.
    """
    if finish != INTERRUPTED:
        return FinishReason(finish)
    last = grown.segments[-1] if grown.segments else None
    if last and last.kind is SegmentKind.MODEL and last.token_ids[-1] in grown.spec.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if grown.remaining_tokens == 0 else None


def _observed(state: Trajectory, event: Observed) -> tuple[Trajectory, tuple[Action, ...]]:
    if any(segment.kind is SegmentKind.MODEL for segment in event.segments):
        raise TrajectoryError("the environment returned a model segment")
    save: tuple[Action, ...] = (Save(event),)
    grown = replace(state, segments=state.segments + event.segments)
    if event.done:
        return _finish(grown, FinishReason.STOP, save)
    if grown.remaining_tokens == 0:
        return _finish(grown, FinishReason.LENGTH, save)
    return replace(grown, phase=Phase.READY), save


def _finish(
    state: Trajectory, reason: FinishReason, save: tuple[Action, ...]
) -> tuple[Trajectory, tuple[Action, ...]]:
    finished = replace(state, phase=Phase.FINISHED, finish_reason=reason)
    return finished, (*save, Finished(reason))


def _expect(state: Trajectory, phase: Phase, event: Event) -> None:
    if state.phase is not phase:
        raise TrajectoryError(f"{type(event).__name__} came while {state.phase}; it belongs to {phase}")
