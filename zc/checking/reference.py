"""What the loop should do: plain PyTorch, op by op, one process for the batches of all ranks.

The rule is DDP's: the gradient is the mean over ranks of the sum over microbatches, None where no rank has one. Each
rank has buffers and random numbers of its own; buffers are rank 0's before a forward, unless the forward before was one
of `no_sync`, or ``broadcast_buffers=False``. Weights narrower than fp32 have fp32 masters, which the optimizer updates.

A step that calls collectives can't be run for another rank. Then each rank runs its own batches, and gradients are
gathered as they are: the rule stays, but what depends on the rank can't be told from what does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.checking.loop import Key, Loop, Moment, kept, norm, wide
from zc.checking.values import Randomness, copied, map_tensors, names_of, options_by_name
from zc.errors import PlanError
from zc.optim.assignment import given_in, optimizers_in

Grads = dict[str, Tensor]


@dataclass
class First:
    """What the first update has shown beside its numbers. ``parts``: each rank's gradient; ``by_microbatch``: the mean
    over ranks of each; ``outside``: how far weights moved in the update, but not in an optimizer's step."""

    parts: list[Grads] = field(default_factory=list)
    by_microbatch: list[Grads] = field(default_factory=list)
    outside: Grads = field(default_factory=dict)
    before: Grads = field(default_factory=dict)
    groups: dict[str, dict[str, float]] = field(default_factory=dict)


