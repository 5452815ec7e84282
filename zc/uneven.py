"""`zc.join`: ranks with different numbers of batches train together until the last one is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import nn

from zc.config import check_count
from zc.ranks.group import Group
from zc.registry import sharded

T = TypeVar("T")


def join(model: nn.Module, batches: Iterable[T], *, microbatches: int = 1) -> Iterator[T | None]:
    """This rank's batches, then None while another rank still has some, so that all ranks make equally many updates::

        for batch in zc.join(model, loader):
            if batch is not None:
                loss_of(model, batch).backward()
            zc.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    A rank without a batch adds nothing, and gradients stay the mean over *all* ranks, as under DDP's Join with
    ``divide_by_initial_world_size=True``, its default. It must still call ``step()`` and everything else that all
    ranks call together: `clip_grad_norm_` (torch's own looks for a ``param.grad`` first, which such a rank may
    lack), `save`, a collective of the loop. Buffers stay rank 0's: those of its last forward.

    Args:
        microbatches: batches per update: call ``step()`` after so many items, None or not. Ranks ask each other once
            per update whether any has data left: an exchange of a few bytes in host memory.
    """
    check_count("microbatches", microbatches)
    return _joined(sharded(model).runtime.group, iter(batches), microbatches)


def _joined(group: Group, batches: Iterator[T], microbatches: int) -> Iterator[T | None]:
    # Ranks exchange this only between two updates, where all have made equally many announcements. Inside an update
    # they may have different numbers of backwards, and so of announcements (zc/engine/announcements.py).
    while True:
        batch = next(batches, None)
        if not group.max_on_host([int(batch is not None)])[0]:
            return
        yield batch
        for _ in range(microbatches - 1):
            yield next(batches, None)
