"""The trajectory state machine: cuts, budget, turns, replay."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engines.base import INTERRUPTED, Finish
from asyncrl.rollout.codec import decode_event, encode_event
from asyncrl.rollout.records import JournalError
from asyncrl.rollout.trajectory import (
    DurableEvent,
    Event,
    Finished,
    Generate,
    Generated,
    Lost,
    Observe,
    Observed,
    Phase,
    Save,
    Submit,
    Trajectory,
    TrajectoryError,
    TrajectorySpec,
    merge_spans,
    replay,
    step,
)
from asyncrl.types import FinishReason, Segment, SegmentKind

EOS = 2
SPEC = TrajectorySpec(prompt_ids=(11, 12), max_new_tokens=6, stop_token_ids=(EOS,))


def model(*token_ids: int, version: int = 0) -> Segment:
    return Segment(SegmentKind.MODEL, token_ids, tuple(-0.1 * t for t in token_ids), version)


def tool(*token_ids: int) -> Segment:
    return Segment(SegmentKind.TOOL, token_ids)


def template(*token_ids: int) -> Segment:
    return Segment(SegmentKind.TEMPLATE, token_ids)


def run(state: Trajectory, *events: Event) -> Trajectory:
    for event in events:
        state, _ = step(state, event)
    return state


def generated(*token_ids: int, finish: Finish = INTERRUPTED, version: int = 0) -> Generated:
    return Generated((model(*token_ids, version=version),) if token_ids else (), finish)


def test_an_interruption_continues_from_the_prefix_with_what_is_left() -> None:
    state = run(Trajectory(SPEC), Submit(), generated(5, 6, version=3))
    state, actions = step(state, Submit())
    assert actions == (Generate((11, 12, 5, 6), 4),)
    state, actions = step(state, generated(7, EOS, finish=FinishReason.STOP, version=4))
    assert actions[-1] == Finished(FinishReason.STOP)
    assert state.new_token_ids == (5, 6, 7, EOS)
    assert state.version_spans == ((3, 2), (4, 2))


def test_an_interruption_without_tokens_changes_nothing_and_saves_nothing() -> None:
    before = run(Trajectory(SPEC), Submit(), generated(5))
    state, actions = step(run(before, Submit()), generated())
    assert state == before
    assert actions == ()


def test_a_lost_request_changes_nothing() -> None:
    before = run(Trajectory(SPEC), Submit(), generated(5))
    assert run(before, Submit(), Lost()) == before


@pytest.mark.parametrize(
    ("tokens", "reason"), [((5, EOS), FinishReason.STOP), ((5, 6, 7, 8, 9, 10), FinishReason.LENGTH)]
)
def test_an_interruption_right_at_the_end_is_the_end(tokens: tuple[int, ...], reason: FinishReason) -> None:
    state, actions = step(run(Trajectory(SPEC), Submit()), generated(*tokens))
    assert state.finished and state.finish_reason is reason
    assert actions == (Save(generated(*tokens)), Finished(reason))


def test_saving_comes_before_everything_else() -> None:
    _, actions = step(run(Trajectory(SPEC), Submit()), generated(5, EOS, finish=FinishReason.STOP))
    assert [type(action) for action in actions] == [Save, Finished]


def test_too_many_tokens_are_the_engines_fault() -> None:
    with pytest.raises(TrajectoryError, match="sampled 7 tokens of a budget of 6"):
        run(Trajectory(SPEC), Submit(), generated(1, 3, 4, 5, 6, 7, 8))


def test_kinds_belong_to_their_source() -> None:
    with pytest.raises(TrajectoryError, match="not the model's"):
        run(Trajectory(SPEC), Submit(), Generated((tool(1),), FinishReason.STOP))
    turns = TrajectorySpec((1,), 9, (EOS,), max_turns=2)
    with pytest.raises(TrajectoryError, match="returned a model segment"):
        run(Trajectory(turns), Submit(), generated(5, finish=FinishReason.STOP), Observed((model(5),)))


@pytest.mark.parametrize("event", [Lost(), generated(5), Observed((tool(5),))])
def test_an_event_out_of_place_is_refused(event: Event) -> None:
    with pytest.raises(TrajectoryError, match=f"{type(event).__name__} came while ready"):
        step(Trajectory(SPEC), event)


def test_turns_observe_tools_and_share_one_budget() -> None:
    spec = TrajectorySpec((1,), max_new_tokens=5, stop_token_ids=(EOS,), max_turns=3)
    state = run(Trajectory(spec), Submit(), generated(5))
    state, actions = step(run(state, Submit()), generated(6, EOS, finish=FinishReason.STOP))
    assert actions[-1] == Observe(1) and state.phase is Phase.OBSERVING
    state, actions = step(state, Observed((template(90), tool(70, 71), template(91))))
    assert state.phase is Phase.READY
    state, (request,) = step(state, Submit())
    assert request == Generate((1, 5, 6, EOS, 90, 70, 71, 91), 2), "tool tokens do not cost budget"
    state, actions = step(state, generated(8, 9))
    assert actions[-1] == Finished(FinishReason.LENGTH)
    assert state.version_spans == ((0, 5),)


def test_the_environment_can_end_a_trajectory() -> None:
    spec = TrajectorySpec((1,), 5, (EOS,), max_turns=3)
    state = run(Trajectory(spec), Submit(), generated(EOS, finish=FinishReason.STOP))
    state, actions = step(state, Observed((tool(7),), done=True))
    assert state.finished and actions == (Save(Observed((tool(7),), done=True)), Finished(FinishReason.STOP))


def test_the_last_turn_ends_without_the_environment() -> None:
    spec = TrajectorySpec((1,), 9, (EOS,), max_turns=2)
    stop = generated(5, EOS, finish=FinishReason.STOP)
    assert run(Trajectory(spec), Submit(), stop, Observed((tool(7),)), Submit(), stop).finished


def test_merged_spans_join_neighbours_and_skip_other_kinds() -> None:
    assert merge_spans([(1, 2), (1, 3), (-1, 9), (1, 1), (2, 4)]) == ((1, 6), (2, 4))


# --- properties ---

TOKENS = st.integers(3, 60)


@st.composite
def histories(draw: st.DrawFn) -> tuple[TrajectorySpec, list[Event]]:
    """A walk through the state machine with cuts, losses and turns, ending anywhere."""
    spec = TrajectorySpec((1, 9), draw(st.integers(1, 12)), (EOS,), draw(st.integers(1, 3)))
    state, events = Trajectory(spec), []
    for _ in range(draw(st.integers(0, 14))):
        if state.finished:
            break
        event: Event
        if state.phase is Phase.READY:
            event = Submit()
        elif state.phase is Phase.OBSERVING:
            event = Observed((tool(*draw(st.lists(TOKENS, min_size=1, max_size=3))),), draw(st.booleans()))
        else:
            event = draw(st.just(Lost()) | generations(state.remaining_tokens))
        state, _ = step(state, event)
        events.append(event)
    return spec, events


def generations(budget: int) -> st.SearchStrategy[Generated]:
    tokens = st.lists(TOKENS, max_size=budget)
    version = st.integers(0, 3)
    cut = st.builds(lambda t, v: generated(*t, version=v), tokens, version)
    stop = st.builds(
        lambda t, v: generated(*t[: budget - 1], EOS, finish=FinishReason.STOP, version=v), tokens, version
    )
    return cut | stop


@given(histories())
@settings(max_examples=100, deadline=None)
def test_replaying_the_durable_events_rebuilds_the_state(
    history: tuple[TrajectorySpec, list[Event]],
) -> None:
    spec, events = history
    state, saved = Trajectory(spec), list[DurableEvent]()
    for event in events:
        state, actions = step(state, event)
        saved += [decode_event(encode_event(a.event)) for a in actions if isinstance(a, Save)]
    if state.phase is Phase.GENERATING:
        state, _ = step(state, Lost())
    assert replay(spec, saved) == state


@given(
    st.lists(TOKENS | st.just(EOS), min_size=1, max_size=12),
    st.integers(1, 12),
    st.lists(st.integers(0, 4), max_size=8),
)
@settings(max_examples=100, deadline=None)
def test_any_cuts_give_the_uncut_tokens(stream: list[int], budget: int, cuts: list[int]) -> None:
    """The engine is a fixed stream per prefix length, as greedy decoding is a function of the prefix."""
    spec = TrajectorySpec((1,), min(budget, len(stream)), (EOS,))
    state = Trajectory(spec)
    while not state.finished:
        state, (request,) = step(state, Submit())
        assert isinstance(request, Generate)
        done = len(request.token_ids) - 1
        tokens, finish = uncut(stream[done : done + request.max_new_tokens])
        if cuts:
            tokens, finish = tokens[: cuts.pop()], INTERRUPTED
        state, _ = step(state, generated(*tokens, finish=finish))
    expected, reason = uncut(stream[: spec.max_new_tokens])
    assert list(state.new_token_ids) == expected
    assert state.finish_reason is reason


def uncut(stream: list[int]) -> tuple[list[int], Finish]:
    if EOS in stream:
        return stream[: stream.index(EOS) + 1], FinishReason.STOP
    return stream, FinishReason.LENGTH


def test_logprobs_survive_the_codec_exactly() -> None:
    event = Generated((Segment(SegmentKind.MODEL, (1, 2), (-0.1, -1e-17), 7),), INTERRUPTED)
    assert decode_event(encode_event(event)) == event


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b"\x09" + b[1:], lambda b: b""]
)
def test_damaged_bytes_are_refused(damage: object) -> None:
    assert callable(damage)
    with pytest.raises(JournalError, match="damaged"):
        decode_event(damage(encode_event(generated(5, 6))))
