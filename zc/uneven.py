"""`zc.join`: ranks whose data runs out at different batches go on together until the last one is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import nn

from zc.errors import PlanError
from zc.ranks.comm import Group
from zc.registry import sharded

T = TypeVar("T")


def join(model: nn.Module, batches: Iterable[T], *, microbatches: int = 1) -> Iterator[T | None]:
    """This rank's batches, then None for as long as another rank has some, so that all ranks make as many updates::

        for batch in zc.join(model, loader):
            if batch is not None:
                loss_of(model, batch).backward()
            zc.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    A rank without a batch adds nothing, and gradients stay the mean over *all* ranks, as under DDP's Join with
    ``divide_by_initial_world_size=True``, its default. It must come to ``step()`` all the same, and to whatever else
    all ranks do together: `clip_grad_norm_` (torch's own looks for a ``param.grad`` first, which such a rank may
    lack), `save`, a collective of the loop. Buffers stay rank 0's: those of its last forward.

    Args:
        microbatches: batches to an update: ``step()`` comes behind each that many, None or not. Ranks ask each other
            once an update whether any has data left, a few bytes of host memory.
    """
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise PlanError(f"microbatches must be a whole number of at least 1, got {microbatches!r}")
    return _together(sharded(model).runtime.group, iter(batches), microbatches)


def _together(group: Group, mine: Iterator[T], microbatches: int) -> Iterator[T | None]:
    # Only here have all ranks met, at the boundary of the update before: inside an update they may have different
    # numbers of backwards, and with them of announcements (zc/ranks/agreement.py).
    while True:
        ahead = next(mine, None)
        if not group.max_on_host([int(ahead is not None)])[0]:
            return
        yield ahead
        for _ in range(microbatches - 1):
            yield next(mine, None)
