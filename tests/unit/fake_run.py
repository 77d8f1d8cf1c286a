"""A run directory as a finished run leaves it, for the displays and the report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from asyncrl.observe.jsonl import append_line
from asyncrl.observe.metrics import StepMetrics
from asyncrl.observe.rundir import RunDir, create_run, start_attempt
from asyncrl.observe.summary import Summary, write_summary

START = 1_790_000_000.0


def fake_step(step: int, rng: random.Random) -> StepMetrics:
    reward = 0.2 + 0.6 * (1 - math.exp(-step / 9)) + rng.uniform(-0.06, 0.06)
    wait = rng.uniform(0.2, 2.5)
    return StepMetrics(
        step=step,
        policy_version=step,
        reward_mean=round(reward, 4),
        loss=rng.uniform(-0.05, 0.05),
        grad_norm=rng.uniform(0.5, 2.5),
        staleness_mean=0.0 if step == 1 else rng.uniform(0.5, 0.95),
        staleness_max=0 if step == 1 else 1,
        partial_ratio=rng.uniform(0, 0.4),
        partial_max_span=1,
        mismatch_kl=rng.uniform(2e-4, 9e-4),
        tokens_trained=rng.randint(3000, 3600),
        tokens_generated=rng.randint(700, 900),
        time_step=8.0 + wait,
        time_publish=0.9,
        time_engine_paused=0.6,
        trainer_idle_ratio=wait / (8.0 + wait),
        engine_idle_ratio=rng.uniform(0.05, 0.3),
        ring_depth=rng.randint(0, 64),
        extra={"time/wait": wait, "time/train": 7.1, "lr": 1e-5},
    )


def write_fake_run(path: Path, num_steps: int = 30, *, finished: bool = True) -> RunDir:
    """``num_steps`` of 30 configured steps, with events, samples and, if finished, a summary."""
    rng = random.Random(0)
    run = create_run(path)
    start_attempt(run)
    run.config.write_text('name = "demo"\n[train]\nsteps = 30\n')
    now = START

    def event(kind: str, **fields: object) -> None:
        append_line(run.events, {"time": now, "kind": kind, **fields})

    for name, seconds in (
        ("checking configuration and model", 2.2),
        ("starting Ray", 6.5),
        ("starting engines and trainer", 61.0),
        ("first publication", 1.4),
    ):
        event("phase", name=name)
        now += seconds
    event("phase", name="held-out evaluation")
    now += 12
    event("heldout", label="before", accuracy=0.3281, num_tasks=64, policy_version=0)
    event("phase", name="training")
    for step in range(1, num_steps + 1):
        metrics = fake_step(step, rng)
        now += metrics.time_step
        append_line(run.metrics, {**metrics.to_json(), "time/unix": now})
        event("publication", version=step, seconds=0.9)
        _write_samples(run, step, rng)
        if step % 10 == 0:
            event("checkpoint", step=step)
    if finished:
        event("heldout", label="after", accuracy=0.7969, num_tasks=64, policy_version=num_steps)
        event("finished")
        write_summary(run, Summary(0.3281, 0.7969, num_steps, now - START, 9.4, num_steps + 1, 1984, 1920, 4))
    return run


def _write_samples(run: RunDir, step: int, rng: random.Random) -> None:
    records = []
    for group in range(4):
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        for sample_idx in range(4):
            right = rng.random() < 0.2 + step / 40
            value = a + b if right else a + b + rng.randint(1, 9)
            spans = [{"policy_version": step - 1, "num_tokens": 9}]
            if rng.random() < 0.3 and step > 1:
                spans = [
                    {"policy_version": step - 2, "num_tokens": 4},
                    {"policy_version": step - 1, "num_tokens": 5},
                ]
            records.append(
                {
                    "batch_idx": step - 1,
                    "group_id": (step - 1) * 4 + group,
                    "sample_idx": sample_idx,
                    "prompt_idx": (step - 1) * 4 + group,
                    "ring_idx": 0,
                    "prompt": f"system\nYou are a calculator.\nuser\nCalculate {a} + {b}.\nassistant\n",
                    "completion": f"{a} + {b} = {value}",
                    "reward": float(right),
                    "reward_parts": {},
                    "finish_reason": "stop",
                    "num_prompt_tokens": 38,
                    "num_new_tokens": 9,
                    "num_requests": len(spans),
                    "spans": spans,
                }
            )
    rng.shuffle(records)
    run.rollout_file(step).write_text("".join(json.dumps(record) + "\n" for record in records))
