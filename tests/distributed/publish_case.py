"""One case of the publication tests: who sends what to whom, in which dtypes, where they meet."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from asyncrl.weights.engine_layout import engine_shards
from asyncrl.weights.groups import host_store
from asyncrl.weights.publisher import EngineEndpoint, Publisher
from asyncrl.weights.routes import LinkOrder, ready_key
from tests.fp8_reference import fp8_tensors
from tests.moe_reference import ExpertCut
from tests.shard_reference import Tensors, engine_tensors, geometry, random_model

TIMEOUT_S = 60.0
FAULT_TIMEOUT_S = 8.0


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """The biases by which experts are chosen stay in float32 on both sides."""
    return torch.float32 if name.endswith(("expert_bias", "e_score_correction_bias")) else dtype


class Case:
    """What cases.json says about one case, and where its processes meet."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.name: str = fields["name"]
        self.tp, self.pp, self.dp, self.vpp = (int(fields.get(key, 1)) for key in ("tp", "pp", "dp", "vpp"))
        self.ep, self.etp = int(fields.get("ep", 1)), int(fields.get("etp", 1))
        self.te, self.grouped = bool(fields.get("te")), bool(fields.get("grouped"))
        self.engines: list[int] = fields.get("engines", [1])
        self.engine_ep = int(fields.get("engine_ep", 1))
        self.trainer_dtype = getattr(torch, fields.get("trainer_dtype", "float32"))
        self.fp8 = bool(fields.get("fp8"))  # the engine's matrices, beside bfloat16
        self.engine_dtype = getattr(torch, fields.get("engine_dtype", "bfloat16" if self.fp8 else "float32"))
        self.bucket_bytes: int = fields.get("bucket_bytes", 2000)
        self.fault: str = fields.get("fault", "")
        self.staged = bool(fields.get("staged"))  # beside what is served, from a copy of the parameters
        self.link: Any = fields.get("link", "")  # relay or broadcast, among all engines
        self.changed: list[float] = fields.get("changed", [1.0])  # per publication after the first
        self.ports: list[int] = fields["ports"]  # trainer group, engine groups, weight groups
        self.geometry = geometry(fields.get("family", "llama"), **fields.get("geometry", {}))
        self.timeout_s: float = fields.get("timeout_s", FAULT_TIMEOUT_S if self.fault else TIMEOUT_S)

    @property
    def delta(self) -> bool:
        return self.changed != [1.0]

    def share_changed(self, version: int) -> float:
        return self.changed[version - 2] if version - 2 < len(self.changed) else 1.0

    def model(self, version: int) -> Tensors:
        """The whole model of a version; 0 is what nobody publishes. Of the elements of every parameter the
        share ``changed`` differs from the version before."""
        after = random_model(self.geometry, version)
        if version <= 1 or self.share_changed(version) == 1.0:
            return after
        before = self.model(version - 1)
        generator = torch.Generator().manual_seed(version)
        chosen = {
            name: torch.rand(tensor.shape, generator=generator) < self.share_changed(version)
            for name, tensor in after.items()
        }
        return {name: torch.where(chosen[name], after[name], before[name]) for name in after}

    def link_engines(self, publisher: Publisher, rank: int, number: int = 1) -> None:
        """The trainer's side: the store that the engines' ranks meet at; wait until all of them have."""
        order, names = self.link_order(0, number), publisher.linkable()
        if rank == 0 and self.fault != "not_linked":
            store = host_store(order.host, order.port, TIMEOUT_S)
            store.wait(
                [
                    ready_key(order.name, replica, tp_rank)
                    for replica in range(len(names))
                    for tp_rank in range(self.engines[0])
                ]
            )
        dist.barrier()
        publisher.link(names, number, self.link)

    @property
    def wire_dtype(self) -> torch.dtype:
        return min(self.trainer_dtype, self.engine_dtype, key=lambda dtype: dtype.itemsize)

    def engine_tensors(self, version: int, tp_size: int, tp_rank: int) -> Tensors:
        """What one engine rank holds of a version: each tensor in its dtype, come through the wire's."""
        plain = engine_tensors(self.geometry, self.model(version), tp_size, tp_rank, self.engine_ep)
        if self.fp8:
            shards = engine_shards(self.geometry, tp_size, tp_rank, self.engine_ep, fp8=True)
            trained = {name: tensor.to(self.trainer_dtype) for name, tensor in plain.items()}
            held = fp8_tensors(trained, shards)
            return {
                name: tensor.to(self.engine_dtype) if held[name] is trained.get(name) else tensor
                for name, tensor in held.items()
            }
        return {
            name: tensor.to(dtype_of(name, self.wire_dtype)).to(dtype_of(name, self.engine_dtype))
            for name, tensor in plain.items()
        }

    def wire_bytes(self, tp_size: int, tp_rank: int) -> int:
        """Of one engine rank's whole shard, padding included."""
        total = 0
        for name, tensor in self.engine_tensors(1, tp_size, tp_rank).items():
            size = tensor.element_size()
            if not name.endswith("_scale_inv"):
                size = min(size, dtype_of(name, self.wire_dtype).itemsize)
            total += tensor.numel() * size
        return total

    def link_order(self, replica: int, number: int = 1, num_replicas: int = 0) -> LinkOrder:
        """What the engines are told when they are linked for the first time, or some of them again."""
        where = f"{self.name}-link{number}", "127.0.0.1", self.ports[-number]
        return LinkOrder(
            number, self.link, *where, replica, num_replicas or len(self.engines), "gloo", TIMEOUT_S
        )

    @property
    def num_trainers(self) -> int:
        return self.tp * self.pp * self.dp

    def endpoint(self, engine_idx: int) -> EngineEndpoint:
        port = self.ports[1 + len(self.engines) + engine_idx]
        name = f"engine{engine_idx}"
        group = f"{self.name}-{name}"
        return EngineEndpoint(name, self.engines[engine_idx], group, "127.0.0.1", port, self.engine_ep)

    def expert_cut(self, rank: int) -> ExpertCut:
        """Neighbours in a pipeline stage share an expert; those after them hold the next ones."""
        place = rank % (self.tp * self.dp)
        ep_rank, etp_rank = place // self.etp % self.ep, place % self.etp
        return ExpertCut(self.ep, ep_rank, self.etp, etp_rank, self.te, self.grouped)

    @property
    def versions(self) -> range:
        return range(1, len(self.changed) + 2)

    def is_over_after(self, version: int) -> bool:
        """Faults strike in the first publication, those of changes in the second."""
        return bool(self.fault) and (version > 1 or not self.delta)

    def trainer_of(self, process: int) -> int | None:
        """The trainer rank of a trainer process, or None where the case does not use it."""
        return process if process < self.num_trainers else None

    def engine_of(self, process: int) -> tuple[int, int] | None:
        """(engine, rank in it) of an engine process, or None where the case does not use it."""
        for engine_idx, tp_size in enumerate(self.engines):
            if process < tp_size:
                return engine_idx, process
            process -= tp_size
        return None
