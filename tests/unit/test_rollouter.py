"""The rollouter end to end on scripted engines and a real journal; the simulator covers the schedules."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.config import parse_config
from asyncrl.engines.base import GenerateRequest, Generation
from asyncrl.engines.scripted import ScriptedEngine
from asyncrl.rewards.base import RewardResult
from asyncrl.rollout.admission import Placement
from asyncrl.rollout.records import JournalError
from asyncrl.rollout.rollouter import Rollouter
from asyncrl.rollout.settings import RolloutSettings
from asyncrl.rollout.sinks import RingSink
from asyncrl.rollout.waiting import RolloutError
from asyncrl.types import FinishReason, Prompt, Sample
from tests.pace import idle
from tests.unit.rollout_job import FunctionReward, Job, ListSink, Prompts


async def test_a_run_from_start_to_acknowledged(tmp_path: Path) -> None:
    job = Job(tmp_path)
    await job.train_all()
    assert job.rollouter.complete
    assert [placement.position for _, placement in job.sink.groups] == list(range(6))
    assert sorted(group.group_id for group, _ in job.sink.groups) == list(range(6))
    assert job.prompts.asked == list(range(6))
    for group, placement in job.sink.groups:
        for sample in group.samples:
            assert 0 <= placement.batch_idx - sample.min_version <= 1
    counts = job.rollouter.counts()
    assert (counts.issued, counts.consumed) == (12, 12)
    await job.rollouter.on_checkpoint(3, oldest_kept=3)
    assert job.rollouter.counts().acknowledged == 12
    await job.stop()


async def test_every_batch_is_described(tmp_path: Path) -> None:
    job = Job(tmp_path, score=lambda p: RewardResult(0.5, {"format": 1.0}))
    await job.train_all()
    await job.stop()
    assert [batch.batch_idx for batch in job.batches] == [0, 1, 2]
    record = job.batches[0].records[0]
    assert record.prompt == f"{500 + record.prompt_idx} 7"
    assert len(record.completion.split()) == record.num_new_tokens == sum(s.num_tokens for s in record.spans)
    line = json.loads(json.dumps(record.to_json()))
    assert (line["reward"], line["reward_parts"], line["finish_reason"] in ("stop", "length")) == (
        0.5,
        {"format": 1.0},
        True,
    )
    stats = job.batches[0].stats
    assert (stats.num_samples, stats.reward_mean, stats.staleness_max) == (4, 0.5, 0)


async def test_interrupted_samples_keep_their_tokens_and_versions(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        engines=[ScriptedEngine("slow", token_interval_s=0.005)],
        max_staleness=2,
        stop_token_ids=(),
        max_new_tokens=40,
        groups_per_batch=1,
    )
    engine = job.engines[0]
    for version in (1, 2):  # as if two batches of another rollouter had been trained meanwhile
        await job.until(lambda n=version: job.rollouter.stats().num_requests == 6 * n)
        await idle(0.05)
        await engine.pause("abort")
        await engine.update_from_disk("", version, 1.0)
        await engine.resume()
    await job.until(lambda: len(job.sink.groups) >= 1)
    sample = job.sink.groups[0][0].samples[0]
    assert sorted(set(sample.sampled_versions.tolist())) == [0, 1, 2]
    assert sample.num_tokens - sample.num_prompt_tokens == 40
    assert job.rollouter.stats().num_interrupted >= 2
    await job.until(lambda: len(job.batches) >= 1)
    assert job.batches[0].stats.partial_max_span == 2
    assert job.batches[0].stats.partial_ratio == 1.0
    await job.stop()


# --- restarts ---


async def test_a_crash_goes_on_from_the_saved_prefix(tmp_path: Path) -> None:
    slow = ScriptedEngine("slow", token_interval_s=0.01)
    job = Job(tmp_path, engines=[slow], stop_token_ids=(), max_new_tokens=30)
    await job.until(lambda: job.rollouter.counts().running == 8)
    await idle(0.1)
    await slow.abort_all()  # what was sampled so far is saved
    await job.until(lambda: job.rollouter.stats().num_requests == 16)  # sent again, so it is durable
    saved = job.rollouter.stats().tokens_generated
    assert saved > 0
    await job.crash()
    again = Job(tmp_path, stop_token_ids=(), max_new_tokens=30)
    assert again.rollouter.counts().interrupted == 8
    await again.train_all()
    assert again.prompts.asked == [0, 1, 2, 3, 4, 5]
    total = 6 * 2 * 30
    assert again.rollouter.stats().tokens_generated == total - saved, "saved tokens are not sampled again"
    await again.stop()


async def test_stopping_saves_what_runs(tmp_path: Path) -> None:
    job = Job(tmp_path, engines=[ScriptedEngine("slow", token_interval_s=0.01)], stop_token_ids=())
    await job.until(lambda: job.rollouter.counts().running == 8)
    await idle(0.03)
    await job.stop()
    assert job.rollouter.stats().tokens_generated > 0
    again = Job(tmp_path, stop_token_ids=())
    assert again.rollouter.counts().interrupted > 0
    await again.crash()


async def test_an_older_checkpoint_gets_the_same_batches_again(tmp_path: Path) -> None:
    job = Job(tmp_path, num_batches=4)
    await job.train_batch()
    await job.rollouter.on_checkpoint(1, oldest_kept=0)
    await job.train_batch()
    await job.train_batch()
    first = {p.position: group for group, p in job.sink.groups}
    await job.crash()
    again = Job(tmp_path, num_batches=4, start_batch=1)
    await again.train_all()
    assert [p.position for _, p in again.sink.groups] == list(range(2, 8))
    for group, placement in again.sink.groups:
        if (before := first.get(placement.position)) is not None:
            assert group.group_id == before.group_id
            assert [s.token_ids.tolist() for s in group.samples] == [
                s.token_ids.tolist() for s in before.samples
            ]
    counts = again.rollouter.counts()
    assert (counts.issued, counts.acknowledged, counts.consumed) == (16, 4, 12)
    await again.stop()


async def test_a_checkpoint_that_the_journal_does_not_reach_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    await job.train_all()
    await job.rollouter.on_checkpoint(3, oldest_kept=2)
    await job.stop()
    with pytest.raises(JournalError, match=r"begins with batch 4.*belongs to another run"):
        Job(tmp_path, start_batch=4)


async def test_a_forgotten_checkpoint_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    await job.train_all()
    await job.rollouter.on_checkpoint(3, oldest_kept=2)
    await job.stop()
    with pytest.raises(JournalError, match="kept no tokens of batches before 2"):
        Job(tmp_path, start_batch=1)


# --- failures ---


async def test_an_engine_that_dies_is_replaced_by_its_sibling(tmp_path: Path) -> None:
    engines = [ScriptedEngine("e0", token_interval_s=0.005), ScriptedEngine("e1", token_interval_s=0.005)]
    job = Job(tmp_path, engines=engines, stop_token_ids=())
    await job.until(lambda: job.rollouter.counts().running == 8)
    engines[0].kill()
    job.engines.remove(engines[0])
    await job.train_all()
    stats = job.rollouter.stats()
    assert stats.num_engines == 1 and stats.num_lost_requests > 0
    await job.stop()


async def test_without_an_engine_the_last_failure_is_named(tmp_path: Path) -> None:
    engine = ScriptedEngine("only", token_interval_s=0.005)
    job = Job(tmp_path, engines=[engine])
    engine.kill("segmentation fault")
    assert await job.failure() == (
        "RolloutError: no engine is left; the last failure: engine only does not answer (segmentation fault)"
    )


async def test_a_replacement_engine_takes_over(tmp_path: Path) -> None:
    job = Job(tmp_path, engines=[ScriptedEngine("e0"), ScriptedEngine("e1")])
    await job.train_batch()
    job.rollouter.remove_engine("e0", "e0: quarantined")
    newcomer = ScriptedEngine("e0")
    await newcomer.update_from_disk("", 1, 1.0)
    job.rollouter.add_engine("e0", newcomer)
    job.engines[0] = newcomer
    await job.train_all()
    await job.stop()


async def test_an_engine_with_old_weights_is_an_error(tmp_path: Path) -> None:
    job = Job(tmp_path, engines=[ScriptedEngine("stale")])
    job.rollouter.on_version(1, 0)  # but the engine still serves version 0
    message = await job.failure()
    assert "stale attests policy version 0 to group 0, which began at version 1" in message


async def test_a_failed_reward_drops_its_group_and_lets_another_in(tmp_path: Path) -> None:
    bad = RewardResult(None, error="division by zero in reward.py:7")
    job = Job(tmp_path, score=lambda p: bad if p.prompt_idx in (1, 4) else RewardResult(1.0))
    await job.train_all()
    assert {group.group_id for group, _ in job.sink.groups} == {0, 2, 3, 5, 6, 7}
    counts = job.rollouter.counts()
    assert counts.dropped == {"reward_error": 4}
    assert (counts.issued, counts.consumed) == (16, 12)
    assert job.rollouter.stats().reward_errors >= 2
    await job.stop()
    again = Job(tmp_path, start_batch=3)
    assert again.rollouter.counts().dropped == {"reward_error": 4}
    await again.crash()


async def test_too_many_failed_rewards_end_the_run_with_the_last_one(tmp_path: Path) -> None:
    bad = RewardResult(None, error="division by zero in reward.py:7")
    job = Job(tmp_path, score=lambda p: bad, max_reward_error_rate=0.05)
    message = await job.failure()
    assert "the reward failed for 100% of the last 16 samples" in message
    assert message.endswith("division by zero in reward.py:7")


async def test_a_reward_that_is_not_finite_is_a_failed_one(tmp_path: Path) -> None:
    job = Job(tmp_path, score=lambda p: RewardResult(float("nan") if p.prompt_idx == 0 else 1.0))
    await job.train_all()
    assert job.rollouter.counts().dropped == {"reward_error": 2}
    await job.stop()


async def test_an_exception_anywhere_ends_the_run_as_it_is(tmp_path: Path) -> None:
    def broken(prompt: Prompt) -> RewardResult:
        raise KeyError("answer")

    job = Job(tmp_path, score=broken)
    assert await job.failure() == "KeyError: 'answer'"


async def test_a_sink_that_fails_ends_the_run(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.sink.closed = "the ring was closed"
    assert await job.failure() == "RuntimeError: the ring was closed"


async def test_waiting_for_a_dead_trainer_ends_and_names_it(tmp_path: Path) -> None:
    job = Job(tmp_path, progress_timeout_s=2.0)
    message = await job.failure()
    assert "waited 2 s for the trainer to publish policy version 1; the engines serve 0" in message
    assert len(job.sink.groups) == 4, "what admission allows was done before"


async def test_waiting_for_a_hung_reward_ends_and_names_it(tmp_path: Path) -> None:
    job = Job(tmp_path, reward_timeout_s=0.3)
    hang = asyncio.Event()

    async def never(prompt: Prompt, completion: str, token_ids: tuple[int, ...]) -> RewardResult:
        await hang.wait()
        return RewardResult(0.0)

    job.rollouter._processor._reward.score = never  # type: ignore[method-assign]
    assert "waited 0.3 s for the reward of prompt" in await job.failure()


# --- pauses ---


async def test_drain_waits_for_running_samples_and_starts_none(tmp_path: Path) -> None:
    engines = [ScriptedEngine("e0", token_interval_s=0.005)]
    job = Job(tmp_path, engines=engines, stop_token_ids=(), max_staleness=3, num_batches=9)
    await job.until(lambda: job.rollouter.counts().running > 0)
    job.rollouter.set_paused(True)
    await job.rollouter.drained(30.0)
    assert (await engines[0].load()).num_running == 0
    requests = job.rollouter.stats().num_requests
    job.rollouter.on_version(1, 1) if len(job.sink.groups) >= 2 else None
    await idle(0.05)
    assert job.rollouter.stats().num_requests == requests
    job.rollouter.set_paused(False)
    await job.until(lambda: job.rollouter.stats().num_requests > requests or len(job.sink.groups) >= 8)
    await job.stop()


async def test_a_drain_that_takes_too_long_names_the_stragglers(tmp_path: Path) -> None:
    job = Job(tmp_path, engines=[ScriptedEngine("e0", token_interval_s=5.0)])
    await job.until(lambda: job.rollouter.counts().running == 8)
    job.rollouter.set_paused(True)
    with pytest.raises(RolloutError, match=r"waited 0\.2 s for sample 0 of prompt 0 on e0; sample 1 of"):
        await job.rollouter.drained(0.2)
    await job.crash()


# --- telling it nonsense ---


async def test_a_version_that_goes_back_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path)
    await job.train_batch()
    with pytest.raises(RolloutError, match="policy version 0 came after 1"):
        job.rollouter.on_version(0, 1)
    await job.crash()


async def test_a_batch_that_was_never_released_cannot_be_consumed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with pytest.raises(RolloutError, match="reports batch 0 as taken, of which only 0 groups of 2"):
        job.rollouter.on_version(1, 1)
    with pytest.raises(RolloutError, match="a checkpoint of 2 batches, of which 0 are trained"):
        await job.rollouter.on_checkpoint(2, 0)
    await job.crash()


async def test_stats_count_busy_engines(tmp_path: Path) -> None:
    job = Job(tmp_path, engines=[ScriptedEngine("e0", token_interval_s=0.01)])
    began = asyncio.get_running_loop().time()
    await job.until(lambda: len(job.sink.groups) == 4)
    await idle(0.2)
    stats = job.rollouter.stats()
    assert 0 < stats.engine_busy_s < asyncio.get_running_loop().time() - began - 0.15
    assert (stats.released_batches, stats.next_prompt_idx, stats.groups_running) == (2, 4, 0)
    await job.crash()


# --- edges ---


class RecordingRing:
    def __init__(self) -> None:
        self.keys: list[tuple[str, int]] = []

    async def aput_many(
        self, samples: Sequence[Sample], *, keys: Sequence[tuple[str, int]], timeout: float
    ) -> int:
        assert len(samples) == len(keys)
        self.keys += keys
        return len(samples)


async def test_ring_keys_grow_with_the_position(tmp_path: Path) -> None:
    job = Job(tmp_path)
    await job.train_all()
    await job.stop()
    rings = [RecordingRing(), RecordingRing()]
    sink = RingSink(rings, "uid", timeout_s=1.0)
    for position, (group, _) in enumerate(job.sink.groups):
        await sink.put_group(group, Placement(position, position // 2, position % 2))
    for ring_idx, ring in enumerate(rings):
        assert ring.keys == [("uid", 2 * p + s) for p in range(ring_idx, 6, 2) for s in (0, 1)]


async def test_seeds_are_one_per_sample_and_the_same_after_a_cut(tmp_path: Path) -> None:
    requests: list[GenerateRequest] = []

    class Watched(ScriptedEngine):
        async def generate(self, request: GenerateRequest, timeout_s: float) -> Generation:
            requests.append(request)
            return await super().generate(request, timeout_s)

    job = Job(tmp_path, engines=[Watched("e0")], sampling_seed=7, stop_token_ids=())
    await job.train_all()
    await job.stop()
    seeds: dict[tuple[int, ...], set[int | None]] = {}
    for request in requests:
        seeds.setdefault(request.token_ids[:2], set()).add(request.seed)
    assert all(len(found) == 2 for found in seeds.values()), "two samples of each prompt"
    assert len({seed for found in seeds.values() for seed in found}) == 12


def test_settings_come_from_the_configuration(tmp_path: Path) -> None:
    config = parse_config(
        {
            "model": {"path": str(tmp_path)},
            "data": {"reasoning_gym": "chain_sum"},
            "train": {"prompts_per_step": 6, "samples_per_prompt": 3, "steps": 5},
            "parallel": {"dp": 2},
            "rollout": {"max_staleness": 2, "seed": 9},
        }
    )
    settings = RolloutSettings.from_config(config, (2,))
    assert (settings.groups_per_batch, settings.samples_per_group, settings.num_rings) == (6, 3, 2)
    assert (settings.max_staleness, settings.num_batches, settings.sampling_seed) == (2, 5, None)
    assert RolloutSettings.from_config(config, (2,), seeded_engines=True).sampling_seed == 9
    assert settings.sample_ids(2) == range(6, 9)


async def test_an_engine_error_finish_drops_the_group(tmp_path: Path) -> None:
    class Broken(ScriptedEngine):
        async def generate(self, request: GenerateRequest, timeout_s: float) -> Generation:
            result = await super().generate(request, timeout_s)
            first_prompt = request.token_ids[0] == 500
            return Generation(result.segments, FinishReason.ERROR) if first_prompt else result

    job = Job(tmp_path, engines=[Broken("e0")])
    await job.train_all()
    assert job.rollouter.counts().dropped == {"engine_error": 2}
    await job.stop()


async def test_unused_journal_reads_nothing(tmp_path: Path) -> None:
    """A rollouter of an empty journal asks for no prompt before it runs."""
    job = Job(tmp_path)
    prompts = Prompts()
    Rollouter(
        engines={},
        prompts=prompts,
        reward=FunctionReward(lambda p: RewardResult(0.0)),
        decode=str,
        sink=ListSink(),
        journal=job.journal,
        settings=job.settings,
    )
    assert prompts.asked == []
    await job.crash()


async def test_a_hung_engine_does_not_keep_the_rollouter_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(ScriptedEngine):
        async def abort(self, rid: str) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("asyncrl.rollout.process.ABORT_TIMEOUT_S", 0.1)
    monkeypatch.setattr("asyncrl.rollout.rollouter.WIND_DOWN_S", 0.1)
    job = Job(tmp_path, engines=[Deaf("e0", token_interval_s=10.0)])
    await job.until(lambda: job.rollouter.counts().running == 8)
    await job.stop()
