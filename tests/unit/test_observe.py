"""What a run leaves behind and how it is shown: directory, metrics, events, displays, report, memory."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from asyncrl.observe.charts import Axis, Series, line_chart, number, smoothed, ticks
from asyncrl.observe.events import EventLog, read_events
from asyncrl.observe.jsonl import JsonlTail, append_line, json_line
from asyncrl.observe.memory import GIB, PeakMemory
from asyncrl.observe.metrics import ALIASES, KEYS, MetricsWriter, StepMetrics, read_metrics
from asyncrl.observe.progress import Progress, render
from asyncrl.observe.report import write_report
from asyncrl.observe.rundir import RunDir, RunDirError, create_run, open_run, start_attempt
from asyncrl.observe.show import read_samples, show
from asyncrl.observe.summary import Summary, read_summary, write_summary
from asyncrl.observe.timeline import step_spans
from asyncrl.observe.top import top
from asyncrl.observe.view import RunFollower, duration, sparkline
from tests.unit.fake_run import START, fake_step, write_fake_run

CONTRACT = {
    "step", "policy_version", "reward/mean", "loss", "grad_norm", "staleness/mean", "staleness/max",
    "partial/ratio", "partial/max_span", "mismatch/kl", "tokens/trained", "tokens/generated", "time/step",
    "time/publish", "time/engine_paused", "trainer/idle_ratio", "engine/idle_ratio", "ring/depth",
}  # fmt: skip


def some_step(step: int = 3, **changes: object) -> StepMetrics:
    import random

    return dataclasses.replace(fake_step(step, random.Random(step)), **changes)  # type: ignore[arg-type]


def text_of(width: int = 120) -> Console:
    return Console(file=StringIO(), width=width)


def output(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return write_fake_run(tmp_path_factory.mktemp("runs") / "demo")


class TestRunDir:
    def test_a_used_name_is_refused_with_the_next_free_one(self, tmp_path: Path) -> None:
        create_run(tmp_path / "runs" / "a")
        (tmp_path / "runs" / "a-2").mkdir()
        with pytest.raises(RunDirError, match=r"a is in use.*name=a-3.*checkpoint\.resume="):
            create_run(tmp_path / "runs" / "a")

    def test_attempts_count_up(self, tmp_path: Path) -> None:
        run = create_run(tmp_path / "a")
        assert [start_attempt(run).name for _ in range(3)] == ["attempt_1", "attempt_2", "attempt_3"]

    def test_an_unknown_run_names_those_there(self, tmp_path: Path) -> None:
        create_run(tmp_path / "a")
        with pytest.raises(RunDirError, match="no run of that name; runs there: a"):
            open_run(tmp_path / "b")


class TestMetrics:
    def test_keys_are_the_contract(self) -> None:
        assert set(KEYS.values()) == CONTRACT
        assert set(ALIASES) <= CONTRACT

    def test_round_trip(self) -> None:
        metrics = some_step()
        assert StepMetrics.from_json(json.loads(json.dumps(metrics.to_json()))) == metrics

    def test_an_extra_may_not_hide_a_key(self) -> None:
        with pytest.raises(ValueError, match="loss"):
            some_step(extra={"loss": 1.0}).to_json()

    def test_a_missing_key_is_an_error(self) -> None:
        record = some_step().to_json()
        del record["loss"]
        with pytest.raises(KeyError, match="loss"):
            StepMetrics.from_json(record)

    def test_files(self, tmp_path: Path) -> None:
        """What is written is what both readers see: our own, and TensorBoard's."""
        run = create_run(tmp_path / "a")
        writer = MetricsWriter(run.path, tensorboard=True)
        for metrics in (some_step(1), some_step(2), some_step(2, loss=9.0), some_step(3, loss=math.nan)):
            writer.write(metrics)
        writer.close()
        assert "NaN" not in run.metrics.read_text()
        steps = read_metrics(run)
        assert [step.step for step in steps] == [1, 2, 3]
        assert steps[1].loss == 9.0
        assert math.isnan(steps[2].loss)
        assert steps[0].extra["time/unix"] > 0

        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        accumulator = EventAccumulator(str(run.tensorboard))
        accumulator.Reload()
        assert CONTRACT - {"step"} <= set(accumulator.Tags()["scalars"])
        rewards = accumulator.Scalars("reward/mean")
        assert [point.step for point in rewards] == [1, 2, 2, 3]
        assert rewards[0].value == pytest.approx(steps[0].reward_mean)

    def test_tensorboard_drops_what_a_resume_repeats(self, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        run = create_run(tmp_path / "a")
        for first, last in ((1, 5), (3, 4)):
            writer = MetricsWriter(run.path, tensorboard=True)
            for step in range(first, last + 1):
                writer.write(some_step(step))
            writer.close()
            (file,) = [f for f in run.tensorboard.iterdir() if not f.name.startswith("events.out.attempt")]
            os.rename(file, run.tensorboard / f"events.out.attempt{first}.tfevents.{first}")
        accumulator = EventAccumulator(str(run.tensorboard))
        accumulator.Reload()
        assert [point.step for point in accumulator.Scalars("loss")] == [1, 2, 3, 4]


class TestJsonl:
    def test_a_torn_last_line_waits_for_its_end(self, tmp_path: Path) -> None:
        file = tmp_path / "x.jsonl"
        tail = JsonlTail(file)
        assert tail.poll() == []
        file.write_text('{"a": 1}\n{"a":')
        assert tail.poll() == [{"a": 1}]
        assert tail.poll() == []
        with file.open("a") as more:
            more.write(" 2}\n")
        assert tail.poll() == [{"a": 2}]

    def test_writers_do_not_mix_lines(self, tmp_path: Path) -> None:
        file = tmp_path / "x.jsonl"

        def write(name: int) -> None:
            for idx in range(200):
                append_line(file, {"name": name, "idx": idx, "text": "x" * 500})

        threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        records = JsonlTail(file).poll()
        for name in range(4):
            assert [record["idx"] for record in records if record["name"] == name] == list(range(200))

    def test_events(self, tmp_path: Path) -> None:
        run = create_run(tmp_path / "a")
        log = EventLog(run.path)
        log.phase("starting")
        log.write("death", process="engine 0", reason="SIGKILL", rss=math.inf)
        phase, death = read_events(run)
        assert (phase.kind, phase.fields) == ("phase", {"name": "starting"})
        assert death.fields == {"process": "engine 0", "reason": "SIGKILL", "rss": None}
        assert death.time >= phase.time


def test_summary(tmp_path: Path) -> None:
    run = create_run(tmp_path / "a")
    with pytest.raises(RunDirError, match="has not finished"):
        read_summary(run)
    summary = Summary(0.25, None, 3, 12.5, 8.5, 4, 192, 190, 2)
    write_summary(run, summary)
    assert read_summary(run) == summary
    record = json.loads(run.summary.read_text())
    assert record["heldout/before"] == 0.25 and record["heldout/after"] is None
    assert {"steps", "seconds", "peak_rss_gib", "publications", "samples_issued"} <= record.keys()


class TestMemory:
    HOLD = """
import os, sys
block = bytearray(64 << 20)
block[::4096] = b"x" * len(block[::4096])
if len(sys.argv) > 1:
    os.fork()
os.write(1, b"ready\\n")
sys.stdin.read()
"""

    def peak(self, *arguments: str) -> int:
        holder = subprocess.Popen(
            [sys.executable, "-c", self.HOLD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert holder.stdout is not None and holder.stdin is not None
        for _ in range(1 + len(arguments)):
            assert holder.stdout.readline() == b"ready\n"
        memory = PeakMemory()
        memory.sample([holder.pid, holder.pid])
        before_end = memory.peak_bytes
        holder.stdin.close()
        holder.wait(timeout=30)
        assert memory.sample([holder.pid]) == 0
        assert memory.peak_bytes == before_end
        assert memory.peak_gib == before_end / GIB
        return before_end

    def test_what_a_fork_shares_counts_once(self) -> None:
        alone, forked = self.peak(), self.peak("fork")
        assert alone > 64 << 20
        assert forked - alone < 32 << 20, "the child's 64 MiB are the parent's pages"


class TestView:
    def test_a_run_in_progress(self, tmp_path: Path) -> None:
        run = write_fake_run(tmp_path / "a", 12, finished=False)
        follower = RunFollower(run)
        events, steps = follower.poll()
        assert len(steps) == 12 and follower.poll() == ([], [])
        view = follower.view
        assert view.end is None and events[0].fields["name"] == view.phases[0].fields["name"]
        pace = sum(step.time_step for step in steps[-5:]) / 5
        assert view.seconds_left == pytest.approx((30 - 12) * pace)
        generated = sum(step.tokens_generated for step in steps[-5:])
        assert view.generated_per_second == pytest.approx(generated / (5 * pace))

    def test_a_resume_begins_a_new_attempt_and_rewrites_steps(self, tmp_path: Path) -> None:
        run = write_fake_run(tmp_path / "a", 12, finished=False)
        log = EventLog(run.path)
        log.write("stopped", message="SIGINT")
        follower = RunFollower(run)
        follower.poll()
        assert follower.view.end is not None
        log.phase("resuming")
        append_line(run.metrics, some_step(11).to_json())
        follower.poll()
        assert follower.view.end is None
        assert [event.fields["name"] for event in follower.view.phases] == ["resuming"]
        assert [step.step for step in follower.view.steps] == list(range(1, 12))

    def test_live_panel(self, finished: RunDir, tmp_path: Path) -> None:
        follower = RunFollower(finished)
        follower.poll()
        console = text_of()
        console.print(render(follower.view, START + 500))
        for text in ("step 30/30", "reward 0.8", "staleness", "busy", "32.8%  →  after 79.7%", "finished"):
            assert text in output(console), text
        starting = RunFollower(write_fake_run(tmp_path / "s", 0, finished=False))
        starting.poll()
        console = text_of()
        console.print(render(starting.view, START + 100))
        assert re.search(r"✓ +starting engines and trainer +1 m 01 s", output(console))

    def test_plain_lines(self, finished: RunDir) -> None:
        console = text_of()
        with Progress(finished, "auto", console) as progress:
            progress.update()
        lines = output(console).splitlines()
        assert lines[0] == "[    0.0 s] checking configuration and model"
        assert "64 held-out tasks, before: 32.8% right" in output(console)
        assert sum(line.startswith("step ") for line in lines) == 30
        assert re.match(r"step  3/30  reward 0\.\d{3}  staleness 0\.\d\d \(max 1\)  partial \d+%", lines[9])

    def test_a_resumed_run_does_not_repeat_its_history(self, finished: RunDir) -> None:
        console = text_of()
        with Progress(finished, "plain", console) as progress:
            progress.skip_history()
            EventLog(finished.path).phase("starting Ray")
            progress.update()
        assert output(console).splitlines() == ["[    0.0 s] starting Ray"]

    def test_top_shows_a_finished_run_and_returns(self, finished: RunDir) -> None:
        console = text_of()
        top(finished.path, console, once=True)
        assert "finished" in output(console)
        with pytest.raises(RunDirError):
            top(finished.path.with_name("none"), console)

    def test_sparkline_and_duration(self) -> None:
        assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
        assert len(sparkline([float(i) for i in range(100)], 40)) <= 40
        assert sparkline([2.0, 2.0, math.nan], 8) == "▄▄"
        assert sparkline([], 8) == ""
        assert [duration(s) for s in (8.24, 59.96, 185, 3725)] == ["8.2 s", "60.0 s", "3 m 05 s", "1 h 02 m"]


class TestShow:
    def test_samples_come_sorted_and_whole(self, finished: RunDir) -> None:
        samples = read_samples(finished, 2)
        assert [(s.group_id, s.sample_idx) for s in samples] == [
            (g, i) for g in range(4, 8) for i in range(4)
        ]
        assert sum(count for _, count in samples[0].spans) == samples[0].num_new_tokens

    def test_output(self, finished: RunDir) -> None:
        console = text_of()
        show(finished.path, 12, console, max_groups=2)
        for text in ("group 44", "group 45", "Calculate", "by version 11", "2 more groups of step 12"):
            assert text in output(console), text
        with pytest.raises(RunDirError, match="no samples of step 99; steps 1 to 30 are there"):
            show(finished.path, 99, console)

    def test_any_character_of_a_completion_stays_in_its_line(self, tmp_path: Path) -> None:
        completion = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA1), 0x2028, 0x2029, 0xFFFD, 0x1F600]))
        run = write_fake_run(tmp_path / "a", 1, finished=False)
        file = run.rollout_file(1)
        record = json.loads(file.read_text().splitlines()[0]) | {"completion": completion}
        file.write_text(json_line(record))
        assert len(file.read_text().splitlines()) == 1
        assert [sample.completion for sample in read_samples(run, 1)] == [completion]
        show(run.path, 1, text_of())
        write_report(run)

    def test_markup_in_a_sample_is_text(self, tmp_path: Path) -> None:
        run = write_fake_run(tmp_path / "a", 1, finished=False)
        file = run.rollout_file(1)
        record = json.loads(file.read_text().splitlines()[0]) | {"completion": "[bold]x[/nothing] <b>&"}
        file.write_text(json.dumps(record) + "\n")
        console = text_of()
        show(run.path, 1, console)
        assert "[bold]x[/nothing] <b>&" in output(console)
        assert "[bold]x[/nothing] &lt;b&gt;&amp;" in write_report(run).read_text()


