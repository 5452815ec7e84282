"""What needs no run through zc: what ranks begin with, and what the step makes of its batch on plain PyTorch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.checking.differences import Allowed, distance
from zc.checking.loop import Finding, Key, Loop, Moment, norm
from zc.checking.reference import Grads, add_gradients, write_buffers
from zc.checking.values import Randomness, digest, drawn, joined, map_tensors
from zc.errors import PlanError, some
from zc.optim.assignment import given_in
from zc.optim.trials import leaves


@dataclass
class Seen:
    """One forward. ``dtypes``: of its floating point results. ``collectives``: by name. ``lost``: of those, that took a
    tensor which requires a gradient and gave none."""

    dtypes: set[torch.dtype] = field(default_factory=set)
    collectives: Counter[str] = field(default_factory=Counter)
    lost: dict[str, str] = field(default_factory=dict)
    drawn: set[str] = field(default_factory=set)

    def operator(self, name: str, args: Any, result: Any) -> None:
        if not name.startswith(("c10d::", "_c10d_functional::")):
            tensors = (leaf for _, leaf in leaves(result) if isinstance(leaf, Tensor))
            self.dtypes.update(each.dtype for each in tensors if each.is_floating_point())
            return
        short = name.partition("::")[2].strip("_")
        self.collectives[short] += 1
        for _, leaf in leaves(args) if torch.is_grad_enabled() else ():
            # one that carries gradients is called by an autograd.Function, in which they are off
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.lost.setdefault(short, f"a tensor of shape {tuple(leaf.shape)}")


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def stop_dropout(model: nn.Module) -> None:
    """Compiled code draws random numbers in another order: what it computes can be compared only without them."""
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0


class Scratch:
    """A model to try things on: the reference's before its first update. What a try changes is put back."""

    def __init__(self, loop: Loop, model: nn.Module) -> None:
        self.loop, self.model = loop, model
        self._generators = Randomness(loop.device)

    def try_batch(
        self, batch: Any, *, backward: bool = True, seen: Seen | None = None, compiled: Any = None
    ) -> tuple[float, Grads]:
        """The loss and the gradients, with this rank's random numbers from the start. ``compiled``: the model, to be
        called in its place, which else runs op by op."""
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self._generators.set(self.loop.random[self.loop.rank])
        grads: Grads = {}
        stance = torch.compiler.set_stance("force_eager") if compiled is None else nullcontext()
        try:
            with stance:
                with nullcontext() if seen is None else torch_private.seeing_operators(seen.operator):
                    loss = self.loop.loss(self.model if compiled is None else compiled, map_tensors(batch, torch.clone))
                if seen is not None:
                    seen.drawn = drawn(self.loop.random[self.loop.rank], self._generators.get())
                if backward:
                    loss.backward()  # type: ignore[no-untyped-call]
        finally:
            write_buffers(self.model, buffers)
            add_gradients(self.model, grads)
        return float(loss.detach()), grads


# --- of what ranks begin with ---


def of_weights(digests: Sequence[Mapping[str, str]]) -> list[Finding]:
    for rank, theirs in enumerate(digests):
        names = [name for name in digests[0] if theirs.get(name) != digests[0][name]]
        if names:
            text = (
                f"rank {rank} begins with other values than rank 0 in {len(names)} of {len(theirs)} parameters and "
                f"buffers: {some(names, 3)}. zc and DDP train those of rank 0: call torch.manual_seed with one number "
                "on all ranks before the model is made"
            )
            return [Finding("other-weights", text, rank)]
    return []


def of_options(groups: Sequence[Sequence[tuple[str, Mapping[str, str]]]]) -> list[Finding]:
    """``groups``: of each rank, each group's name and options."""
    for rank, theirs in enumerate(groups):
        for (name, first), (other, own) in zip(groups[0], theirs, strict=False):
            differing = [key for key in first if first[key] != own.get(key)]
            if name != other or differing:
                mine, theirs_shown = (", ".join(f"{key}={each.get(key)}" for key in differing) for each in (first, own))
                text = f"rank 0 has {name} with {mine}, rank {rank} has {other} with {theirs_shown}: give both the same"
                return [Finding("other-optimizer", text, rank)]
    return []


def of_data(batches: Sequence[Sequence[Any]]) -> list[Finding]:
    by_rank = [[digest(batch) for batch in own] for own in batches]
    for rank, own in enumerate(by_rank):
        first = by_rank.index(own)
        if first < rank:
            text = (
                f"rank {rank} has the batches of rank {first}: the same gradient, computed twice. Give each rank its "
                "own part, as torch.utils.data.DistributedSampler does, or a seed of its own for the data"
            )
            return [Finding("same-data", text, rank)]
    return []


def of_random_numbers(random: Sequence[Mapping[str, Any]], names: set[str]) -> list[Finding]:
    """``names``: the generators that the step draws from."""
    for name in sorted(names):
        states = [digest(state[name]) for state in random]
        for rank, state in enumerate(states):
            first = states.index(state)
            if first < rank:
                text = (
                    f"the step draws random numbers (dropout, noise), and rank {rank} draws those of rank {first}: "
                    "call torch.manual_seed(seed + rank) on each rank, after the model is made"
                )
                return [Finding("same-random-numbers", text, rank)]
    return []


