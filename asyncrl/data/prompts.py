"""The prompt stream: endless, deterministic, resumable from an index, disjoint from the held-out tasks.

    reasoning-gym or rows -> system prompt and suffix -> chat template -> Prompt(prompt_idx, token_ids, row)

``prompt_at(i)`` depends on the configuration and i alone, so resuming needs only the next index.
Where the task at i is too long or is a held-out question, the next of a fixed chain of substitutes
takes its place; no index is ever missing. Held-out tasks are distinct questions drawn with another
seed (or from ``eval.path``), and training skips exactly those texts, however far it runs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.config import DataConfig, EvalConfig
from asyncrl.data.chat import ChatTemplate
from asyncrl.data.reasoning_gym import ReasoningGymTasks
from asyncrl.data.rows import DataError, TaskRow, read_rows
from asyncrl.types import Prompt

SUBSTITUTE_STRIDE = 1 << 40
"""Distance between substitutes of one procedural task: beyond any index that training reaches."""

MAX_SUBSTITUTES = 200
DRAWS_PER_HELDOUT_TASK = 100


class PromptSource(Protocol):
    """What the rollouter reads prompts from."""

    @property
    def heldout(self) -> tuple[Prompt, ...]:
        """Tasks that are never trained on; ``prompt_idx`` counts from 0."""
        ...

    @property
    def num_skipped(self) -> int:
        """Tasks passed over so far because they are too long or held out."""
        ...

    def prompt_at(self, prompt_idx: int) -> Prompt:
        """The prompt at a position of the endless stream."""
        ...


class TaskSequence(Protocol):
    def task_at(self, idx: int) -> TaskRow: ...


class PromptBuilder:
    """Adds system prompt and suffix, applies the chat template, measures the length."""

    def __init__(self, template: ChatTemplate, data: DataConfig, max_prompt_tokens: int) -> None:
        self._template = template
        self._system_prompt = data.system_prompt
        self._suffix = data.prompt_suffix
        self.max_prompt_tokens = max_prompt_tokens

    def build(self, prompt_idx: int, task: TaskRow) -> Prompt:
        messages = self._messages(task.messages)
        return Prompt(prompt_idx, messages, self._template.encode(messages), task.row)

    def is_overlong(self, prompt: Prompt) -> bool:
        return len(prompt.token_ids) > self.max_prompt_tokens

    def _messages(self, messages: Sequence[Mapping[str, str]]) -> tuple[Mapping[str, str], ...]:
        result = [dict(message) for message in messages]
        if self._system_prompt is not None and result[0]["role"] != "system":
            result.insert(0, {"role": "system", "content": self._system_prompt})
        if self._suffix:
            result[-1]["content"] += self._suffix
        return tuple(result)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Tasks for evaluation, and the texts by which training recognises them."""

    prompts: tuple[Prompt, ...] = ()
    questions: frozenset[str] = frozenset()


class ProceduralPrompts:
    """Prompts of a procedural task sequence; each index has its own chain of substitutes."""

    def __init__(self, tasks: TaskSequence, builder: PromptBuilder, heldout: HeldOut) -> None:
        self._tasks = tasks
        self._builder = builder
        self._heldout = heldout
        self._skipped: set[int] = set()

    @property
    def heldout(self) -> tuple[Prompt, ...]:
        return self._heldout.prompts

    @property
    def num_skipped(self) -> int:
        return len(self._skipped)

    def prompt_at(self, prompt_idx: int) -> Prompt:
        """Raises:
        DataError: every substitute is overlong or held out too.
        """
        for attempt in range(MAX_SUBSTITUTES):
            task_idx = prompt_idx + attempt * SUBSTITUTE_STRIDE
            task = self._tasks.task_at(task_idx)
            if task.question not in self._heldout.questions:
                prompt = self._builder.build(prompt_idx, task)
                if not self._builder.is_overlong(prompt):
                    return prompt
            self._skipped.add(task_idx)
        raise DataError(
            f"no usable task in {MAX_SUBSTITUTES} draws: each is longer than rollout.max_prompt_tokens ="
            f" {self._builder.max_prompt_tokens} or one of {len(self._heldout.questions)} held-out questions"
        )


