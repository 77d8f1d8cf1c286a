"""Process groups beside the default one, joined under a deadline; on either side of a publication.

    one rank hosts a store -> every member reaches it -> `join_at` returns when all members are there

torch is imported alone, because this module also runs inside the engine's process.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    _new_process_group_helper,
    _world,
)


def host_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A store at ``host`` that waits for nobody and lives as long as the object; port 0: see its ``port``.

    Raises:
        RuntimeError: the port is taken.
    """
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, None, is_master=True, timeout=timeout, wait_for_workers=False)


def reach_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to a store that another rank hosts.

    Raises:
        RuntimeError: nobody hosts it.
    """
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, None, is_master=False, timeout=timeout, wait_for_workers=False)


def join_at(
    store: Store, name: str, rank: int, world_size: int, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Become rank ``rank`` of the group ``name``, which no two groups of a process may share.

    Raises:
        RuntimeError: not all members came within ``timeout_s``.
    """
    group: dist.ProcessGroup
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=timedelta(seconds=timeout_s),
    )
    # Point-to-point calls look a group's ranks up here; a group beside the default one is not in it.
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group
