"""Procedural tasks from reasoning-gym, as an endless sequence with random access.

A generator draws task i from seed + i, and some build all their tasks when created. So the sequence is
cut into chunks of `CHUNK` tasks; chunk c is a generator of its own, seeded by a hash of (seed, c), and
``task_at(i)`` depends on the seed and i alone. The row names its generator, by which the reward
regenerates the task with everything that ``score_answer`` needs, whatever its type.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from asyncrl.data.rows import DataError, TaskRow

CHUNK = 1024


@functools.lru_cache(maxsize=8)
def _generator(name: str, args_json: str, seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = ", ".join(difflib.get_close_matches(name, DATASETS, n=3)) or "list them with reasoning_gym"
        raise DataError(f"data.reasoning_gym = {name!r}: no such task; nearest: {close}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=CHUNK, **json.loads(args_json))
    except (TypeError, AssertionError, ValueError) as error:
        raise DataError(f"data.task_args do not suit {name}: {error}") from None


def chunk_seed(seed: int, chunk: int) -> int:
    """The seed of chunk ``chunk``: 31 bits of a hash, so that chunks do not overlap as seed + i would."""
    digest = hashlib.sha256(f"{seed}:{chunk}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class ReasoningGymTasks:
    """The task sequence of one generator configuration and one seed."""

    def __init__(self, name: str, args: Mapping[str, Any], seed: int) -> None:
        reserved = {"seed", "size"} & set(args)
        if reserved:
            raise DataError(f"data.task_args: {', '.join(sorted(reserved))} is set by data.seed, not here")
        self._name = name
        self._args_json = json.dumps(dict(args), sort_keys=True)
        self._seed = seed

    def task_at(self, idx: int) -> TaskRow:
        chunk, offset = divmod(idx, CHUNK)
        source = {
            "name": self._name,
            "args": self._args_json,
            "seed": chunk_seed(self._seed, chunk),
            "index": offset,
        }
        entry = regenerate(source)
        messages = ({"role": "user", "content": str(entry["question"])},)
        row = {"question": entry["question"], "answer": entry["answer"], "reasoning_gym": source}
        return TaskRow(messages, row)


def regenerate(source: Mapping[str, Any]) -> dict[str, Any]:
    """The reasoning-gym entry that a row's ``reasoning_gym`` column names."""
    entry: dict[str, Any] = _generator(source["name"], source["args"], source["seed"])[source["index"]]
    return entry


def score(source: Mapping[str, Any], completion: str) -> float:
    """The task's own score of a completion, in [0, 1].

    What stands between the last ``<answer>`` tags is scored, and the whole text where there are none.
    """
    from reasoning_gym.utils import extract_answer

    tagged = extract_answer(completion)
    answer = completion.strip() if tagged is None else tagged
    generator = _generator(source["name"], source["args"], source["seed"])
    return float(generator.score_answer(answer, regenerate(source)))
