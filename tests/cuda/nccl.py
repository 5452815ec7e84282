"""NCCL's process group, stood in for by gloo's: which were made, with what options."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class Options:
    """``ProcessGroupNCCL.Options``."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self._timeout = timedelta(minutes=10)
        self.split_from: Any = None
        self.split_color = 0
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.config: Any = None


class Nccl(dist.ProcessGroupGloo):
    """``ProcessGroupNCCL``."""

    Options = Options
    groups: list[Nccl] = []  # noqa: RUF012  (one list, of all groups)

    def __init__(self, store: Any, rank: int, size: int, options: Options, device: Any = None) -> None:
        super().__init__(store, rank, size, options._timeout)
        self.chosen, self.device = options, device
        self.groups.append(self)

    def eager_connect_single_device(self, device: Any) -> None:
        """Of a group that is bound to a device."""

    @property
    def options(self) -> Options:  # type: ignore[override]
        return self.chosen


def _make(store: Any, options: Options | None) -> Nccl:
    """What a backend's registration has since torch 2.14: makes the group from c10d's options and the caller's."""
    options = options or Options()
    options._timeout, options.split_from = store.timeout, store.split_from
    return Nccl(store.store, store.group_rank, store.group_size, options, store.process_group.bound_device_id)


def install(patch: pytest.MonkeyPatch) -> list[Nccl]:
    """Torch has NCCL from here on. Returns the groups, as they are made."""
    Nccl.groups = []
    patch.setattr(c10d, "is_nccl_available", lambda: True)
    patch.setattr(c10d, "ProcessGroupNCCL", Nccl, raising=False)
    patch.setattr(c10d, "_get_default_timeout", lambda backend: timedelta(minutes=10 if backend == "nccl" else 30))
    backend: Any = c10d.Backend
    if hasattr(backend, "_ensure_backend_registered"):  # since 2.14
        patch.setitem(backend._plugins, "NCCL", backend._BackendPlugin(_make, True))
    # the default group is gloo's for NCCL's tensors, too: a group is split only from one of its backend (2.15)
    state = c10d._world.pg_map
    patch.setitem(state, dist.group.WORLD, ("cpu:gloo,cuda:nccl", state[dist.group.WORLD][1]))
    return Nccl.groups
