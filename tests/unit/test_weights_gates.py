"""The planner's gates: sixty layout pairs of every family, and the largest models on up to 1,024 engine GPUs.

`python -m scripts.plan_sweep` runs many more.
"""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from asyncrl.weights.cost import Links
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.model_plan import PlanRequest, WeightPlan, plan_model
from asyncrl.weights.splits import EngineSplit, TrainerSplit, engine_split, trainer_split
from tests.unit.model_sizes import FAMILIES, pairs, reduced

MODELS = Path(__file__).parents[2] / "examples" / "models"
LINKS = Links(50e9, 150e-6)
QWEN3 = ("qwen3-235b-a22b", "tp=4,pp=4,cp=2,ep=16")
DEEPSEEK = ("deepseek-v3", "pp=16,ep=16")
KIMI = ("kimi-k2", "tp=8,pp=8,cp=4,ep=32")


def check_gates(plan: WeightPlan) -> None:
    assert plan.figures()["received_over_needed"] == 1.0
    assert plan.traffic.send_balance <= 1.02 * plan.traffic.skew
    assert plan.chosen.simulated_s <= 1.10 * plan.chosen.bound_s
    assert plan.chosen.staging_bytes == 2 * plan.chosen.bucket_bytes
    least = min(item.bound_s for item in plan.estimates)
    assert plan.chosen.simulated_s <= 1.2 * max(least, 2 * LINKS.latency)


@pytest.mark.parametrize("family", FAMILIES)
def test_sixty_layout_pairs(family: str) -> None:
    found = pairs(family)
    assert len(set(found)) == 60
    for idx, (trainer, engine) in enumerate(found):
        check_gates(plan_model(PlanRequest(reduced(family), trainer, engine, 1 + idx % 4, LINKS)))


@pytest.mark.parametrize(
    ("model", "engine", "num_replicas", "least_s", "most_s"),
    [
        (QWEN3, "tp=32,ep=8", 2, 0.30, 0.33),
        (QWEN3, "tp=16,ep=16", 64, 0.58, 0.65),
        (DEEPSEEK, "tp=32,ep=32", 8, 0.87, 0.97),
        (DEEPSEEK, "tp=16,ep=4", 64, 1.7, 1.95),
        (KIMI, "tp=32,ep=8", 8, 1.32, 1.48),
        (KIMI, "tp=16,ep=16", 64, 2.6, 2.86),
    ],
)
def test_large_models(
    model: tuple[str, str], engine: str, num_replicas: int, least_s: float, most_s: float
) -> None:
    geometry = ModelGeometry.from_hf(MODELS / model[0])
    splits = trainer_split(model[1]), engine_split(engine)
    plan = plan_model(PlanRequest(geometry, *splits, num_replicas, LINKS))
    check_gates(plan)
    assert least_s <= plan.chosen.bound_s <= plan.chosen.simulated_s <= most_s
    assert plan.planning_s < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # kilobytes


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [("qwen3-235b-a22b", 235.1e9), ("deepseek-v3", 671.0e9), ("kimi-k2", 1026.4e9)],
)
def test_the_examples_have_their_models_size(model: str, num_parameters: float) -> None:
    request = PlanRequest(
        ModelGeometry.from_hf(MODELS / model), TrainerSplit(), EngineSplit(), 1, Links(1e9, 0.0), "p2p"
    )
    assert plan_model(request).model_bytes == pytest.approx(2 * num_parameters, rel=1e-3)