# --- of the step ---


def of_collectives(seen: Seen, rank: int) -> list[Finding]:
    return [
        Finding(
            "gather-without-gradient",
            f"the step gives {what} that requires a gradient to torch.distributed's {name}, which returns none: what "
            "other ranks make of it trains nothing. Use torch.distributed.nn.functional, or detach() it",
            rank,
        )
        for name, what in seen.lost.items()
    ]


def of_inputs(loop: Loop, scratch: Scratch) -> list[Finding]:
    """Whether another batch gives another loss, or another gradient."""
    own = loop.batch(loop.rank, 0, 0)
    others = [*loop.batches[(loop.rank + 1) % loop.world_size], *loop.batches[loop.rank]]
    other = next((batch for batch in others if digest(batch) != digest(own)), None)
    if other is None and not loop.is_together:
        return []
    first, second = (scratch.try_batch(own if batch is None else batch) for batch in (own, other))
    is_equal = first[0] == second[0] and all(torch.equal(g, second[1].get(n, g + 1)) for n, g in first[1].items())
    if other is None or not is_equal or first[1].keys() != second[1].keys():
        return []
    text = f"on rank {loop.rank} the step gives two batches that differ one loss and one gradient: it reads neither"
    return [Finding("ignores-inputs", text, loop.rank)]


def of_detached(loop: Loop, scratch: Scratch, trace: Sequence[Moment]) -> list[Finding]:
    """Parameters without a gradient in all updates, on which the loss depends. All ranks try the same ones."""
    names = [key.name for key, value in trace[0].of("gradient") if value is None]
    names = [name for name in names if all(moment.values[Key("gradient", name)] is None for moment in trace)]
    batch, params = loop.batch(loop.rank, 0, 0), dict(scratch.model.named_parameters())
    found: list[str] = []
    loss = scratch.try_batch(batch, backward=False)[0] if names else 0.0

    def changes(some_names: Sequence[str]) -> bool:
        before = {name: params[name].detach().clone() for name in some_names}
        with torch.no_grad():
            for name, value in before.items():
                params[name].copy_(1.5 * value + 0.5)
        try:
            return scratch.try_batch(batch, backward=False)[0] != loss
        finally:
            with torch.no_grad():
                for name, value in before.items():
                    params[name].copy_(value)

    depends = changes(names) if names else False
    if any(loop.ranks.gather_objects(depends)):
        found = [name for name in names if changes([name])]
    if not found:
        return []
    text = (
        f"the loss depends on {some(found, 3)}, and no gradient reaches {'it' if len(found) == 1 else 'them'}, on any "
        "rank: look for detach(), .data, .item(), no_grad() or a rounding between it and the loss"
    )
    return [Finding("detached", text, loop.rank)]


def of_updates(loop: Loop, trace: Sequence[Moment]) -> list[Finding]:
    """Whether some update has moved some weight of the reference, where a gradient is not zero."""
    gradients = [value for moment in trace for _, value in moment.of("gradient") if value is not None]
    weights = [value for moment in trace for _, value in moment.of("weight")]
    if not any(bool(grad.any()) for grad in gradients) or any(bool(weight.any()) for weight in weights):
        return []
    updates = "in 1 update" if len(trace) == 1 else f"in {len(trace)} updates"
    if all(group["lr"] == 0 for one in given_in(loop.optimizer) for group in one.param_groups if "lr" in group):
        return [Finding("lr-zero", f"no weight moves {updates}: lr is 0 in all groups of the optimizer", loop.rank)]
    text = (
        f"gradients are not zero, and no weight moves {updates}, in plain PyTorch already: look for an update without "
        "optimizer.step(), for zero_grad() before it, and for an optimizer of other parameters"
    )
    return [Finding("no-training", text, loop.rank)]


