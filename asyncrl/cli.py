"""The `asyncrl` command: reads arguments, calls the part that does it, prints one clear line on wrong input.

Exit codes: 0 done, 1 the run failed, 2 wrong input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config import Config, ConfigError, RewardConfig, load_config
from asyncrl.data.rows import DataError
from asyncrl.observe.rundir import RunDirError
from asyncrl.rewards.base import RewardError
from asyncrl.types import Prompt
from asyncrl.weights.geometry import ModelError

WRONG_INPUT = (ConfigError, DataError, ModelError, RewardError, RunDirError)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (options.command is not _run or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # overrides behind an option, which argparse does not collect
        options.overrides += rest
    try:
        code: int = options.command(options)
    except WRONG_INPUT as error:
        for line in str(error).splitlines():
            print(f"asyncrl: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl", description="Fully asynchronous reinforcement learning for large language models."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="train, on this machine")
    run.add_argument("config", type=Path, help="a TOML file; see examples/")
    run.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a setting")
    run.add_argument(
        "--dry-run", action="store_true", help="show layout, batch, memory and settings; start nothing"
    )
    run.set_defaults(command=_run)

    show = commands.add_parser("show", help="the samples that a step trained on")
    show.add_argument("run", type=Path, help="a run directory")
    show.add_argument("--step", type=int, required=True)
    show.set_defaults(command=_show)

    top = commands.add_parser("top", help="the live view of a running job, from another terminal")
    top.add_argument("run", type=Path, help="a run directory")
    top.add_argument("--once", action="store_true", help="print one picture and exit")
    top.set_defaults(command=_top)

    report = commands.add_parser("report", help="write report.html of a run again")
    report.add_argument("run", type=Path, help="a run directory")
    report.set_defaults(command=_report)

    reward = commands.add_parser("reward", help="try a reward function on prompts, before any training")
    reward.add_argument("function", help="FILE.py:FUNCTION or the name of a built-in reward")
    reward.add_argument("--prompts", type=Path, required=True, help="a JSONL or parquet file")
    reward.add_argument("--completion", help="text to score; default: each row's own answer, and no text")
    reward.add_argument("--limit", type=int, default=8, help="rows to try")
    reward.set_defaults(command=_reward)

    plan = commands.add_parser("plan", help="what a cluster would do, from a config.json alone")
    _add_plan_weights(plan.add_subparsers(required=True, metavar="WHAT"))

    doctor = commands.add_parser("doctor", help="what this machine has, what it lacks, and how to fix it")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(command=_doctor)

    ring = commands.add_parser("ring", help="look inside a live ring of samples, mend it, or clear it away")
    ring.add_argument("path", type=Path, help="a ring directory, for example /dev/shm/asyncrl-NAME/replica-0")
    action = ring.add_mutually_exclusive_group()
    action.add_argument("--repair", action="store_true", help="rebuild the tables from the slots")
    action.add_argument("--clear", action="store_true", help="remove a ring that no process has open")
    ring.set_defaults(command=_ring)
    return parser


def _add_plan_weights(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    weights = subjects.add_parser("weights", help="a publication: bytes, bound, time, memory, balance")
    weights.add_argument("--model", type=Path, required=True, help="a directory with a config.json")
    weights.add_argument(
        "--trainer", required=True, help="tp=4,pp=4,cp=2,ep=16; also vpp, dp, etp, layers=3/5"
    )
    weights.add_argument("--engine", required=True, help="tp=32,ep=8")
    weights.add_argument("--replicas", type=int, default=1, help="engines")
    weights.add_argument("--bandwidth", type=float, default=50.0, help="of a rank's link, GB/s each way")
    weights.add_argument("--latency", type=float, default=150.0, help="of a round of messages, microseconds")
    weights.add_argument("--strategy", choices=("p2p", "broadcast", "relay"), default="")
    dtypes = ("bfloat16", "float32")
    weights.add_argument("--dtype", choices=dtypes, default="bfloat16", help="of both sides' parameters")
    weights.add_argument("--engine-dtype", choices=(*dtypes, "fp8"), help="of the engine's, where it differs")
    weights.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    weights.set_defaults(command=_plan_weights)


def _run(options: argparse.Namespace) -> int:
    config: Config = load_config(options.config, options.overrides)
    if options.dry_run:
        from asyncrl.launch.dry_run import dry_run

        print(dry_run(config), end="")
        return 0
    from asyncrl.launch.ray_token import protect_ray

    protect_ray()
    from asyncrl.launch.session import run_command

    return run_command(config)


def _show(options: argparse.Namespace) -> int:
    from rich.console import Console

    from asyncrl.observe.show import show

    show(options.run, options.step, Console())
    return 0


def _top(options: argparse.Namespace) -> int:
    from rich.console import Console

    from asyncrl.observe.top import top

    top(options.run, Console(), once=options.once)
    return 0


def _report(options: argparse.Namespace) -> int:
    from asyncrl.observe.report import write_report
    from asyncrl.observe.rundir import open_run

    print(write_report(open_run(options.run)))
    return 0


def _reward(options: argparse.Namespace) -> int:
    from asyncrl.data.rows import read_rows
    from asyncrl.rewards.load import try_reward

    rows = read_rows(options.prompts)[: options.limit]
    prompts = [Prompt(idx, row.messages, (), row.row) for idx, row in enumerate(rows)]
    completions = None if options.completion is None else [options.completion] * len(prompts)
    trials = asyncio.run(try_reward(RewardConfig(function=options.function), prompts, completions))
    for trial in trials:
        outcome = f"error: {trial.result.error}" if trial.result.error else f"{trial.result.score:g}"
        parts = "".join(f"  {name} {value:g}" for name, value in trial.result.parts.items())
        print(
            f"{trial.prompt.messages[-1]['content'][:60]!r}  {trial.completion[:60]!r}  ->  {outcome}{parts}"
        )
    return 1 if any(trial.result.error for trial in trials) else 0


def _plan_weights(options: argparse.Namespace) -> int:
    from rich.console import Console

    from asyncrl.weights.cost import Links
    from asyncrl.weights.geometry import ModelGeometry
    from asyncrl.weights.model_plan import PlanRequest, plan_model
    from asyncrl.weights.plan_table import plan_tables
    from asyncrl.weights.splits import engine_split, trainer_split

    plan = plan_model(
        PlanRequest(
            geometry=ModelGeometry.from_hf(options.model, allow_fp8=True),
            trainer=trainer_split(options.trainer),
            engine=engine_split(options.engine),
            num_replicas=options.replicas,
            links=Links(options.bandwidth * 1e9, options.latency * 1e-6),
            strategy=options.strategy,
            trainer_dtype=options.dtype,
            engine_dtype={"fp8": "float8_e4m3fn"}.get(options.engine_dtype, options.engine_dtype)
            or options.dtype,
        )
    )
    Console().print(plan_tables(plan))
    if options.json:
        options.json.write_text(json.dumps(plan.figures(), indent=2) + "\n")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from asyncrl.observe.doctor import doctor

    return doctor(as_json=options.json)


def _ring(options: argparse.Namespace) -> int:
    from asyncrl.ring.errors import RingError
    from asyncrl.ring.inspect import clear, describe_ring, repair

    try:
        if options.clear:
            clear(options.path)
            return 0
        for line in repair(options.path) if options.repair else [describe_ring(options.path)]:
            print(line)
    except RingError as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
