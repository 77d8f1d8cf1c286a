"""`asyncrl run`: from a checked configuration to a finished run directory.

    preflight -> run directory -> LocalRun (processes, supervision) -> summary.json, report.html

Exit codes: 0 finished or stopped and resumable, 1 failed, 2 wrong input (nothing was started).
"""

from __future__ import annotations

import os
import sys
import time
import uuid

from rich.console import Console

from asyncrl.config import Config
from asyncrl.control.messages import RunState
from asyncrl.launch.dry_run import resolved_toml
from asyncrl.launch.local import LocalRun, RunFailed, RunStopped
from asyncrl.launch.preflight import preflight
from asyncrl.observe.events import EventLog
from asyncrl.observe.memory import PeakMemory
from asyncrl.observe.progress import Progress
from asyncrl.observe.report import write_report
from asyncrl.observe.rundir import RunDir, RunDirError, create_run, open_run, start_attempt
from asyncrl.observe.summary import Summary, write_summary

MEMORY_SAMPLE_S = 2.0


class Session:
    """What one `asyncrl run` shows and records while `LocalRun` does the work."""

    def __init__(self, config: Config, run: RunDir, progress: Progress) -> None:
        self._config = config
        self._run = run
        self._progress = progress
        self._events = EventLog(run.path)
        self._memory = PeakMemory()
        self._started = time.monotonic()
        self._sampled_at = 0.0
        self._seen = RunState()

    def on_phase(self, name: str) -> None:
        self._events.phase(name)
        self._progress.update()

    def on_engine(self, message: str) -> None:
        """What became of an engine that was lost."""
        self._events.write("engine", message=message)
        self._progress.update()

    def on_state(self, state: RunState) -> None:
        """Show what is new since the last call."""
        before, self._seen = self._seen, state
        if state.phase is not before.phase:
            self.on_phase(state.phase.value)
        if len(state.engines) > len(before.engines):
            self.on_phase(f"{len(state.engines)} of {self._config.engine.replicas} engines up")
        if state.policy_version > before.policy_version:
            self._events.write("publication", version=state.policy_version)
        if state.checkpoint_step > before.checkpoint_step:
            self._events.write("checkpoint", step=state.checkpoint_step)
        for result in state.held_out[len(before.held_out) :]:
            self._events.write("heldout", **result.model_dump())
        self._progress.update()
        if time.monotonic() - self._sampled_at > MEMORY_SAMPLE_S:
            self._memory.sample([os.getpid()])
            self._sampled_at = time.monotonic()

    def finish(self, state: RunState) -> Summary:
        """Write summary.json and report.html."""
        accuracy = {result.label: result.accuracy for result in state.held_out}
        counts = state.rollout.counts
        summary = Summary(
            heldout_before=accuracy.get("before"),
            heldout_after=accuracy.get("after"),
            steps=state.batches_trained,
            seconds=round(time.monotonic() - self._started, 1),
            peak_rss_gib=round(self._memory.peak_gib, 2),
            publications=state.publications,
            samples_issued=counts.issued,
            # By the trainer's word: the rollouter's may be a batch old where the run was interrupted.
            samples_trained=state.batches_trained * self._config.train.samples_per_step,
            samples_dropped=counts.num_dropped,
        )
        write_summary(self._run, summary)
        write_report(self._run)
        return summary


def run_command(config: Config) -> int:
    """Run a configuration to its end; returns the exit code."""
    problems = preflight(config)
    if problems:
        for problem in problems:
            print(f"asyncrl: {problem}", file=sys.stderr)
        return 2
    try:
        run = _run_directory(config)
    except RunDirError as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        return 2
    run.config.write_text(resolved_toml(config) + "\n")
    log_dir = start_attempt(run)
    ring_dir = config.ring.directory / f"asyncrl-{config.name}-{uuid.uuid4().hex[:8]}"
    events = EventLog(run.path)
    with Progress(run, config.observe.display, Console()) as progress:
        progress.skip_history()
        session = Session(config, run, progress)
        local = LocalRun(config, log_dir, ring_dir, session.on_phase, session.on_state, session.on_engine)
        try:
            state = local.run()
            code, message = 0, ""
        except RunStopped:
            state, code, message = local.last_state, 0, "stopped"
            events.write("stopped", message="by a signal")
        except RunFailed as error:
            state, code, message = local.last_state, 1, str(error)
            events.write("failed", message=message.splitlines()[0])
        finally:
            local.close()
        summary = session.finish(state)
    if code == 0 and not message:
        events.write("finished", message="")
    return _report_end(run, summary, code, message)


def _run_directory(config: Config) -> RunDir:
    if config.checkpoint.resume == "auto" and config.run_dir.exists():
        return open_run(config.run_dir)
    return create_run(config.run_dir)


def _report_end(run: RunDir, summary: Summary, code: int, message: str) -> int:
    if code:
        print(f"asyncrl: {message}", file=sys.stderr)
        return code
    if summary.heldout_before is not None and summary.heldout_after is not None:
        print(f"held-out accuracy: {summary.heldout_before:.3f} -> {summary.heldout_after:.3f}")
    print(f"report: {run.report}")
    if message == "stopped":
        print(f"resume: asyncrl run {run.config} checkpoint.resume=auto")
    return code