def of_mean(loop: Loop, scratch: Scratch, allowed: Allowed) -> list[Finding]:
    """Whether one device, with all ranks' first batches as one, would weigh them as the mean over ranks does. The
    gradient of all is fitted by those of the ranks; where they do not make it up, samples depend on each other, and
    nothing is said."""
    batches = [loop.batch(rank, 0, 0) for rank in range(loop.world_size)]
    try:
        together = joined(batches)
        _, wanted = scratch.try_batch(together)
    except (PlanError, RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        why = str(error).partition("\n")[0]
        text = f"the mean over ranks was not held against the mean over samples: the batches of all make no one ({why})"
        return [Finding("not-joined", text, loop.rank)]
    parts = [scratch.try_batch(batch)[1] for batch in batches]

    def rows() -> Iterator[tuple[Tensor, Tensor]]:
        """Of each parameter the gradients of the ranks, a column each, and that of all batches."""
        for name, grad in wanted.items():
            columns = [part.get(name, torch.zeros_like(grad)).double().flatten() for part in parts]
            yield torch.stack(columns, 1), grad.double().flatten()

    def distance_to(shares: Tensor) -> float:
        return math.sqrt(sum(norm(target - columns @ shares) ** 2 for columns, target in rows()))

    limit = math.sqrt(sum(size**2 for key, size in allowed.limits[0].items() if key.kind == "gradient"))
    equal = torch.full((loop.world_size,), 1 / loop.world_size, dtype=torch.float64, device=loop.device)
    off = distance_to(equal)
    if off <= limit:
        return []
    # the normal equations, W by W
    squares, products = torch.outer(equal, equal) * 0, equal * 0
    for columns, target in rows():
        squares, products = squares + columns.T @ columns, products + columns.T @ target
    shares = torch.linalg.pinv(squares) @ products
    if distance_to(shares) > max(limit, 1e-2 * off):
        return []
    shown = ", ".join(f"{share:.3g}" for share in shares.tolist())
    if abs(float(shares.sum()) - loop.world_size) < 1e-2 * loop.world_size:
        times = f"{loop.world_size} times those of the mean over ranks"
        text = f"the loss is a sum over samples: on one device with all batches gradients are {times}"
        return [Finding("sum-of-losses", text, loop.rank)]
    return [
        Finding(
            "mean-of-means",
            f"the loss is a mean over what a rank has, and ranks have other numbers of tokens or samples: one device "
            f"would weigh the ranks' losses by {shown}, the mean over ranks by {1 / loop.world_size:.3g} each. Divide "
            "the sum of a rank's losses by the mean number of tokens over ranks",
            loop.rank,
        )
    ]


def of_ranks(loop: Loop, allowed: Allowed, trace: Sequence[Moment]) -> list[Finding]:
    """Whether all ranks have computed the same of the same batches, weights and random numbers."""
    own = {
        key: value if isinstance(value, float) else norm(value)
        for key, value in trace[0].values.items()
        if value is not None and key.kind in ("loss", "gradient", "buffer")
    }
    gathered = loop.ranks.gather_objects(own)
    for kind in ("loss", "gradient", "buffer"):
        for rank, theirs in enumerate(gathered):
            for key, value in theirs.items():
                first = gathered[0].get(key)
                if key.kind != kind or (first is not None and distance(value, first) <= allowed.limits[0][key]):
                    continue
                whose = f" of rank {key.rank}'s batch" if key.rank >= 0 else ""
                shown = "none" if first is None else f"{first:.6g}"
                if kind == "buffer":
                    text = (
                        f"from the same batches, weights and random numbers rank {rank} writes other values than rank "
                        f"0 into buffer {key.name} (norms {value:.6g} and {shown}): it depends on the rank"
                    )
                    return [Finding("buffer-by-rank", text, rank)]
                text = (
                    f"from the same batch, weights and random numbers rank {rank} computes another {kind} than rank 0 "
                    f"({kind} {key.name}{whose}: {value:.6g} and {shown}). Look for what depends on the rank in the "
                    "step and the model: get_rank(), an environment variable, a file, a seed of its own"
                )
                return [Finding("rank-dependent", text, rank)]
    return []


def of_buffers(loop: Loop, moment: Moment) -> list[Finding]:
    """A note: buffers that ranks write from their own batches."""
    names = dict.fromkeys(key.name for key, _ in moment.of("buffer"))
    differing = [
        name
        for name in names
        if any(
            distance(moment.values[Key("buffer", name, rank)], moment.values[Key("buffer", name, 0)]) > 0.0
            for rank in range(1, loop.world_size)
            if Key("buffer", name, rank) in moment.values
        )
    ]
    if not differing or loop.is_together:
        return []
    what = "rank 0's count, as under DDP" if loop.config.broadcast_buffers else "each rank keeps its own"
    text = f"ranks write other values into {some(differing, 3)}, each from its own batches; {what}"
    return [Finding("own-buffers", text)]


def of_numbers(trace: Sequence[Moment]) -> list[Finding]:
    for number, moment in enumerate(trace):
        for key, value in moment.values.items():
            if value is not None and not bool(torch.isfinite(torch.as_tensor(value)).all()):
                text = f"{key.kind} {key.name} of update {number} is not finite, in plain PyTorch already"
                return [Finding("not-finite", text, max(key.rank, 0))]
    return []


def compiled_differs(loop: Loop, scratch: Scratch, allowed: Allowed, backend: str) -> bool:
    """Whether torch.compile alone, without zc, differs as well from op by op, on this rank's first batch."""
    batch = loop.batch(loop.rank, 0, 0)
    loss, wanted = scratch.try_batch(batch)
    taken = ("mode", "options", "dynamic", "fullgraph")
    own = {name: value for name, value in loop.options_for(backend).items() if name in taken}
    value, grads = scratch.try_batch(batch, compiled=torch.compile(scratch.model, backend=backend, **own))
    key = Key("loss", "microbatch 0", loop.rank)
    if distance(value, loss) > allowed.limits[0][key]:
        return True
    limits = {key.name: limit * loop.world_size for key, limit in allowed.limits[0].items() if key.kind == "gradient"}
    return any(distance(grads.get(name), grad) > limits[name] for name, grad in wanted.items())