class TestCharts:
    @pytest.mark.parametrize(
        ("low", "high"), [(0, 1), (-0.3, 0.7), (3, 3), (0, 1e-6), (12, 98_000), (0, 0), (0.2999, 0.3)]
    )
    def test_ticks_enclose_the_data_at_even_distances(self, low: float, high: float) -> None:
        marks = ticks(low, high)
        assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 8
        gaps = {round((b - a) / (marks[1] - marks[0]), 6) for a, b in itertools.pairwise(marks)}
        assert gaps == {1.0}

    def test_points_lie_where_the_axes_say(self) -> None:
        svg = ElementTree.fromstring(line_chart([1, 2, 3], [Series("a", [0.0, 1.0, 0.5], 1)], y_label="y"))
        (path,) = [element for element in svg if element.get("class") == "line s1"]
        points = [tuple(map(float, p)) for p in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.get("d", ""))]
        assert points[0][0] < points[1][0] < points[2][0]
        assert points[1][1] < points[2][1] < points[0][1], "higher values lie higher, at smaller y"
        assert points[2][1] == pytest.approx((points[0][1] + points[1][1]) / 2, abs=0.2)

    def test_gaps_steps_and_odd_sizes(self) -> None:
        broken = line_chart([1, 2, 3, 4], [Series("a", [1.0, math.nan, 2.0, 3.0], 1)], y_label="<y>")
        assert broken.count("M") >= 2 and "&lt;y&gt;" in broken
        ElementTree.fromstring(broken)
        ElementTree.fromstring(
            line_chart([7], [Series("a", [1.0], 1), Series("b", [math.nan], 2)], y_label="y")
        )

    def test_numbers(self) -> None:
        assert [number(v) for v in (0, 0.25, 1200.0, 3e-5, math.nan)] == [
            "0",
            "0.25",
            "1200",
            "3e-05",
            "none",
        ]
        assert number(0.8, percent=True) == "80%"
        assert smoothed([1, 3, math.nan, 5], 2) == [1, 2, 3, 5]
        assert Axis(0, 10, 100, 0).at(2.5) == 75


