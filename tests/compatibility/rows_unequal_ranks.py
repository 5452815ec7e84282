"""Item 7: ranks with different parameters, or with different numbers of backwards, between two updates."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import Heads, frozen, mlp
from rows import STEPS, Script, row
from rows_tasks import APART, task_losses
from rows_unfreezing import unfreeze
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint


def losses_of_own_tasks(s: Script, step: int) -> Tensor:
    """Head 0 on both ranks, one of the others on each, by turns; and now and then a head is nobody's."""
    other = 1 + (s.rank + step) % 2 if step % 3 else 1
    return torch.stack(task_losses(s, step, (0, other))).sum()


def clip_stock(s: Script, step: int) -> None:
    s.reduced()
    s.note(f"norm {step}", torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.05))


@row(7, "stock clipping where ranks use different parameters, a bucket each", make=Heads, options=APART)
def clipping_apart_in_buckets(s: Script) -> None:
    for step in range(STEPS):
        losses_of_own_tasks(s, step).backward()
        losses_of_own_tasks(s, step + 1).backward()
        clip_stock(s, step)
        s.update()


@row(7, "which parameters have a .grad, where ranks use different ones", make=Heads, options={"bucket_nbytes": 2**20})
def who_has_a_grad(s: Script) -> None:
    for step in range(STEPS):
        losses_of_own_tasks(s, step).backward()
        s.reduced()
        for name, param in s.model.named_parameters():
            s.note(f"{name} {step}", param.grad is None)
        total = torch.stack([p.grad.norm() for p in s.model.parameters() if p.grad is not None]).norm()
        s.note(f"norm {step}", total)
        s.update()


@row(7, "stock clipping after microbatches that are all in no_sync, where ranks use different parameters", make=Heads,
     options={"bucket_nbytes": 2**20}, refused={"always": "ZcError: ranks have a param.grad on different"})  # fmt: skip
def clipping_in_no_sync(s: Script) -> None:
    with s.no_sync():
        losses_of_own_tasks(s, 1).backward()
    clip_stock(s, 0)


@row(7, "a skipped step where ranks have different numbers of backwards")
def skipped_apart(s: Script) -> None:
    for step in range(STEPS):
        for m in range(1 + s.rank):
            s.loss(step, m).backward()
        s.optimizer.zero_grad()
        for m in range(2 - s.rank):
            s.loss(step, 2 + m).backward()
        s.update()


@row(7, "torch.autograd.grad of a parameter that one rank alone uses, then a collective", make=Heads, options=APART)
def looked_at_apart(s: Script) -> None:
    for step in range(STEPS):
        loss = task_losses(s, step, (1 + s.rank,))[0]
        weight = s.model.heads[1].weight
        grad = torch.autograd.grad(loss, weight, retain_graph=True, allow_unused=True)[0]
        s.note(f"gradient {step}", 0.0 if grad is None else grad.norm())
        total = loss.detach().clone()
        dist.all_reduce(total)
        s.note(f"loss {step}", total)
        loss.backward()
        s.update()


