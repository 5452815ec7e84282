"""The options of `zc.compile`, checked once and frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zc.errors import PlanError
from zc.planning.placement import OFFLOADS, PLACEMENTS, Offload, Placement

BACKENDS = ("inductor", "aot_eager", "eager")
REDUCTIONS = ("exact", "native")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Config:
    """Every option of `zc.compile`; the names and defaults are documented there."""

    stage: int = 2
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reduce: str = "exact"
    bucket_nbytes: int | None = None
    num_buffers: int = 2
    overlap: bool = True
    overlap_gather: bool = False
    backend: str = "inductor"
    offload: str | None = None
    offload_accumulate: str = "cpu"
    offload_dir: str | Path | None = None
    verify: bool = True
    write_in_place: bool = False
    broadcast_buffers: bool = True
    dump_dir: str | Path | None = None

    def __post_init__(self) -> None:
        _one_of("stage", self.stage, tuple(PLACEMENTS), hint="stage 3 shards the weights too: use FSDP2 for that")
        _one_of("backend", self.backend, BACKENDS)
        _one_of("reduce", self.reduce, REDUCTIONS)
        _one_of("param_dtype", self.param_dtype, (None, *DTYPES))
        _one_of("reduce_dtype", self.reduce_dtype, (None, *DTYPES))
        _one_of("offload", self.offload, (None, "cpu", "disk"))
        _one_of("offload_accumulate", self.offload_accumulate, tuple(OFFLOADS))
        for name in ("bucket_nbytes", "num_buffers"):
            given = getattr(self, name)
            if name == "bucket_nbytes" and given is None:
                continue
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise PlanError(f"{name} must be a whole number of at least 1, got {given!r}")
        for name in ("overlap", "overlap_gather", "verify", "write_in_place", "broadcast_buffers"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.offload_dir is not None and not isinstance(self.offload_dir, (str, Path)):
            raise PlanError(f"offload_dir must be a path, got {self.offload_dir!r}")
        if (self.offload == "disk") != (self.offload_dir is not None):
            raise PlanError(
                f"offload={self.offload!r} and offload_dir={self.offload_dir!r}: offload='disk' needs the folder for "
                "its files, and nothing else takes one"
            )
        if self.overlap_gather and not self.overlap:
            raise PlanError("overlap_gather=True needs overlap=True: without it there is no comm stream to gather on")
        if self.overlap_gather and self.offload is not None:
            raise PlanError(
                f"overlap_gather=True and offload={self.offload!r}: with offload the update ends with the gathers, "
                "bucket by bucket; leave one of them out"
            )

    @property
    def placement(self) -> Placement:
        return PLACEMENTS[self.stage]

    @property
    def host(self) -> Offload | None:
        """What lies in host memory, or on a disk; None: nothing."""
        if self.offload is None:
            return None
        return replace(OFFLOADS[self.offload_accumulate], state_on_disk=self.offload == "disk")


def _one_of(name: str, given: object, valid: Sequence[object], hint: str = "") -> None:
    if isinstance(given, bool) or given not in valid:
        shown = ", ".join(repr(v) for v in valid)
        raise PlanError(f"{name} must be one of {shown}, got {given!r}" + (f" ({hint})" if hint else ""))
