"""Plans of the large example models on 64 to 1,024 engine GPUs: `python -m scripts.plan_sweep` (minutes).

Prints the table of docs/plan.md and exits with 1 where a gate fails: received / needed = 1, the most sent at
most 1.02 times the least that is possible, the simulated time at most 1.10 times the bound.
"""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.weights.cost import Links
from asyncrl.weights.geometry import ModelGeometry
from asyncrl.weights.model_plan import PlanRequest, WeightPlan, plan_model
from asyncrl.weights.splits import engine_split, trainer_split

MODELS = Path(__file__).resolve().parents[1] / "examples" / "models"
TRAINERS = {
    "qwen3-235b-a22b": ("tp=4,pp=4,cp=2,ep=16", "tp=2,pp=8,cp=2,ep=8", "tp=4,pp=16,ep=32"),
    "deepseek-v3": ("pp=16,ep=16", "tp=4,pp=8,ep=64", "tp=2,pp=16,cp=2,ep=8"),
    "kimi-k2": ("tp=8,pp=8,cp=4,ep=32", "pp=16,ep=16", "tp=4,pp=4,cp=2,ep=64"),
}
ENGINES = ("tp=16,ep=16", "tp=16,ep=4", "tp=32,ep=8", "tp=32,ep=32")
NUM_GPUS = (64, 256, 1024)


def passes(plan: WeightPlan) -> bool:
    balanced = plan.traffic.send_balance <= 1.02 * plan.traffic.skew
    exact = plan.figures()["received_over_needed"] == 1.0
    return balanced and exact and plan.chosen.simulated_s <= 1.10 * plan.chosen.bound_s


def main() -> int:
    failed = 0
    for model, trainers in TRAINERS.items():
        geometry = ModelGeometry.from_hf(MODELS / model)
        for trainer in trainers:
            for engine in map(engine_split, ENGINES):
                for num_gpus in NUM_GPUS:
                    replicas, links = num_gpus // engine.tp, Links(50e9, 150e-6)
                    plan = plan_model(PlanRequest(geometry, trainer_split(trainer), engine, replicas, links))
                    failed += not passes(plan)
                    chosen, traffic = plan.chosen, plan.traffic
                    print(
                        f"| {model} | {trainer} | {replicas} x tp={engine.tp},ep={engine.ep}"
                        f" | {chosen.strategy} | {chosen.bound_s:.3f} | {chosen.simulated_s:.3f}"
                        f" | {plan.gather_broadcast_s:.1f} | {traffic.send_balance:.3f} ({traffic.skew:.3f})"
                        f" | {plan.planning_s:.1f} |{'' if passes(plan) else ' FAILED'}",
                        flush=True,
                    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
