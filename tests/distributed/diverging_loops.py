"""Training loops in which the odd rank does something else. The line that is ``# the first difference`` is the one that
``python -m zc diff`` has to name. Some stand at the odd rank's own call, some at the others', which it leaves out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tiers import FULL
from torch import Tensor, nn

import zc


class Loop(NamedTuple):
    """What a loop gets: a model with three heads, its optimizer, and the ranks that train it."""

    model: Any
    optimizer: Any
    is_odd: bool
    group: dist.ProcessGroup
    folder: str

    def loss(self, *tasks: int) -> Tensor:
        return torch.stack([out.square().mean() for out in self.model(torch.ones(4, 16), tasks)]).sum()

    def update(self) -> None:
        self.loss(0).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def leaves_out_clipping(loop: Loop) -> None:
    for step in range(3):
        loop.loss(0, 1).backward()
        if not (loop.is_odd and step == 1):
            torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)  # the first difference
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def clips_alone(loop: Loop) -> None:
    for step in range(3):
        loop.loss(0, 1).backward()
        if loop.is_odd and step == 1:
            zc.clip_grad_norm_(loop.model, 1.0)  # the first difference
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def takes_another_norm(loop: Loop) -> None:
    for _ in range(2):
        loop.loss(0).backward()
        norm = float("inf") if loop.is_odd else 2.0
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0, norm_type=norm)  # the first difference
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def ends_one_batch_early(loop: Loop) -> None:
    for step in range(3):
        if loop.is_odd and step == 2:
            break
        loop.update()
    dist.barrier(loop.group)  # the first difference
    loop.update()


def trains_one_batch_more(loop: Loop) -> None:
    for step in range(4):
        loop.update()
        if step == 2 and not loop.is_odd:
            dist.barrier(loop.group)  # the first difference


def raises_and_goes_on(loop: Loop) -> None:
    for step in range(3):
        if loop.is_odd and step == 1:
            with contextlib.suppress(FloatingPointError):
                hidden = loop.model.trunk(torch.ones(4, 16, requires_grad=True))
                hidden.register_hook(_fail)
                loop.model.heads[0](hidden).sum().backward()  # the first difference
            loop.optimizer.zero_grad()
            continue
        loop.model.heads[0](loop.model.trunk(torch.ones(4, 16, requires_grad=True))).sum().backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def _fail(_: Tensor) -> None:
    raise FloatingPointError("planted")


def raises_before_a_batch(loop: Loop) -> None:
    try:
        for step in range(3):
            loop.update()
            if loop.is_odd and step == 1:
                raise FloatingPointError("planted")
    except FloatingPointError:
        dist.barrier(loop.group)  # the first difference


def drops_gradients_alone(loop: Loop) -> None:
    for step in range(3):
        loop.loss(0).backward()
        if loop.is_odd and step == 1:
            loop.optimizer.zero_grad()  # the first difference
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def drops_a_microbatch_alone(loop: Loop) -> None:
    loop.update()
    loop.loss(0).backward()
    if loop.is_odd:
        loop.optimizer.zero_grad()  # the first difference
    loop.loss(1).backward()
    loop.optimizer.step()


def adds_a_backward_after_clipping(loop: Loop) -> None:
    loop.update()
    loop.loss(0).backward()
    zc.clip_grad_norm_(loop.model, 1.0)
    if loop.is_odd:
        loop.model(torch.ones(4, 16), (0,))[0].sum().backward()  # the first difference
    zc.clip_grad_norm_(loop.model, 1.0)


def steps_twice(loop: Loop) -> None:
    for step in range(3):
        loop.loss(0).backward()
        loop.optimizer.step()
        if loop.is_odd and step == 1:
            loop.optimizer.step()  # the first difference
        loop.optimizer.zero_grad()


def reads_the_whole_gradient_alone(loop: Loop) -> None:
    for step in range(3):
        loop.loss(0).backward()
        if loop.is_odd and step == 1:
            loop.model.trunk[0].weight.grad.full_tensor()  # the first difference
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def saves_alone(loop: Loop) -> None:
    for step in range(3):
        loop.update()
        if loop.is_odd and step == 1:
            zc.save(loop.folder, loop.model, loop.optimizer)  # the first difference


def asks_for_whole_weights_alone(loop: Loop) -> None:
    for step in range(3):
        loop.update()
        if loop.is_odd and step == 1:
            zc.full_state_dict(loop.model)  # the first difference


def evaluates_alone(loop: Loop) -> None:
    for step in range(3):
        loop.update()
        if loop.is_odd and step == 1:
            with torch.no_grad():
                for _ in range(3):
                    loop.model(torch.ones(4, 16), (0,))  # the first difference


def waits_in_its_own_collective(loop: Loop) -> None:
    for step in range(3):
        loop.update()
        if loop.is_odd and step == 1:
            dist.all_reduce(torch.ones(1), group=loop.group)  # the first difference


Run = Callable[[Loop], None]
IN_EVERY_STAGE: list[Run] = [
    leaves_out_clipping,
    clips_alone,
    takes_another_norm,
    ends_one_batch_early,
    trains_one_batch_more,
    raises_and_goes_on,
    raises_before_a_batch,
    drops_gradients_alone,
    drops_a_microbatch_alone,
    adds_a_backward_after_clipping,
    steps_twice,
    reads_the_whole_gradient_alone,
    saves_alone,
    waits_in_its_own_collective,
]
# What the error says, on every rank
SAYS: dict[Run, tuple[str, ...]] = {
    leaves_out_clipping: ("the sum over ranks of", "norms", "gather weights"),
    takes_another_norm: ("the largest over ranks of", "the sum over ranks of"),
    ends_one_batch_early: ("torch.distributed.barrier", "diverging_loops.py", "zc.join"),
    raises_and_goes_on: ("some rank has cleared its gradients",),
    adds_a_backward_after_clipping: ("reduce buckets", "norms of gradients"),
}
IN_STAGE_3: list[Run] = [asks_for_whole_weights_alone, evaluates_alone]
ALL: list[tuple[Run, int, int]] = [
    *((run, stage, odd) for run in IN_EVERY_STAGE for stage in (1, 2, 3) for odd in (0, 1)),
    *((run, 3, odd) for run in IN_STAGE_3 for odd in (0, 1)),
]
CASES = ALL if FULL else [*ALL[::5], ALL[-1]]  # each loop, and in turn each stage with either rank


def line_of(run: Run) -> int:
    """The number of the marked line."""
    first = run.__code__.co_firstlineno
    with open(__file__) as file:
        lines = file.read().splitlines()
    return next(n for n, text in enumerate(lines[first - 1 :], first) if text.endswith("# the first difference"))


def model_of(make: Callable[[], nn.Module], stage: int, group: dist.ProcessGroup, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, stage=stage, backend="eager", bucket_nbytes=64, group=group, **options)
    return model, optimizer
