"""Meeting one engine: its ranks report what they hold, the trainer plans, each engine rank is instructed.

    join the group -> manifests of the engine's ranks to rank 0 -> to all trainer ranks -> the plan, whose
    hash all ranks compare -> instructions, or the refusal's reason, from rank 0 to each engine rank

Every step is agreed upon among the trainer ranks before the next, so all of them fail together and nobody
waits for a rank that has given up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from asyncrl.weights.collective import gather_messages, on_all_ranks
from asyncrl.weights.engine_layout import check_manifest, engine_shards
from asyncrl.weights.fp8 import FP8
from asyncrl.weights.geometry import ModelError, ModelGeometry
from asyncrl.weights.pack import receiver_instructions
from asyncrl.weights.plan import RankLayout, TransferPlan, plan_transfer
from asyncrl.weights.transport import EngineEndpoint, join_group
from asyncrl.weights.wire import Deadline, WeightUpdateError, receive_message, send_message


@dataclass(frozen=True, slots=True)
class Meeting:
    """What comes out of it; ``manifest_hash`` is of all that the engine's ranks reported."""

    group: dist.ProcessGroup
    plan: TransferPlan
    manifest_hash: str


@dataclass(frozen=True, slots=True)
class Handshake:
    """What trainer rank ``rank`` knows when it meets an engine; ``senders`` is the whole trainer."""

    rank: int
    senders: tuple[RankLayout, ...]
    geometry: ModelGeometry
    bucket_bytes: int
    timeout_s: float

    def meet(self, endpoint: EngineEndpoint, loads: Sequence[int]) -> Meeting:
        """Called by all trainer ranks together, while the engine's ranks connect.

        Raises:
            WeightUpdateError: on every rank, with the first rank's reason.
        """
        num_senders, backend = len(self.senders), dist.get_backend()
        joined: list[dist.ProcessGroup] = []
        try:
            on_all_ranks(
                lambda: joined.append(join_group(endpoint, self.rank, num_senders, backend, self.timeout_s))
            )
            plan, manifest_hash = self._agree_on_plan(endpoint, joined[0], loads)
        except WeightUpdateError:
            for group in joined:  # this rank may have joined although another could not
                dist.destroy_process_group(group)
            raise
        return Meeting(joined[0], plan, manifest_hash)

    def _agree_on_plan(
        self, endpoint: EngineEndpoint, group: dist.ProcessGroup, loads: Sequence[int]
    ) -> tuple[TransferPlan, str]:
        collected = on_all_ranks(lambda: self._collect_manifests(endpoint, group))
        told = gather_messages(collected)[0]
        manifests = json.loads(told)
        plan = on_all_ranks(lambda: self._plan(endpoint, group, manifests, loads))
        hashes = gather_messages(plan.plan_hash.encode())
        if len(set(hashes)) > 1:
            raise WeightUpdateError(f"engine {endpoint.name}: the trainer ranks made different plans")
        on_all_ranks(lambda: self._instruct(group, plan))
        return plan, hashlib.sha256(told).hexdigest()

    def _collect_manifests(self, endpoint: EngineEndpoint, group: dist.ProcessGroup) -> bytes:
        if self.rank != 0:
            return b""
        deadline = Deadline(self.timeout_s)
        members = range(len(self.senders), len(self.senders) + endpoint.tp_size)
        manifests = [json.loads(receive_message(group, member, deadline)) for member in members]
        return json.dumps(manifests).encode()

    def _plan(
        self,
        endpoint: EngineEndpoint,
        group: dist.ProcessGroup,
        manifests: Sequence[Any],
        loads: Sequence[int],
    ) -> TransferPlan:
        try:
            receivers = [
                self._receiver_layout(endpoint, tp_rank, manifest)
                for tp_rank, manifest in enumerate(manifests)
            ]
            return plan_transfer(self.senders, receivers, self.bucket_bytes, loads)
        except ModelError as error:
            refusal = json.dumps({"refused": str(error)}).encode()
            self._tell(group, [refusal] * endpoint.tp_size)
            raise

    def _receiver_layout(self, endpoint: EngineEndpoint, tp_rank: int, manifest: Sequence[Any]) -> RankLayout:
        shapes = {name: tuple(shape) for name, shape, _ in manifest}
        dtypes = {name: dtype for name, _, dtype in manifest}
        has_fp8 = FP8 in dtypes.values()
        shards = engine_shards(self.geometry, endpoint.tp_size, tp_rank, endpoint.ep_size, fp8=has_fp8)
        check_manifest(shards, shapes, f"engine {endpoint.name}, rank {tp_rank}")
        return RankLayout(shards, tuple(dtypes[shard.name] for shard in shards))

    def _instruct(self, group: dist.ProcessGroup, plan: TransferPlan) -> None:
        self._tell(group, [receiver_instructions(plan, rank) for rank in range(len(plan.receivers))])

    def _tell(self, group: dist.ProcessGroup, messages: Sequence[bytes]) -> None:
        if self.rank == 0:
            deadline = Deadline(self.timeout_s)
            for tp_rank, message in enumerate(messages):
                send_message(group, len(self.senders) + tp_rank, message, deadline)