@row(7, "no zero_grad, a norm that is read after the step, then backwards on one rank alone")
def read_then_apart(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.optimizer.step()
        s.reduced()
        s.note(f"norm {step}", s.model[0].weight.grad.norm())
        for m in range(2 * s.rank):
            s.loss(step, 1 + m).backward()
        s.optimizer.step()


@row(7, "one rank clears its gradients, the other does not",
     refused={"always": "RankMismatchError: what the gradients hold"})  # fmt: skip
def cleared_on_one_rank(s: Script) -> None:
    s.loss(0).backward()
    if s.rank == 0:
        s.optimizer.zero_grad()
        s.loss(0).backward()
    s.update()


def two_backwards(s: Script, step: int) -> Tensor:
    tasks = ((0, 1), (2, 0))[s.rank]
    total = torch.zeros((), dtype=s.dtype)
    for task in tasks:
        loss = task_losses(s, step, (task,))[0]
        loss.backward()
        total += loss.detach().to(s.dtype)
    return total


@row(7, "ranks see different tasks, and the loss is all-reduced before the step", make=Heads, options=APART)
def all_reduced_loss(s: Script) -> None:
    for step in range(STEPS):
        total = two_backwards(s, step)
        dist.all_reduce(total)
        s.note(f"loss {step}", total)
        s.update()


@row(7, "ranks see different tasks, and a collective stands between the backwards", make=Heads, options=APART)
def collective_between(s: Script) -> None:
    for step in range(STEPS):
        for task in ((0, 1, 2), (2, 2, 0))[s.rank]:
            task_losses(s, step, (task,))[0].backward()
            dist.all_reduce(torch.ones(1))
        if step % 2:
            s.update()
        else:
            s.optimizer.zero_grad()
            dist.all_reduce(torch.ones(1))


@row(7, "ranks see different tasks, and a second model is compiled before the step", make=Heads, options=APART)
def second_model(s: Script) -> None:
    for step in range(STEPS):
        two_backwards(s, step)
        if step == 1:
            other = mlp().to(s.dtype)
            s.compile_too(other, SGD(other.parameters(), lr=0.1))
        s.update()


@row(7, "ranks see different tasks, beside a DDP model", make=Heads, options=APART)
def beside_ddp(s: Script) -> None:
    other = DistributedDataParallel(nn.Linear(4, 4, dtype=s.dtype))
    for step in range(STEPS):
        two_backwards(s, step)
        other(torch.ones(2, 4, dtype=s.dtype)).sum().backward()
        s.note(f"other {step}", other.module.weight.grad)
        s.update()


@row(7, "zc.recompile between microbatches that were held back and the step", make=frozen)
def recompiled_between(s: Script) -> None:
    for step in range(STEPS):
        with s.no_sync():
            s.loss(step).backward()
        if step == 2:
            unfreeze(s, s.model[2], lr=3e-3)
        s.update()


class ReentrantHeads(Heads):
    """Heads on a trunk whose second part runs inside a reentrant checkpoint: a backward inside the backward. Without
    tasks, nothing comes before it."""

    def forward(self, x: Tensor, tasks: tuple[int, ...]) -> list[Tensor]:
        hidden = checkpoint(self.trunk[1:], self.trunk[0](x), use_reentrant=True)
        return [self.heads[task](hidden) for task in tasks] or [hidden[:, :4]]


@row(7, "ranks see different tasks over a reentrant checkpoint", make=ReentrantHeads, options=APART)
def reentrant_tasks(s: Script) -> None:
    for step in range(STEPS):
        losses_of_own_tasks(s, step).backward()
        losses_of_own_tasks(s, step + 1).backward()
        clip_stock(s, step)
        s.update()


@row(7, "a backward begins inside a reentrant checkpoint on one rank alone, then a collective", make=ReentrantHeads,
     options=APART)  # fmt: skip
def begun_in_a_checkpoint(s: Script) -> None:
    for step in range(STEPS):
        loss = torch.stack(task_losses(s, step, (0, 1) if s.rank == step % 2 else ())).sum()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        s.note(f"loss {step}", total)
        s.update()


@row(7, "a backward of three forwards, then one of a single forward")
def fewer_forwards(s: Script) -> None:
    for step in range(STEPS):
        losses = [s.loss(step, m) for m in range(1 if step % 2 else 3)]
        torch.stack(losses).sum().backward()
        s.loss(step, 3).backward()
        s.update()


@row(7, "a norm that was read, then the zero_grad of the optimizer's class, then stock clipping")
def clipped_past_the_class(s: Script) -> None:
    s.loss(0).backward()
    for param in s.model.parameters():
        param.grad.norm()
    type(s.optimizer).zero_grad(s.optimizer)
    clip_stock(s, 0)
