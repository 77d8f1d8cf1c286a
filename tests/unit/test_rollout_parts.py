"""Router, error rate, waiting, evaluation."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from asyncrl.engines.base import GenerateRequest, Generation
from asyncrl.engines.scripted import ScriptedEngine, scripted_token
from asyncrl.rewards.base import RewardResult
from asyncrl.rollout.evaluate import EvalResult, evaluate
from asyncrl.rollout.rewarding import MIN_REWARDS, WINDOW, ErrorRate
from asyncrl.rollout.router import AFFINITY_SLACK, MAX_FAILURES, Router, choose
from asyncrl.rollout.waiting import Progress, RolloutError, within
from asyncrl.types import Prompt
from tests.unit.rollout_job import FunctionReward


@pytest.mark.parametrize(
    ("in_flight", "preferred", "expected"),
    [
        ({"a": 3, "b": 1}, None, "b"),
        ({"a": 1, "b": 1}, None, "a"),
        ({"a": 1 + AFFINITY_SLACK, "b": 1}, "a", "a"),
        ({"a": 2 + AFFINITY_SLACK, "b": 1}, "a", "b"),
        ({"a": 0, "b": 1}, "gone", "a"),
    ],
)
def test_a_group_stays_where_its_prefix_is_unless_that_is_busy(
    in_flight: dict[str, int], preferred: str | None, expected: str
) -> None:
    assert choose(in_flight, preferred) == expected


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_busy_time_is_counted_per_replica_and_survives_removal() -> None:
    clock = Clock()
    engine = ScriptedEngine("a")
    router = Router({"a": engine, "b": ScriptedEngine("b")}, clock)
    router.acquire("a")
    clock.now = 2.0
    router.acquire("b")
    clock.now = 5.0
    assert router.busy_s == 8.0
    router.release("a", engine)
    clock.now = 6.0
    assert router.busy_s == 9.0
    router.remove("b", "b died")
    clock.now = 100.0
    assert router.busy_s == 9.0


def test_failures_in_a_row_remove_a_replica_one_success_forgives() -> None:
    engine = ScriptedEngine("a")
    router = Router({"a": engine}, Clock())
    for _ in range(3):
        for _ in range(MAX_FAILURES - 1):
            router.failed("a", engine, "timed out")
        router.succeeded("a", engine)
    assert router.names == ("a",)
    for _ in range(MAX_FAILURES):
        router.failed("a", engine, "timed out")
    with pytest.raises(RolloutError, match=r"no engine is left; the last failure: timed out \(3 failures"):
        router.acquire(None)


def test_a_successor_does_not_inherit_its_predecessors_requests() -> None:
    old, new = ScriptedEngine("a"), ScriptedEngine("a")
    router = Router({"a": old}, Clock())
    router.acquire(None)
    router.add("a", new)
    router.release("a", old)
    router.failed("a", old, "late")
    assert router.acquire(None) == ("a", new)


def test_the_error_rate_needs_enough_rewards_and_looks_at_the_latest() -> None:
    errors = ErrorRate(max_rate=0.5)
    for _ in range(MIN_REWARDS - 1):
        errors.add("bad")
    with pytest.raises(RolloutError, match=r"failed for 94% of the last 16 .*; the last failure: bad"):
        errors.add(None)
    for _ in range(2 * WINDOW):
        with contextlib.suppress(RolloutError):
            errors.add(None)
    assert (errors.rate, errors.num_errors) == (0.0, MIN_REWARDS - 1)
    for _ in range(WINDOW // 2):
        errors.add("worse")
    with pytest.raises(RolloutError, match="the last failure: worst"):
        errors.add("worst")


async def test_progress_of_anybody_keeps_waiters_waiting() -> None:
    progress = Progress(timeout_s=3.0)
    done = False

    async def work() -> None:
        nonlocal done
        for _ in range(6):
            await asyncio.sleep(0.6)
            progress.notify()
        done = True
        progress.notify()

    worker = asyncio.create_task(work())
    await progress.wait_until(lambda: done, lambda: "nobody")
    await worker
    with pytest.raises(RolloutError, match="waited 3 s for Godot"):
        await progress.wait_until(lambda: False, lambda: "Godot")


async def test_the_time_out_of_the_work_itself_is_not_renamed() -> None:
    async def work() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await within(5.0, work(), lambda: "somebody else")


# --- evaluation ---

TASKS = [Prompt(i, (), (300 + i, 7), {"answer": i}) for i in range(10)]


async def run_eval(engines: list[ScriptedEngine], reward: FunctionReward) -> EvalResult:
    return await evaluate(
        engines={engine.name: engine for engine in engines},
        prompts=TASKS,
        reward=reward,
        decode=lambda ids: " ".join(map(str, ids)),
        max_new_tokens=5,
        stop_token_ids=(),
        max_concurrent=3,
        timeout_s=10.0,
    )


async def test_accuracy_is_the_share_of_full_scores() -> None:
    reward = FunctionReward(lambda p: RewardResult([1.0, 0.5, 0.0, 2.0][p.prompt_idx % 4]))
    result = await run_eval([ScriptedEngine("a"), ScriptedEngine("b")], reward)
    assert (result.accuracy, result.num_tasks, result.mean_tokens) == (0.5, 10, 5.0)
    assert result.mean_score == pytest.approx((1 + 0.5 + 0 + 2 + 1 + 0.5 + 0 + 2 + 1 + 0.5) / 10)


async def test_evaluation_is_greedy_bounded_and_survives_cuts() -> None:
    seen: list[GenerateRequest] = []
    running = highest = 0

    class Watched(ScriptedEngine):
        async def generate(self, request: GenerateRequest, timeout_s: float) -> Generation:
            nonlocal running, highest
            seen.append(request)
            running += 1
            highest = max(highest, running)
            result = await super().generate(request, timeout_s)
            running -= 1
            return result

    completions: dict[int, str] = {}

    class Keep(FunctionReward):
        async def score(self, prompt: Prompt, completion: str, token_ids: tuple[int, ...]) -> RewardResult:
            completions[prompt.prompt_idx] = completion
            return RewardResult(1.0)

    engine = Watched("a", token_interval_s=0.002, versioned_tokens=False)

    async def interrupt() -> None:
        for _ in range(4):
            await asyncio.sleep(0.005)
            await engine.abort_all()

    interruptions = asyncio.create_task(interrupt())
    await run_eval([engine], Keep(lambda p: RewardResult(1.0)))
    await interruptions
    assert {request.temperature for request in seen} == {0.0}
    assert highest == 3 and len(seen) > len(TASKS)
    for task in TASKS:
        tokens = list(task.token_ids)
        for _ in range(5):
            tokens.append(scripted_token(tokens, 0))
        assert completions[task.prompt_idx] == " ".join(map(str, tokens[2:]))


async def test_evaluation_moves_to_another_engine() -> None:
    dead = ScriptedEngine("dead")
    dead.kill()
    result = await run_eval([dead, ScriptedEngine("live")], FunctionReward(lambda p: RewardResult(1.0)))
    assert result.accuracy == 1.0


async def test_evaluation_without_an_engine_or_reward_fails() -> None:
    dead = ScriptedEngine("dead")
    dead.kill("out of memory")
    with pytest.raises(RolloutError, match=r"no engine is left.*out of memory"):
        await run_eval([dead], FunctionReward(lambda p: RewardResult(1.0)))
    with pytest.raises(RolloutError, match=r"the reward of held-out prompt . failed: no number"):
        await run_eval([ScriptedEngine("a")], FunctionReward(lambda p: RewardResult(None, error="no number")))
