"""How far a run is from the reference, how far it may be, and what would explain a difference. It may be as far as
rounding moves the reference itself.

The reference runs again, each time beside itself by one rounding of weights, inputs and gradients. How far each number
comes to lie from where it was is what rounding does to this model at this place: it grows where the model amplifies it,
where sums cancel, and from update to update. `SAFETY` is for the few samples of it.

Causes are guesses, each with the numbers that it would give. One that leaves little of the difference is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zc.checking.loop import KINDS, Finding, Key, Loop, Moment, Worst, norm
from zc.checking.reference import First
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
        limits, pairs = self.limits[number], _distances(self.trace[number], moment)
        return [Difference(number, key, loop.rank, size, limits[key]) for key, size in pairs]


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


# --- what would explain a difference ---

LEFT = 0.02  # of a difference, where a guess explains it


UNKNOWN = "what zc does between the backward and the update differs from plain PyTorch, in no way that zc.check knows"


def cause_in_gradients(got: Moment, wanted: Moment, first: First | None, rank: int, world_size: int) -> Finding | None:
    """``first``: of the first update, else None."""
    there_is = ((key, value) for key, value in wanted.of("gradient") if value is not None)
    pairs: dict[Key, Any] = {key: (value, got.values.get(key)) for key, value in there_is}
    lacking = [key.name for key, (_, there) in pairs.items() if there is None]
    if lacking:
        return Finding("no-gradient", f"no gradient arrives for {', '.join(lacking[:3])}{' ...' * (len(lacking) > 3)}")
    zero = [key.name for key, (want, there) in pairs.items() if not there.any() and want.any()]
    if zero and len(zero) < len(pairs):
        return Finding("no-gradient", f"the gradient is zero for {', '.join(zero[:3])}{' ...' * (len(zero) > 3)}")
    sizes = {key.name: want.numel() for key, (want, _) in pairs.items()}
    have = _joined({key.name: there for key, (_, there) in pairs.items()}, sizes)
    mean = _joined({key.name: want for key, (want, _) in pairs.items()}, sizes)
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(have.to(dtype).double(), have) and not torch.equal(mean.to(dtype).double(), mean):
            return Finding("narrow-accumulation", f"gradients are rounded to {dtype}, as if they were added up in it")
    return _best(have, mean, _guesses_of_gradients(mean, sizes, first, rank, world_size))


def _guesses_of_gradients(
    mean: Tensor, sizes: Mapping[str, int], first: First | None, rank: int, world_size: int
) -> Iterator[tuple[Finding, Tensor]]:
    if world_size > 1:
        yield Finding("sum-not-mean", f"the gradient is the sum over the {world_size} ranks, not their mean"), (
            mean * world_size
        )
        yield Finding("mean-twice", f"the gradient is divided by the {world_size} ranks twice"), mean / world_size
    if first is None:
        return
    parts = [_joined(part, sizes) for part in first.parts]
    if world_size > 1:
        yield Finding("not-reduced", f"rank {rank} has its own gradient, which nothing has averaged"), parts[rank]
        for absent, part in enumerate(parts):
            yield Finding("rank-missing", f"the gradient of rank {absent} is missing"), mean - part / world_size
            yield Finding("rank-missing", f"the gradient of rank {absent} is left out of the mean"), (
                (mean * world_size - part) / (world_size - 1)
            )
    for k, grads in enumerate(first.by_microbatch):
        part = _joined(grads, sizes)
        yield Finding("microbatch-missing", f"the gradient of microbatch {k} is missing"), mean - part
        yield Finding("microbatch-twice", f"the gradient of microbatch {k} counts twice"), mean + part
        if len(first.by_microbatch) > 2:  # of two, one is missing
            yield Finding("microbatch-alone", f"of the microbatches only number {k} counts"), part


def cause_in_weights(got: Moment, wanted: Moment, first: First | None) -> Finding | None:
    """Where gradients agree."""
    moved = {key.name: value for key, value in wanted.of("weight") if isinstance(value, Tensor)}
    have = {name: got.values[Key("weight", name)] for name in moved}
    sizes = {name: value.numel() for name, value in moved.items()}
    one, other = _joined(have, sizes), _joined(moved, sizes)
    guesses = [
        (Finding("no-update", "the weights are not updated"), torch.zeros_like(other)),
        (Finding("update-twice", "the weights are updated twice"), 2 * other),
    ]
    if first is not None:
        decay = _joined({name: _decay(first, name) for name in sizes if name in first.before}, sizes)
        if norm(decay):
            twice = Finding("decay-twice", "weight decay is applied twice: weights also shrink by lr * weight_decay")
            guesses.append((twice, other - decay))
            guesses.append((Finding("no-decay", "weight decay is not applied"), other + decay))
    return _best(one, other, iter(guesses))


def cause_in_own_update(first: First) -> Finding | None:
    """Of what the program's update does to weights outside of the optimizers' steps."""
    shrunk = []
    for name, change in first.outside.items():
        weight, options = first.before[name].double().flatten(), first.groups.get(name, {})
        size, change = norm(weight), change.double().flatten()
        if not options.get("weight_decay") or not size or not norm(change):
            continue
        factor = float(weight @ change) / size**2
        if factor < 0.0 and norm(change - factor * weight) < LEFT * norm(change):
            shrunk.append((name, -factor))
    if not shrunk:
        return None
    name, factor = shrunk[0]
    decay = first.groups[name]["weight_decay"]
    return Finding(
        "decay-twice",
        f"weight decay is applied twice to {len(shrunk)} parameters: outside of optimizer.step() the update makes "
        f"{name} smaller by {factor:.3g} of itself, and its group has weight_decay={decay}. Leave one of them out",
    )


def _decay(first: First, name: str) -> Tensor:
    options = first.groups.get(name, {})
    return first.before[name] * (float(options.get("lr", 0.0)) * float(options.get("weight_decay", 0.0)))


def _best(have: Tensor, wanted: Tensor, guesses: Iterator[tuple[Finding, Tensor]]) -> Finding | None:
    off = norm(have - wanted)
    left = [(norm(have - guess), cause) for cause, guess in guesses if norm(guess - wanted) > 0.0]
    best = min(left, key=lambda pair: pair[0], default=None)
    return best[1] if best is not None and best[0] <= LEFT * off else None


def _joined(values: Mapping[str, Any], sizes: Mapping[str, int]) -> Tensor:
    """One vector of all, in float64; zeros for what is not there."""
    parts = [torch.zeros(0, dtype=torch.float64, device="cpu")]
    for name, numel in sizes.items():
        value = values.get(name)
        parts.append(parts[0].new_zeros(numel) if value is None else value.double().flatten().cpu())
    return torch.cat(parts)
