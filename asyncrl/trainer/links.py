"""Engines of one plan are linked, so that what each of them needs leaves the trainer once.

    rank 0:     host a store -> tell the engines through the coordinator -> wait until all their ranks are in
    all ranks:  learn how that went; linked engines are sent to together from now on (`weights.routes`)

Engines join while they sample. A link that was not joined in time, or that failed with a version, is not
tried again with the same starts of the same engines: they are sent to one by one, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from asyncrl.config import Config
from asyncrl.control.client import ControlClient, ControlRefused
from asyncrl.control.messages import LinkOrder
from asyncrl.trainer.collectives import broadcast_json
from asyncrl.weights.groups import host_store
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.routes import Linked, ready_key

log = logging.getLogger(__name__)


class Linking:
    """All ranks construct it together and call its methods together."""

    def __init__(self, publisher: Publisher, control: ControlClient | None, config: Config) -> None:
        self._publisher = publisher
        self._control = control  # on rank 0 only
        self._config = config
        self._number = 0
        self._store: TCPStore | None = None  # of the last link, whose members may look into it
        self._members: tuple[tuple[str, int], ...] = ()  # of the last link
        self._distrusted: tuple[tuple[str, int], ...] = ()

    def link(self, incarnations: Mapping[str, int], tp_sizes: Mapping[str, int]) -> None:
        """Link the engines of one plan, where that is the publisher's strategy and not done already."""
        engines, strategy = self._publisher.linkable(), self._publisher.strategy
        members = tuple((name, incarnations[name]) for name in engines)
        if strategy == "p2p" or not engines or engines == self._publisher.linked:
            return
        if members == self._distrusted:
            return
        self._number += 1
        self._members = members
        told = self._join(engines, strategy, tp_sizes[engines[0]]) if self._control else None
        reason = broadcast_json(told)
        if reason:
            self.distrust(reason)
        else:
            self._publisher.link(engines, self._number, strategy)

    def distrust(self, reason: str) -> None:
        """The last link failed: do not try it again."""
        self._distrusted = self._members
        if self._control:
            names = ", ".join(name for name, _ in self._members)
            log.warning("%s: sent to one by one, since their link failed: %s", names, reason)

    def _join(self, engines: Sequence[str], strategy: Linked, tp_size: int) -> str:
        """Let the engines' ranks meet; returns why they did not, or an empty string."""
        assert self._control is not None, "only rank 0 talks to the coordinator"
        host, timeout_s = self._config.control.host, self._config.weights.timeout_s
        self._store = host_store(host, 0, timeout_s)
        order = LinkOrder(
            engines=tuple(engines),
            name=f"link-{self._number}",
            number=self._number,
            strategy=strategy,
            host=host,
            port=self._store.port,
            backend="nccl" if dist.get_backend() == "nccl" else "gloo",
            timeout_s=timeout_s,
        )
        try:
            failures = self._control.post("weights/link", order, timeout_s=timeout_s + 30.0)
        except ControlRefused as error:
            return str(error)
        if failures:
            return "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        ranks = [(replica, tp_rank) for replica in range(len(engines)) for tp_rank in range(tp_size)]
        keys = {ready_key(order.name, *rank): f"rank {rank[1]} of {engines[rank[0]]}" for rank in ranks}
        try:
            self._store.wait(list(keys), timedelta(seconds=timeout_s))
        except RuntimeError:  # DistStoreError: the time is over
            missing = [who for key, who in keys.items() if not self._store.check([key])]
            return f"{', '.join(missing)} did not join within {timeout_s:.0f} s"
        return ""
