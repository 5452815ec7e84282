"""What would explain a difference: guesses, each with the numbers that it would give. One that leaves little of the
difference is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zc.checking.loop import Key, Moment, norm
from zc.checking.reference import First

LEFT = 0.02  # of a difference, where a guess explains it


class Cause(NamedTuple):
    code: str
    text: str


UNKNOWN = "what zc does between the backward and the update differs from plain PyTorch, in no way that zc.check knows"


def of_gradients(got: Moment, wanted: Moment, first: First | None, rank: int, world_size: int) -> Cause | None:
    """``first``: of the first update, else None."""
    there_is = ((key, value) for key, value in wanted.of("gradient") if value is not None)
    pairs: dict[Key, Any] = {key: (value, got.values.get(key)) for key, value in there_is}
    lacking = [key.name for key, (_, there) in pairs.items() if there is None]
    if lacking:
        return Cause("no-gradient", f"no gradient arrives for {', '.join(lacking[:3])}{' ...' * (len(lacking) > 3)}")
    zero = [key.name for key, (want, there) in pairs.items() if not there.any() and want.any()]
    if zero and len(zero) < len(pairs):
        return Cause("no-gradient", f"the gradient is zero for {', '.join(zero[:3])}{' ...' * (len(zero) > 3)}")
    sizes = {key.name: want.numel() for key, (want, _) in pairs.items()}
    have = _joined({key.name: there for key, (_, there) in pairs.items()}, sizes)
    mean = _joined({key.name: want for key, (want, _) in pairs.items()}, sizes)
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(have.to(dtype).double(), have) and not torch.equal(mean.to(dtype).double(), mean):
            return Cause("narrow-accumulation", f"gradients are rounded to {dtype}, as if they were added up in it")
    return _best(have, mean, _guesses_of_gradients(mean, sizes, first, rank, world_size))


def _guesses_of_gradients(
    mean: Tensor, sizes: Mapping[str, int], first: First | None, rank: int, world_size: int
) -> Iterator[tuple[Cause, Tensor]]:
    if world_size > 1:
        yield Cause("sum-not-mean", f"the gradient is the sum over the {world_size} ranks, not their mean"), (
            mean * world_size
        )
        yield Cause("mean-twice", f"the gradient is divided by the {world_size} ranks twice"), mean / world_size
    if first is None:
        return
    parts = [_joined(part, sizes) for part in first.parts]
    if world_size > 1:
        yield Cause("not-reduced", f"rank {rank} has its own gradient, which nothing has averaged"), parts[rank]
        for absent, part in enumerate(parts):
            yield Cause("rank-missing", f"the gradient of rank {absent} is missing"), mean - part / world_size
            yield Cause("rank-missing", f"the gradient of rank {absent} is left out of the mean"), (
                (mean * world_size - part) / (world_size - 1)
            )
    for k, grads in enumerate(first.by_microbatch):
        part = _joined(grads, sizes)
        yield Cause("microbatch-missing", f"the gradient of microbatch {k} is missing"), mean - part
        yield Cause("microbatch-twice", f"the gradient of microbatch {k} counts twice"), mean + part
        if len(first.by_microbatch) > 2:  # of two, one is missing
            yield Cause("microbatch-alone", f"of the microbatches only number {k} counts"), part


def of_weights(got: Moment, wanted: Moment, first: First | None) -> Cause | None:
    """Where gradients agree."""
    moved = {key.name: value for key, value in wanted.of("weight") if isinstance(value, Tensor)}
    have = {name: got.values[Key("weight", name)] for name in moved}
    sizes = {name: value.numel() for name, value in moved.items()}
    one, other = _joined(have, sizes), _joined(moved, sizes)
    guesses = [
        (Cause("no-update", "the weights are not updated"), torch.zeros_like(other)),
        (Cause("update-twice", "the weights are updated twice"), 2 * other),
    ]
    if first is not None:
        decay = _joined({name: _decay(first, name) for name in sizes if name in first.before}, sizes)
        if norm(decay):
            twice = Cause("decay-twice", "weight decay is applied twice: weights also shrink by lr * weight_decay")
            guesses.append((twice, other - decay))
            guesses.append((Cause("no-decay", "weight decay is not applied"), other + decay))
    return _best(one, other, iter(guesses))


def of_own_update(first: First) -> Cause | None:
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
    return Cause(
        "decay-twice",
        f"weight decay is applied twice to {len(shrunk)} parameters: outside of optimizer.step() the update makes "
        f"{name} smaller by {factor:.3g} of itself, and its group has weight_decay={decay}. Leave one of them out",
    )


def _decay(first: First, name: str) -> Tensor:
    options = first.groups.get(name, {})
    return first.before[name] * (float(options.get("lr", 0.0)) * float(options.get("weight_decay", 0.0)))


def _best(have: Tensor, wanted: Tensor, guesses: Iterator[tuple[Cause, Tensor]]) -> Cause | None:
    off = norm(have - wanted)
    left = [(norm(have - guess), cause) for cause, guess in guesses if norm(guess - wanted) > 0.0]
    best = min(left, key=lambda pair: pair[0], default=None)
    return best[1] if best is not None and best[0] <= LEFT * off else None


def _joined(values: Mapping[str, Any], sizes: Mapping[str, int]) -> Tensor:
    """One vector of all, in float64; zeros for what is not there."""
    parts = [
        values[name].double().flatten().cpu() if values.get(name) is not None else torch.zeros(numel).double()
        for name, numel in sizes.items()
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
