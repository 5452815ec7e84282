"""How far a run is from the reference, and how far it may be: as far as rounding moves the reference itself.

The reference runs again, each time beside itself by one rounding of weights, inputs and gradients. How far each number
comes to lie from where it was is what rounding does to this model at this place: it grows where the model amplifies it,
where sums cancel, and from update to update. `SAFETY` is for the few samples of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zc.checking.loop import Key, Loop, Moment, norm
from zc.checking.report import KINDS, Worst
from zc.config import Config

# A sample has about the size of what it estimates. The largest distance in 400 programs of the fuzzer was 0.29 of what
# this allows, accumulation in bf16, the smallest planted fault, 1,000 times as much (tests/check).
SAFETY = 10.0
NUM_SAMPLES = 2


class Difference(NamedTuple):
    """``size`` over ``allowed`` says how much. ``rank``: the one that saw it. Sizes are 2-norms."""

    update: int
    key: Key
    rank: int
    size: float
    allowed: float

    @property
    def ratio(self) -> float:
        return self.size / self.allowed if self.allowed > 0.0 else math.inf if self.size > 0.0 else 0.0

    @property
    def place(self) -> tuple[int, int, float]:
        """Earlier updates first, then what others follow from, then the largest."""
        return self.update, KINDS.index(self.key.kind), -self.ratio


@dataclass
class Allowed:
    """By update, how far each number may be from the reference's."""

    trace: list[Moment]
    limits: list[dict[Key, float]]

    @classmethod
    def around(cls, trace: list[Moment], samples: Iterable[Iterator[Moment]]) -> Allowed:
        moved: list[dict[Key, float]] = [dict.fromkeys(moment.values, 0.0) for moment in trace]
        for sample in samples:
            for moment, own, total in zip(trace, sample, moved, strict=True):
                for key, size in _distances(moment, own):
                    total[key] = max(total[key], size)
        return cls(trace, [_limits(moment, own) for moment, own in zip(trace, moved, strict=True)])

    def compare(self, number: int, moment: Moment, loop: Loop) -> list[Difference]:
        """Every number of this rank that has a counterpart, with its distance."""
        reference, limits = self.trace[number], self.limits[number]
        found = []
        for key, size in _distances(reference, moment):
            # buffers of other ranks may be rank 0's already, or still their own
            if key.kind != "buffer" or key.rank == 0 or not loop.config.broadcast_buffers:
                found.append(Difference(number, key, loop.rank, size, limits[key]))
        return found


def _distances(reference: Moment, moment: Moment) -> Iterator[tuple[Key, float]]:
    for key, value in moment.values.items():
        if key in reference.values:
            yield key, distance(value, reference.values[key])


def distance(got: Tensor | float | None, wanted: Tensor | float | None) -> float:
    """The 2-norm of the difference. Two that are not finite in the same way are equal; None differs from all else."""
    if got is None or wanted is None:
        return 0.0 if got is wanted else math.inf
    one, other = (torch.as_tensor(value, dtype=torch.float64).flatten() for value in (got, wanted))
    if one.shape != other.shape:
        return math.inf
    differs = ~((one == other) | (one.isnan() & other.isnan()))
    size = norm(one[differs] - other[differs])
    return math.inf if math.isnan(size) else size


def _limits(moment: Moment, moved: Mapping[Key, float]) -> dict[Key, float]:
    """What moved; at least what moved on average of its kind, and what storing it rounds."""
    limits: dict[Key, float] = {}
    for kind in KINDS:
        sizes = {key: _size(value) for key, value in moment.of(kind)}
        total = math.sqrt(sum(size**2 for size in sizes.values()))
        numel = sum(value.numel() for _, value in moment.of(kind) if isinstance(value, Tensor))
        average = math.sqrt(sum(moved[key] ** 2 for key in sizes)) / total if total else 0.0
        for key, value in moment.of(kind):
            if not isinstance(value, (Tensor, float)):
                limits[key] = 0.0
                continue
            size = sizes[key]
            if kind == "gradient" and isinstance(value, Tensor) and numel:  # zero but for rounding is of no size
                size = max(size, total * math.sqrt(value.numel() / numel))
            stored = _rounding(value) * max(size, moment.sizes.get(key, 0.0))
            limits[key] = SAFETY * max(moved[key], average * size, stored)
    return limits


def _size(value: Any) -> float:
    size = norm(torch.as_tensor(value, dtype=torch.float64)) if value is not None else 0.0
    return size if math.isfinite(size) else 0.0


def _rounding(value: Tensor | float) -> float:
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.finfo(value.dtype).eps
    return torch.finfo(torch.float32).eps if isinstance(value, float) else 0.0


def rounding_of(config: Config, dtypes: Iterable[torch.dtype]) -> float:
    """The relative rounding of the coarsest number between a weight and its update: of the dtypes that the step
    computes with, and of what travels between ranks."""
    names = [*dtypes, config.param_dtype, config.reduce_dtype]
    coarse = [torch.finfo(each).eps for each in names if each is not None and each.is_floating_point]
    for option in (config.reduce_dtype, config.gather_dtype):
        if option is not None and option in (torch.int8, "int4"):  # an absolute maximum in 127 parts, or in 7
            coarse.append(1 / 7 if option == "int4" else 1 / 127)
    return max(coarse, default=0.0)


def worst_of(differences: Sequence[Difference]) -> dict[str, Worst]:
    table: dict[str, Worst] = {}
    for kind in KINDS:
        own = [each for each in differences if each.key.kind == kind]
        largest = max(own, key=lambda each: each.ratio, default=None)
        if largest is not None:
            table[kind] = Worst(largest.ratio, describe(largest), len(own))
    return table


def describe(difference: Difference) -> str:
    update, key, rank, size, allowed = difference
    whose = f" on rank {key.rank if key.rank >= 0 else rank}"
    return f"{key.kind} {key.name} of update {update}{whose}: off by {size:.2g}, {allowed:.2g} is allowed"