class _References(HTMLParser):
    """Collects everything by which a page could reach outside itself, and the nesting of its tags."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.references += [f"{tag} {key}" for key, _ in attributes if key in ("src", "href", "srcset")]
        if tag in ("script", "link", "iframe", "img"):
            self.references.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Closed in itself."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"


class TestReport:
    def test_one_file_that_needs_nothing_else(self, finished: RunDir) -> None:
        page = write_report(finished).read_text()
        parser = _References()
        parser.feed(page)
        assert parser.references == [] and parser.open == []
        assert "url(" not in page and "@import" not in page
        for text in (
            "32.8%",
            "79.7%",
            "Reward",
            "Staleness",
            "Mismatch",
            "Timeline",
            "peak memory",
            "9.4 GiB",
        ):
            assert text in page, text
        assert page.count("<svg") == 7

    def test_a_run_in_progress_can_be_reported(self, tmp_path: Path) -> None:
        run = write_fake_run(tmp_path / "a", 1, finished=False)
        assert "not finished" in write_report(run).read_text()

    def test_a_run_that_failed_at_its_start_says_why(self, tmp_path: Path) -> None:
        run = write_fake_run(tmp_path / "b", 0, finished=False)
        log = EventLog(run.path)
        log.write("death", process="engine 0", reason="SIGKILL, out of memory")
        log.write("failed", message="engine 0 died")
        page = write_report(run).read_text()
        for text in ("engine 0 died: SIGKILL, out of memory", ">failed<", "starting Ray"):
            assert text in page, text

    def test_a_long_run_stays_a_small_file(self, tmp_path: Path) -> None:
        run = write_fake_run(tmp_path / "a", 1, finished=False)
        for step in range(2, 2002):
            append_line(run.metrics, some_step(step).to_json())
        page = write_report(run).read_text()
        assert len(page) < 600_000
        assert "step 2001\nmean:" in page

    def test_spans_of_a_step_fill_it(self) -> None:
        metrics = some_step(4, extra={"time/unix": START})
        spans = step_spans(metrics)
        for lane in ("trainer", "engines"):
            mine = [span for span in spans if span.lane == lane]
            assert mine[0].start == START - metrics.time_step and mine[-1].end == START
            assert all(a.end == b.start for a, b in itertools.pairwise(mine))
        waited = next(span for span in spans if span.activity == "wait")
        assert waited.end - waited.start == pytest.approx(metrics.trainer_idle_ratio * metrics.time_step)
