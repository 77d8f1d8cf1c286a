"""What `asyncrl plan weights` prints: both sides, the strategies side by side, the plan that was chosen.

WeightPlan -> rich tables
"""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from asyncrl.weights.model_plan import WeightPlan
from asyncrl.weights.splits import stage_sizes
from asyncrl.weights.tables import Ints


def plan_tables(plan: WeightPlan) -> Group:
    """The whole answer, in three tables."""
    return Group(_sides(plan), _strategies(plan), _chosen(plan))


def _sides(plan: WeightPlan) -> Table:
    request = plan.request
    table = Table(
        "side", "ranks", "layout", "bytes of a rank: least, mean, most", title="weights, one version"
    )
    trainer, copies = request.trainer, _copies(plan)
    cut = (
        f"tp {trainer.tp} pp {trainer.pp} vpp {trainer.vpp} cp {trainer.cp} ep {trainer.ep} etp {trainer.etp}"
    )
    stages = "/".join(map(str, stage_sizes(request.geometry, trainer)))
    table.add_row(
        "trainer, sends",
        str(trainer.world_size),
        f"{cut}\nlayers {stages}, {request.trainer_dtype}",
        _spread(plan.traffic.sent * copies),
    )
    table.add_row(
        "engines, receive",
        f"{request.num_replicas} x {request.engine.tp}",
        f"tp {request.engine.tp} ep {request.engine.ep}, {request.engine_dtype}",
        _spread(plan.traffic.received),
    )
    return table


def _copies(plan: WeightPlan) -> int:
    return plan.request.num_replicas if plan.chosen.strategy == "p2p" else 1


def _strategies(plan: WeightPlan) -> Table:
    table = Table("strategy", "bound s", "simulated s", "rounds", "bucket", "communicators", "most peers")
    for item in plan.estimates:
        shown = plan.chosen if item.strategy == plan.chosen.strategy else item
        table.add_row(
            f"{item.strategy}{' (chosen)' if shown is plan.chosen else ''}",
            f"{shown.bound_s:.3f}",
            f"{shown.simulated_s:.3f}",
            str(shown.num_rounds),
            _size(shown.bucket_bytes),
            str(shown.num_communicators),
            str(shown.max_peers),
        )
    table.add_row("gather + broadcast", "", f"{plan.gather_broadcast_s:.3f}", "", "", "", "")
    return table


def _chosen(plan: WeightPlan) -> Table:
    figures = plan.figures()
    table = Table("of the chosen plan", "")
    table.add_row("received / needed bytes", f"{figures['received_over_needed']:.3f}")
    balance, skew = plan.traffic.send_balance, plan.traffic.skew
    table.add_row("most sent / mean", f"{balance:.3f}  (at least {skew:.3f}: what only some ranks hold)")
    table.add_row("staging memory of a rank", f"{_size(plan.chosen.staging_bytes)}  (two buckets)")
    table.add_row(
        "faster than gather + broadcast", f"{plan.gather_broadcast_s / plan.chosen.simulated_s:.1f}x"
    )
    table.add_row("plan hash", plan.plan_hash[:16])
    table.add_row("planning", f"{plan.planning_s:.1f} s of one core")
    return table


def _spread(values: Ints) -> str:
    return f"{_size(int(values.min()))}, {_size(int(values.mean()))}, {_size(int(values.max()))}"


def _size(num_bytes: int) -> str:
    """In units of 1000, as links are measured."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} GB" if amount < 1000 else f"{amount / 1000:.3g} TB"
