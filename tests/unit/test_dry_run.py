"""Batch arithmetic, memory and the resolved configuration, against numbers worked out by hand."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config, parse_config
from asyncrl.launch.dry_run import dry_run, layout, resolved_toml
from asyncrl.launch.estimate import batch_equation, engine_memory, memory_estimate, stage_layers
from asyncrl.weights.geometry import ModelGeometry
from tests.unit.test_preflight import write_model

SMOLLM2_PARAMETERS = 134_515_008


def configure(model: Path, /, **sections: Any) -> Config:
    return parse_config({"model": {"path": str(model)}, "data": {"path": "rows.jsonl"}, **sections})


def test_batch_equation() -> None:
    config = configure(
        Path("m"),
        parallel={"dp": 2},
        rollout={"max_prompt_tokens": 200, "max_new_tokens": 56},
        train={"microbatch_tokens": 512},
    )
    assert batch_equation(config) == (
        "16 prompts x 4 samples = 64 sequences = 2 replicas x 32 sequences;"
        " 32 sequences of at most 256 tokens = at most 16 micro-batches of 512 tokens per replica and step"
    )


@pytest.mark.parametrize(
    ("parallel", "copies_of_embedding"),
    [({}, 1), ({"dp": 4}, 1), ({"pp": 2}, 2), ({"pp": 5, "vpp": 3}, 2), ({"tp": 3}, 1)],
)
def test_parameters_are_counted_exactly(
    tmp_path: Path, parallel: dict[str, int], copies_of_embedding: int
) -> None:
    """All stages together hold the model once, plus a tied head's copy where the last stage needs one."""
    config = configure(write_model(tmp_path / "m"), parallel=parallel)
    geometry = ModelGeometry.from_hf(config.model.path)
    ranks = memory_estimate(config, geometry)
    embedding = 49152 * 576
    norms = 576 * (2 * 30 + 1)
    tp = config.parallel.tp
    expected = (SMOLLM2_PARAMETERS - norms) // tp + norms + (copies_of_embedding - 1) * embedding // tp
    assert sum(rank.num_parameters for rank in ranks) == expected


def test_optimizer_states_by_dtype_and_cut(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    geometry = ModelGeometry.from_hf(model)

    def optimizer(**sections: Any) -> int:
        return memory_estimate(configure(model, **sections), geometry)[0].optimizer

    assert optimizer() == 8 * SMOLLM2_PARAMETERS
    assert optimizer(model={"path": str(model), "dtype": "bfloat16"}) == 12 * SMOLLM2_PARAMETERS
    assert optimizer(parallel={"dp": 4}) == 2 * SMOLLM2_PARAMETERS
    assert optimizer(parallel={"dp": 4, "distributed_optimizer": False}) == 8 * SMOLLM2_PARAMETERS


def test_engine_memory(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    memory = engine_memory(configure(model, engine={"max_total_tokens": 1000}), ModelGeometry.from_hf(model))
    assert memory.parameters == 4 * SMOLLM2_PARAMETERS
    assert memory.kv_cache == 1000 * 30 * 2 * 3 * 64 * 4


@pytest.mark.parametrize(
    ("weights", "trainer_copies", "engine_copies"),
    [
        ({}, 0, 0),
        ({"delta": True}, 1, 0),
        ({"overlap": True}, 1, 0),
        ({"delta": True, "overlap": True}, 2, 0),
        ({"stage": "device"}, 0, 1),
        ({"stage": "host", "overlap": True}, 1, 1),
    ],
)
def test_copies_for_publications_count(
    tmp_path: Path, weights: dict[str, Any], trainer_copies: int, engine_copies: int
) -> None:
    model = write_model(tmp_path / "m")
    geometry, size = ModelGeometry.from_hf(model), 4 * SMOLLM2_PARAMETERS
    plain, config = configure(model), configure(model, weights=weights)
    [before], [after] = (memory_estimate(each, geometry) for each in (plain, config))
    assert after.total - before.total == trainer_copies * size
    engine = engine_memory(config, geometry).total - engine_memory(plain, geometry).total
    assert engine == engine_copies * size


def test_stages_hold_every_layer_once() -> None:
    assert stage_layers(8, 2, 2, 0) == ((1, 2), (5, 6))
    assert stage_layers(8, 2, 2, 1) == ((3, 4), (7, 8))
    chunks = [stage_layers(30, 5, 3, rank) for rank in range(5)]
    assert sorted(itertools.chain(*itertools.chain(*chunks))) == list(range(1, 31))


def test_dry_run_of_a_world_that_is_not_there(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", num_attention_heads=32, num_key_value_heads=8, hidden_size=2048)
    text = dry_run(configure(model, parallel={"tp": 8, "pp": 5, "dp": 2, "sequence_parallel": True}))
    assert "trainer: 80 ranks = tp 8 x pp 5 x cp 1 x dp 2 (sequence parallel, distributed optimizer)" in text
    assert text.count("trainer, stage") == 5
    assert "runs/run" in text


def test_dry_run_names_what_keeps_memory_unknown(tmp_path: Path) -> None:
    assert "unknown: " in dry_run(configure(tmp_path / "gone"))
    model = write_model(tmp_path / "m")
    assert "unknown: parallel.tp = 2 cannot cut" in dry_run(configure(model, parallel={"tp": 2}))


def test_resolved_configuration_loads_to_itself() -> None:
    config = parse_config(
        {
            "model": {"path": 'with "quotes" and ünïcode'},
            "data": {
                "reasoning_gym": "basic_arithmetic",
                "task_args": {"min_terms": 2, "words": ["a", True, 1.5]},
            },
            "engine": {"extra_args": ["--x", "a b"]},
            "rollout": {"temperature": 0.7},
        }
    )
    assert parse_config(tomllib.loads(resolved_toml(config))) == config
    assert "\n" in layout(config)