class Reference:
    """A run from the start. ``noise``: None, or the seed of one that begins one rounding beside it: weights, inputs and
    each mean gradient are off by about as much as rounding them once, and norms in its updates, by which gradients are
    clipped, are without the error of torch's sums."""

    def __init__(self, loop: Loop, noise: int | None = None) -> None:
        self.loop, self.first = loop, First()
        self._noise = None if noise is None else torch.Generator().manual_seed(noise)
        self._generators = Randomness(loop.device)
        self._states = list(loop.random)
        self.masters, self.optimizer = copied(loop.model, loop.optimizer)
        self._names = names_of(self.masters, self.optimizer)
        if self._noise is not None:
            with torch.no_grad():
                for param in self.masters.parameters():
                    param.copy_(self._rounded_otherwise(param))
        self.model = self._computing_copy()
        own = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self._buffers = [own] + [{n: b.clone() for n, b in own.items()} for _ in range(loop.world_size - 1)]
        self._first_weights = {name: kept(p) for name, p in self.weights()}
        self._syncs_buffers = True

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, param) for name, param in self.model.named_parameters() if param.requires_grad)

    def _rounded_otherwise(self, value: Tensor) -> Tensor:
        if self._noise is None or not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=self._noise, device="cpu").mul_(2).sub_(1).to(value.device)
        off = max(self.loop.rounding, torch.finfo(value.dtype).eps)
        return (value.detach().double() * (1 + off * signs)).to(value.dtype)

    def _computing_copy(self) -> nn.Module:
        """``masters`` itself where it is as wide as its weights; else its weights become fp32, and a copy narrower."""
        dtype = self.loop.config.param_dtype
        narrow = {
            name: dtype or param.dtype
            for name, param in self.masters.named_parameters()
            if param.requires_grad and (dtype or param.dtype) != wide(param.dtype)
        }
        if not narrow:
            return self.masters
        twin, _ = copied(self.masters, self.optimizer)
        for name, param in self.masters.named_parameters():
            param.data = param.data.to(wide(param.dtype)) if name in narrow else param.data
        for name, param in twin.named_parameters():
            param.data = param.data.to(narrow.get(name, param.dtype))
        return twin

    # --- updates ---

    def run(self, advance: Callable[[], None]) -> Iterator[Moment]:
        """One for each update. ``advance`` is called after each forward and backward."""
        for number in range(self.loop.num_updates):
            yield self._update(number, advance)

    def _update(self, number: int, advance: Callable[[], None]) -> Moment:
        loop, moment = self.loop, Moment()
        parts: list[Grads] = [{} for _ in range(loop.world_size)]
        by_microbatch: list[Grads] = []
        mine = [loop.rank] if loop.is_together else list(range(loop.world_size))
        for k in range(loop.microbatches):
            self._sync_buffers(next_time=k + 1 == loop.microbatches)
            before = [dict(part) for part in parts]
            with loop.ranks.refuse_together():
                for rank in mine:
                    loss = self._run_microbatch(rank, loop.batch(rank, number, k), parts[rank])
                    moment.values[Key("loss", f"microbatch {k}", rank)] = loss
                    advance()
            if number == 0 and loop.microbatches > 1 and not loop.is_together:
                new = [
                    {name: grad - earlier[name] if name in earlier else grad for name, grad in part.items()}
                    for part, earlier in zip(parts, before, strict=True)
                ]
                by_microbatch.append(_mean(new))
        if loop.is_together:
            self._exchange(parts, moment)
        mean = self._noisy(_mean(parts))
        moment.values.update({Key("gradient", name): None for name, _ in self.weights()})
        moment.values.update({Key("gradient", name): kept(grad) for name, grad in mean.items()})
        for rank in range(loop.world_size) if not loop.is_together else mine:
            for name, buffer in self._buffers[rank].items():
                moment.values[Key("buffer", name, rank)] = kept(buffer)
        if number == 0:
            to_host = [{name: kept(grad) for name, grad in part.items()} for part in parts]
            self.first.parts, self.first.by_microbatch = to_host, by_microbatch
        with loop.ranks.refuse_together():
            self._finish_update(mean, watches=number == 0 and self._noise is None)
        moment.add_weights(dict(self.weights()), self._first_weights)
        moment.add_state([each.state_dict() for each in given_in(self.optimizer)], self._names)
        return moment

    def _run_microbatch(self, rank: int, batch: object, into: Grads) -> float:
        """One forward and backward of ``rank``, whose gradients are added up in at least fp32."""
        batch = map_tensors(batch, lambda t: self._rounded_otherwise(t) if self._noise is not None else t.clone())
        self._generators.set(self._states[rank])
        write_buffers(self.model, self._buffers[rank])
        with torch.compiler.set_stance("force_eager"):
            loss = self.loop.loss(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        self._states[rank] = self._generators.get()
        self._buffers[rank] = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        add_gradients(self.model, into)
        return float(loss.detach())

    def _sync_buffers(self, *, next_time: bool) -> None:
        if self._syncs_buffers and self.loop.config.broadcast_buffers:
            own = self._buffers[0]
            if self.loop.is_together:
                own = self.loop.ranks.gather_objects({n: kept(b) for n, b in own.items()})[0]
                self._buffers[self.loop.rank] = {n: b.to(self.loop.device) for n, b in own.items()}
            else:
                self._buffers = [{n: b.clone() for n, b in own.items()} for _ in self._buffers]
        self._syncs_buffers = next_time

    def _exchange(self, parts: list[Grads], moment: Moment) -> None:
        own = {name: kept(grad) for name, grad in parts[self.loop.rank].items()}
        for rank, (grads, losses) in enumerate(self.loop.ranks.gather_objects((own, dict(moment.of("loss"))))):
            parts[rank] = {name: grad.to(self.loop.device) for name, grad in grads.items()}
            moment.values.update(losses)

    def _noisy(self, mean: Grads) -> Grads:
        if self._noise is None or not mean:
            return mean
        numel = sum(grad.numel() for grad in mean.values())
        size = (sum(norm(grad) ** 2 for grad in mean.values()) / max(numel, 1)) ** 0.5
        result = {}
        for name, grad in mean.items():
            off = max(self.loop.rounding, torch.finfo(grad.dtype).eps)
            wrong = torch.randn(grad.shape, generator=self._noise, dtype=torch.float64, device="cpu").to(grad.device)
            result[name] = (grad.double() * (1 + off * wrong) + off * size * wrong).to(grad.dtype)
        return result

    def _finish_update(self, mean: Grads, *, watches: bool) -> None:
        params = dict(self.masters.named_parameters())
        self._take_over_writes(params)
        for name, param in params.items():
            param.grad = mean[name].to(param.dtype) if name in mean else None
        if watches:
            self._watched_update(params)
        else:
            with torch_private.exact_norms() if self._noise is not None else nullcontext():
                self.loop.update(self.masters, self.optimizer)
        for param in params.values():
            param.grad = None
        if self.model is not self.masters:
            with torch.no_grad():
                for name, param in self.model.named_parameters():
                    param.copy_(params[name])

    @torch.no_grad()
    def _take_over_writes(self, params: dict[str, nn.Parameter]) -> None:
        """What a forward or a hook has written into narrow weights is written into their masters."""
        for name, param in self.model.named_parameters() if self.model is not self.masters else ():
            master = params[name]
            master.copy_(torch.where(param == master.to(param.dtype), master, param.to(master.dtype)))

    def _watched_update(self, params: dict[str, nn.Parameter]) -> None:
        """The update, and how far it moves weights outside of the optimizers' steps."""
        last = {name: kept(param) for name, param in params.items() if param.requires_grad}
        outside = {name: torch.zeros_like(weight) for name, weight in last.items()}

        def before_step(*_: object) -> None:
            for name, weight in last.items():
                outside[name] += kept(params[name]) - weight

        def after_step(*_: object) -> None:
            last.update({name: kept(params[name]) for name in last})

        self.first.before = dict(last)
        self.first.groups = options_by_name(self.masters, self.optimizer)
        each = optimizers_in(self.optimizer)
        removers = [torch_private.surround_step(one, None, before_step, after_step) for one in each]
        try:
            self.loop.update(self.masters, self.optimizer)
        finally:
            for remove in removers:
                remove()
        before_step()
        self.first.outside = outside


def add_gradients(model: nn.Module, into: Grads) -> None:
    """Adds the model's gradients to ``into``, in at least fp32, and clears them."""
    for name, param in model.named_parameters():
        if param.grad is not None and param.requires_grad:
            if param.grad.layout != torch.strided:
                raise PlanError(f"the gradient of {name} is sparse, and zc reduces dense ones: make it dense")
            grad = param.grad.detach().to(wide(param.grad.dtype))
            into[name] = into[name] + grad if name in into else grad.clone()
        param.grad = None


@torch.no_grad()
def write_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name])


def _mean(parts: list[Grads]) -> Grads:
    """In the order of the ranks; of a name that some parts lack, those count as zeros."""
    total: Grads = {}
    for part in parts:
        for name, grad in part.items():
            total[name] = total[name] + grad if name in total else grad
    return {name: grad / len(parts) for name, grad in total.items()}
