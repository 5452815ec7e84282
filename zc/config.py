"""The options of `zc.compile`, checked once and frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zc import torch_private
from zc.errors import PlanError
from zc.planning.plan import OFFLOADS, PLACEMENTS, Offload, Placement
from zc.planning.wire import BITS, wire_of

if TYPE_CHECKING:
    from zc.planning.wire import Wire

BACKENDS = ("inductor", "aot_eager", "eager")
REDUCTIONS = ("exact", "native")
_FLAGS = ("overlap", "overlap_gather", "shard_frozen", "verify", "write_in_place", "broadcast_buffers", "fullgraph")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Config:
    """The options of `zc.compile`, which documents them."""

    stage: int = 2
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | str | None = None
    reduce: str = "exact"
    bucket_nbytes: int | None = None
    num_buffers: int = 2
    overlap: bool = True
    overlap_gather: bool = False
    weight_nbytes: int | None = None
    shard_frozen: bool = False
    backend: str = "inductor"
    offload: str | None = None
    offload_accumulate: str = "cpu"
    offload_dir: str | Path | None = None
    verify: bool = True
    write_in_place: bool = False
    broadcast_buffers: bool = True
    mode: str | None = None
    options: Mapping[str, Any] | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    dump_dir: str | Path | None = None

    def __post_init__(self) -> None:
        _one_of("stage", self.stage, tuple(PLACEMENTS))
        _one_of("backend", self.backend, BACKENDS)
        _one_of("reduce", self.reduce, REDUCTIONS)
        _one_of("param_dtype", self.param_dtype, (None, *DTYPES))
        _one_of("reduce_dtype", self.reduce_dtype, (None, *DTYPES, torch.int8))
        _one_of("gather_dtype", self.gather_dtype, (None, *BITS))
        _one_of("offload", self.offload, (None, "cpu", "disk"))
        _one_of("offload_accumulate", self.offload_accumulate, tuple(OFFLOADS))
        check_count("num_buffers", self.num_buffers)
        for name in ("bucket_nbytes", "weight_nbytes"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.offload_dir is not None and not isinstance(self.offload_dir, (str, Path)):
            raise PlanError(f"offload_dir must be a path, got {self.offload_dir!r}")
        if (self.offload == "disk") != (self.offload_dir is not None):
            raise PlanError(
                f"offload={self.offload!r} and offload_dir={self.offload_dir!r}: offload='disk' needs the folder for "
                "its files, and nothing else takes one"
            )
        self._check_compiler_options()
        if self.placement.shards_weights:  # gathers overlap with the forward and the backward in any case
            object.__setattr__(self, "overlap_gather", False)
        if self.weight_nbytes is not None and not self.shards_frozen:
            raise PlanError(
                f"weight_nbytes={self.weight_nbytes} and stage={self.stage}: only stage=3 and shard_frozen=True gather "
                "weights while they are read; leave it out"
            )
        if self.overlap_gather and self.shard_frozen:
            raise PlanError(
                "overlap_gather=True and shard_frozen=True: a forward can wait for the gathers of the update before "
                "it, or gather sharded weights while it runs, not both; leave overlap_gather out"
            )
        self._check_encodings()
        if self.overlap_gather and not self.overlap:
            raise PlanError("overlap_gather=True needs overlap=True: without it there is no comm stream to gather on")
        if self.overlap_gather and self.offload is not None:
            raise PlanError(
                f"overlap_gather=True and offload={self.offload!r}: with offload the update ends with the gathers, "
                "bucket by bucket; leave one of them out"
            )

    def _check_encodings(self) -> None:
        """Raises PlanError for options that exclude what `zc.planning.wire` does."""
        for option, name in self.encodings:
            if self.reduce != "exact":
                raise PlanError(
                    f"{option} and reduce={self.reduce!r}: the backend can't sum integers of different scales; leave "
                    f"reduce at 'exact', or {name} out"
                )
            if name == "gather_dtype" and self.offload is not None:
                raise PlanError(
                    f"{option} and offload={self.offload!r}: differences are taken on the device, and with offload "
                    f"the masters are in host memory; leave one of them out. reduce_dtype=torch.int8 works"
                )

    @property
    def encodings(self) -> list[tuple[str, str]]:
        """The options by which gradients or weights travel encoded: each with its value as text, and its name."""
        named = [("reduce_dtype", self.reduce_dtype)] if self.reduce_dtype == torch.int8 else []
        named += [("gather_dtype", self.gather_dtype)] if self.gather_dtype is not None else []  # type: ignore[list-item]
        return [(f"{name}={value!r}", name) for name, value in named]

    @property
    def compiles_blocks(self) -> bool:
        """Whether blocks have graphs of their own. With ``fullgraph`` they belong to the one graph."""
        return self.backend != "eager" and not self.fullgraph

    def _check_compiler_options(self) -> None:
        """Checks torch.compile's options, which zc passes on."""
        _one_of("dynamic", self.dynamic, (None, True, False))
        if self.options is not None and not isinstance(self.options, Mapping):
            raise PlanError(f"options must be a dict of Inductor's options, got {self.options!r}")
        if self.mode is not None and self.options is not None:
            raise PlanError(
                f"mode={self.mode!r} and options={dict(self.options)!r}: torch.compile takes one of them; "
                f"torch._inductor.list_mode_options({self.mode!r}) has the options that a mode stands for"
            )
        compiler: dict[str, Any] = {"mode": self.mode, "options": self.options}  # of segments: Inductor
        tracer: dict[str, Any] = {"dynamic": self.dynamic, "fullgraph": self.fullgraph or None}  # Dynamo
        unused: dict[str, dict[str, Any]] = {"aot_eager": compiler, "eager": {**compiler, **tracer}}
        for name, value in unused.get(self.backend, {}).items():
            if value is not None:
                raise PlanError(
                    f"{name}={value!r} and backend={self.backend!r}: that backend does not use it; leave it out, or "
                    f"use backend={'inductor' if name in compiler else 'aot_eager'!r}"
                )
        if self.inductor_options.get("triton.cudagraphs"):
            raise PlanError(
                f"{f'mode={self.mode!r}' if self.mode else 'options'} asks for CUDA graphs (Inductor's "
                "triton.cudagraphs), and zc compiles without: a replay overwrites the outputs of the replay before it, "
                "which are gradients that wait for their bucket. Use mode='max-autotune-no-cudagraphs', or leave it out"
            )

    @property
    def inductor_options(self) -> dict[str, Any]:
        """The settings of Inductor by ``mode`` or ``options``. Raises PlanError for settings that it does not know."""
        if self.mode is None and self.options is None:
            return {}
        try:
            return torch_private.inductor_options(self.mode, self.options, self.dynamic)
        except (RuntimeError, TypeError) as error:
            text = str(error).partition(", known options are")[0]
            raise PlanError(f"mode={self.mode!r}, options={self.options!r}: {text}") from None

    @property
    def shards_frozen(self) -> bool:
        """Whether each rank keeps only shards of frozen parameters."""
        return self.shard_frozen or self.placement.shards_weights

    @property
    def reduce_encoding(self) -> Wire | None:
        """How gradients travel where they leave a host; None: as they are."""
        return wire_of(self.reduce_dtype)

    @property
    def gather_encoding(self) -> Wire | None:
        """How weights travel there."""
        return wire_of(self.gather_dtype)

    @property
    def placement(self) -> Placement:
        return PLACEMENTS[self.stage]

    @property
    def host(self) -> Offload | None:
        """The row of the table of offload; None without offload."""
        if self.offload is None:
            return None
        return replace(OFFLOADS[self.offload_accumulate], state_on_disk=self.offload == "disk")


OPTIONS = frozenset(field.name for field in fields(Config))


def check_count(name: str, value: object, most: int | None = None) -> None:
    """Raises PlanError unless ``value`` is a whole number of at least 1, and at most ``most``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        limits = "of at least 1" if most is None else f"from 1 to {most}"
        raise PlanError(f"{name} must be a whole number {limits}, got {value!r}")


def _one_of(name: str, value: object, valid: Sequence[object]) -> None:
    if not any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in valid):
        options = ", ".join(repr(option) for option in valid)
        raise PlanError(f"{name} must be one of {options}, got {value!r}")
