"""Rewards: every accepted form, and failures that are never a silent 0."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import RewardConfig
from asyncrl.data.reasoning_gym import ReasoningGymTasks
from asyncrl.rewards.base import Reward, RewardError, RewardResult, as_result
from asyncrl.rewards.builtin import exact_match, last_number
from asyncrl.rewards.load import open_reward, try_reward
from asyncrl.types import Prompt

FORMS = """
import asyncio, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw):
    assert data_source == "s" and extra_info == {"index": 7} and not kw
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "note": "text"}

def trl(prompts, completions, completion_ids, difficulty, **columns):
    assert prompts == [[{"role": "user", "content": "1+1?"}]], prompts
    assert completion_ids == [[5, 6]] and difficulty == ["easy"] and "answer" in columns
    return [1.0 if completions[0][0]["content"] == "2" else 0.0]

def areal(prompt, completions, prompt_ids, completion_ids, answer, **kw):
    assert prompt == "1+1?" and prompt_ids == [1, 2] and completion_ids == [5, 6]
    assert kw["difficulty"] == "easy"
    return completions == answer

def plain(prompt, completion, answer):
    print("printed by the user")
    return int(completion == answer)

async def slow_judge(completion):
    await asyncio.sleep(1.0)
    if completion == "hang":
        time.sleep(1000)
    return 0.5

def raises(completion):
    return 1 / 0

def spins(completion):
    while completion == "spin":
        pass
    return 1.0

def nan(completion):
    return float("nan")

def nothing(completion):
    return None

def dies(completion):
    import os
    os._exit(3)

def numpy_score(completion):
    import numpy
    return numpy.float32(0.25)

def strange(x, y):
    return 0
