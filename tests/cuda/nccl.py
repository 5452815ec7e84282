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


class Nccl(dist.ProcessGroupGloo):
    """``ProcessGroupNCCL``."""

    Options = Options
    made: list[Nccl] = []  # noqa: RUF012  (one list, of all groups)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, options._timeout)
        self.given = options
        self.made.append(self)

    @property
    def options(self) -> Options:  # type: ignore[override]
        return self.given


def install(patch: pytest.MonkeyPatch) -> list[Nccl]:
    """Torch has NCCL from here on. Returns the groups, as they are made."""
    Nccl.made = []
    patch.setattr(c10d, "is_nccl_available", lambda: True)
    patch.setattr(c10d, "ProcessGroupNCCL", Nccl, raising=False)
    patch.setattr(c10d, "_get_default_timeout", lambda backend: timedelta(minutes=10 if backend == "nccl" else 30))
    return Nccl.made