class RowPrompts:
    """Prompts of a list of rows, reshuffled by (seed, epoch)."""

    def __init__(
        self, rows: Sequence[TaskRow], builder: PromptBuilder, heldout: HeldOut, *, seed: int
    ) -> None:
        """Raises:
        DataError: all rows are overlong or held out.
        """
        usable = [builder.build(0, task) for task in rows if task.question not in heldout.questions]
        self._prompts = [prompt for prompt in usable if not builder.is_overlong(prompt)]
        self._heldout = heldout
        self._num_skipped = len(rows) - len(self._prompts)
        self._seed = seed
        self._epoch, self._order = -1, list[int]()
        if not self._prompts:
            raise DataError(
                f"none of {len(rows)} rows is usable: {len(rows) - len(usable)} are held out, {len(usable)}"
                f" are longer than rollout.max_prompt_tokens = {builder.max_prompt_tokens}"
            )

    @property
    def heldout(self) -> tuple[Prompt, ...]:
        return self._heldout.prompts

    @property
    def num_skipped(self) -> int:
        return self._num_skipped

    def prompt_at(self, prompt_idx: int) -> Prompt:
        epoch, position = divmod(prompt_idx, len(self._prompts))
        if epoch != self._epoch:
            self._order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}:{epoch}").shuffle(self._order)
            self._epoch = epoch
        prompt = self._prompts[self._order[position]]
        return Prompt(prompt_idx, prompt.messages, prompt.token_ids, prompt.row)


def open_prompts(
    data: DataConfig, evaluation: EvalConfig, template: ChatTemplate, max_prompt_tokens: int
) -> PromptSource:
    """The prompt source that the configuration names, with ``evaluation.num_tasks`` held-out tasks.

    Raises:
        DataError: the source is missing or broken, or has too few distinct or short enough tasks.
    """
    builder = PromptBuilder(template, data, max_prompt_tokens)
    if data.reasoning_gym is not None:
        tasks = ReasoningGymTasks(data.reasoning_gym, data.task_args, data.seed)
        other = ReasoningGymTasks(data.reasoning_gym, data.task_args, data.seed + evaluation.seed_offset)
        heldout = _distinct_prompts(other, builder, evaluation.num_tasks)
        return ProceduralPrompts(tasks, builder, heldout)
    assert data.path is not None  # checked by DataConfig
    rows = read_rows(data.path, data.prompt_key, data.answer_key)
    return RowPrompts(rows, builder, _heldout_rows(data, evaluation, builder), seed=data.seed)


def _distinct_prompts(tasks: TaskSequence, builder: PromptBuilder, num_tasks: int) -> HeldOut:
    found: dict[str, Prompt] = {}
    for idx in range(num_tasks * DRAWS_PER_HELDOUT_TASK):
        if len(found) == num_tasks:
            break
        task = tasks.task_at(idx)
        if task.question in found:
            continue
        prompt = builder.build(len(found), task)
        if not builder.is_overlong(prompt):
            found[task.question] = prompt
    if len(found) < num_tasks:
        raise DataError(
            f"eval.num_tasks = {num_tasks}: only {len(found)} distinct tasks that fit were found; lower it,"
            " or give data.task_args a larger space"
        )
    return HeldOut(tuple(found.values()), frozenset(found))


def _heldout_rows(data: DataConfig, evaluation: EvalConfig, builder: PromptBuilder) -> HeldOut:
    if evaluation.path is None or evaluation.num_tasks == 0:
        return HeldOut()
    rows = read_rows(evaluation.path, data.prompt_key, data.answer_key)
    prompts = [builder.build(idx, task) for idx, task in enumerate(rows)]
    fitting = tuple(prompt for prompt in prompts if not builder.is_overlong(prompt))
    if len(fitting) < evaluation.num_tasks:
        raise DataError(
            f"{evaluation.path}: {len(fitting)} rows fit rollout.max_prompt_tokens, eval.num_tasks ="
            f" {evaluation.num_tasks}"
        )
    return HeldOut(fitting[: evaluation.num_tasks], frozenset(task.question for task in rows))
