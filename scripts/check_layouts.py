"""Every trainer layout into every engine layout, on real parts: `make layouts` (20 minutes on two cores).

For each pair this runs the tiny example with `weights.verify`, then loads the Hugging Face folder of every
published version into a *reference* engine of the same TP from disk, and compares:

* the checksums of all parameters on every engine rank, with those recorded after the publication: equal;
* the logprobs of fixed prompts, engine against trainer, as recorded: within 1e-4.

Prints a table; exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import EngineConfig
from asyncrl.engines.ports import free_port
from asyncrl.engines.process import engine_command, wait_until_ready
from asyncrl.engines.sglang import SGLangEngine
from asyncrl.launch.child import Child

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "tiny-qwen3"
LAYOUTS = {
    "tp2": ("parallel.tp=2",),
    "pp2": ("parallel.pp=2",),
    "cp2": ("parallel.cp=2",),
    "dp2": ("parallel.dp=2",),
    "tp2xpp2": ("parallel.tp=2", "parallel.pp=2"),
    "tp2xcp2": ("parallel.tp=2", "parallel.cp=2"),
}
TOLERANCE = 1e-4  # nats
RUN_TIMEOUT_S = 600


@dataclass
class Reference:
    """An engine that only ever loads from disk."""

    engine: SGLangEngine
    child: Child


async def start_reference(tp: int, directory: Path) -> Reference:
    port, token = free_port(), secrets.token_hex(16)
    command = engine_command(
        EngineConfig(tp=tp, context_length=256),
        model_path=MODEL,
        dtype="float32",
        port=port,
        token=token,
        device="cpu",
    )
    log = directory / f"reference-tp{tp}.log"
    child = Child(f"reference-tp{tp}", command.arguments, log=log, environment=command.environment)
    engine = SGLangEngine(f"reference-tp{tp}", f"http://127.0.0.1:{port}", token)
    await wait_until_ready(engine, exit_status=child.exit_code, log=log, timeout_s=300)
    return Reference(engine, child)


def run(name: str, directory: Path, overrides: tuple[str, ...]) -> Path:
    """One run of the tiny example; returns its directory."""
    command = [sys.executable, "-m", "asyncrl.cli", "run", "examples/tiny.toml", f"name={name}"]
    command += [f"runs_dir={directory}", *overrides]
    log = directory / f"{name}.out"
    with log.open("wb") as output:
        code = subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=RUN_TIMEOUT_S
        ).returncode
    if code:
        raise SystemExit(f"{name}: exit code {code}\n{log.read_text()[-3000:]}")
    return directory / name


async def compare(reference: Reference, run_dir: Path) -> tuple[int, int, float]:
    """Publications, parameters that differ over all of them, and the largest difference of a logprob."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    checks = [event for event in events if event["kind"] == "verification"]
    differing = 0
    for check in checks:
        folder = run_dir / "verify" / f"version_{check['version']}"
        await reference.engine.update_from_disk(str(folder), check["version"], 120.0)
        expected = await reference.engine.checksums()
        for rank, (ours, theirs) in enumerate(zip(check["checksums"], expected, strict=True)):
            for parameter in theirs:
                if ours.get(parameter) != theirs[parameter]:
                    differing += 1
                    print(f"  {run_dir.name}: version {check['version']}, rank {rank}: {parameter} differs")
    return len(checks), differing, max(check["max_logprob_difference"] for check in checks)


async def check(layouts: list[str], engine_tps: list[int], directory: Path) -> bool:
    print(f"{'trainer':9} {'engine':7} {'publications':>12} {'checksums':>12} {'logprobs':>9}")
    good = True
    for tp in engine_tps:
        reference = await start_reference(tp, directory)
        try:
            for layout in layouts:
                overrides = (*LAYOUTS[layout], f"engine.tp={tp}")
                run_dir = run(f"{layout}-into-tp{tp}", directory, overrides)
                publications, differing, largest = await compare(reference, run_dir)
                fine = publications > 0 and not differing and largest < TOLERANCE
                verdict = "equal" if not differing else f"{differing} differ"
                print(f"{layout:9} tp{tp:<5} {publications:12} {verdict:>12} {largest:9.1e}", flush=True)
                good = good and fine
        finally:
            await reference.engine.close()
            reference.child.end(10.0)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="every trainer layout into every engine layout")
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS), help="default: all")
    parser.add_argument("--engine-tp", action="append", type=int, choices=(1, 2), help="default: both")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="asyncrl-layouts-") as directory:
        good = asyncio.run(
            check(options.layout or list(LAYOUTS), options.engine_tp or [1, 2], Path(directory))
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