"""

ROW = {"data_source": "s", "answer": "2", "extra_info": {"index": 7}, "difficulty": "easy"}


def prompt(row: Mapping[str, Any] = ROW) -> Prompt:
    return Prompt(0, ({"role": "user", "content": "1+1?"},), (1, 2), row)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("reward") / "forms.py"
    file.write_text(FORMS)
    return file


async def scores(reward: Reward, *completions: str) -> list[RewardResult]:
    results = await asyncio.gather(*(reward.score(prompt(), text, (5, 6)) for text in completions))
    await reward.close()
    return list(results)


async def run(forms: Path, function: str, *completions: str, timeout_s: float = 10.0) -> list[RewardResult]:
    reward = await open_reward(RewardConfig(function=f"{forms}:{function}", timeout_s=timeout_s))
    return await scores(reward, *completions)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("2 + 3 = 5", "5", 1.0),
        ("5 apples, or 6", 5, 0.0),
        ("it is -4.", "-4", 1.0),
        ("3-4", "4", 1.0),
        ("1,000", "1000", 1.0),
        ("5.0", "5", 1.0),
        ("5.", "5", 1.0),
        ("no number", "5", 0.0),
        ("", "0", 0.0),
        ("x2", "2", 1.0),
        ("٣", "3", 1.0),
    ],
)
def test_last_number(completion: str, answer: Any, expected: float) -> None:
    assert last_number(completion, answer) == expected


def test_exact_match() -> None:
    assert exact_match(" yes\n", "yes") == 1.0
    assert exact_match("Yes", "yes") == 0.0


async def test_an_answer_that_is_no_number_is_an_error_not_a_zero() -> None:
    reward = await open_reward(RewardConfig(function="last_number"))
    result = await reward.score(prompt({"answer": "many"}), "3", ())
    assert result.score is None and "'many' is not a number" in str(result.error)
    assert (await reward.score(prompt({}), "3", ())).error == "the row has no answer to compare with"


@pytest.mark.parametrize("function", ["compute_score", "trl", "areal", "plain"])
async def test_forms(forms: Path, function: str) -> None:
    right, wrong = await run(forms, function, "2", "3")
    assert (right.error, right.score, wrong.score) == (None, 1.0, 0.0)
    if function == "compute_score":
        assert right.parts == {"length": 1.0}


async def test_coroutines_run_concurrently_and_survive_a_hanging_sibling(forms: Path) -> None:
    start = time.monotonic()
    assert [result.score for result in await run(forms, "slow_judge", *["x"] * 20)] == [0.5] * 20
    assert time.monotonic() - start < 12, "20 x 1 s one after another would take 20 s"
    good, hung = await run(forms, "slow_judge", "x", "hang", timeout_s=1.5)
    assert hung.score is None and "no result within reward.timeout_s = 1.5" in str(hung.error)
    assert good.score == 0.5


async def test_failures_are_errors_with_their_place(forms: Path) -> None:
    line = FORMS.splitlines().index("    return 1 / 0") + 1
    (raised,) = await run(forms, "raises", "x")
    assert raised.score is None
    assert raised.error == f"{forms}:{line}: ZeroDivisionError: division by zero"
    assert (await run(forms, "nan", "x"))[0].error == "returned nan, which is not finite"
    assert "returned None" in str((await run(forms, "nothing", "x"))[0].error)
    assert "ended with exit code 3" in str((await run(forms, "dies", "x"))[0].error)
    assert (await run(forms, "numpy_score", "x"))[0].score == 0.25


async def test_a_cpu_loop_is_stopped_and_the_next_call_works(forms: Path) -> None:
    spun, fine = await run(forms, "spins", "spin", "x", timeout_s=1.0)
    assert spun.score is None and "timeout_s = 1" in str(spun.error)
    assert fine.score == 1.0


async def test_what_cannot_be_loaded_says_where(forms: Path, tmp_path: Path) -> None:
    cases = {
        f"{forms}:absent": "no function 'absent'; it defines compute_score",
        f"{forms}:strange": r"parameters \(x, y\) are of no known form",
        f"{tmp_path}/none.py:f": "no such file",
        f"{tmp_path}/exits.py:f": "importing it: its worker process ended with exit code 4",
        "lastnumber": "use last_number, exact_match, reasoning_gym or FILE.py:FUNCTION",
    }
    (tmp_path / "exits.py").write_text("import os\nos._exit(4)\n")
    (tmp_path / "broken.py").write_text("x = 1\ny = undefined_name\n")
    (tmp_path / "syntax.py").write_text("x = 1\ndef f(:\n")
    cases[f"{tmp_path}/broken.py:f"] = r"broken\.py:2: NameError"
    cases[f"{tmp_path}/syntax.py:f"] = r"syntax\.py:2: SyntaxError"
    for function, message in cases.items():
        with pytest.raises(RewardError, match=message):
            await open_reward(RewardConfig(function=function))


async def test_reasoning_gym_scores_by_the_task_itself() -> None:
    tasks = ReasoningGymTasks("chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 1}, seed=3)
    row = tasks.task_at(1500).row
    reward = await open_reward(RewardConfig(function="reasoning_gym", timeout_s=60))
    texts = (str(row["answer"]), f"so <answer> {row['answer']}.0 </answer>", "<answer>77</answer>")
    results = [await reward.score(prompt(row), text, ()) for text in texts]
    other = await reward.score(prompt(), "2", ())
    await reward.close()
    assert [result.score for result in results[:2]] == [1.0, 1.0]
    assert results[2].score is not None and results[2].score < 0.1
    assert "needs data.reasoning_gym" in str(other.error)


async def test_try_reward_shows_a_right_and_an_empty_answer(forms: Path) -> None:
    trials = await try_reward(RewardConfig(function=f"{forms}:plain"), [prompt()])
    assert [(trial.completion, trial.result.score) for trial in trials] == [("2", 1.0), ("", 0.0)]


def test_as_result_checks_what_came_back() -> None:
    assert as_result(True).score == 1.0
    assert as_result([0.5]).score == 0.5
    assert as_result({"score": 1, "a": 2, "b": "x"}).parts == {"a": 2.0}
    for bad in ([1, 2], "1", {"reward": 1}, {"score": None}, float("inf"), [], object()):
        assert as_result(bad).score is None and as_result(bad).error
    with pytest.raises(ValueError, match="exactly one"):
        RewardResult(None)
