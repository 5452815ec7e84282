"""zc's own process groups: made under unique names, and closed only when all ranks agree.

A group has about four descriptors and three threads. Python's collector drops a model at a different moment on each
rank, and closing a group on one rank alone does harm. ``new_group(use_local_synchronization=True)`` names a group by
the number of existing groups, so ranks would wait for each other under two names. gloo's destructor also waits for
started collectives. So the groups of dropped models are set aside. The next `zc.compile` or `zc.close` of the same
ranks closes them, the same ones on every rank.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from zc import torch_private

# lifetime: forever. gloo's destructor waits for started collectives, which a lost rank never finishes.
_ABANDONED: list[dist.ProcessGroup] = []

# by number, with collectives that may still run, and what other ranks may still read
_Held = dict[int, tuple[dist.ProcessGroup, list[dist.Work], list[Tensor]]]


class _Ranks:
    """The groups of one set of ranks under one default group."""

    def __init__(self) -> None:
        self.count = 0  # equal on all of these ranks, which make their groups in one order
        self.num_models = 0
        self.left: _Held = {}  # of models that this rank has dropped


_WORLDS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _Ranks]] = weakref.WeakKeyDictionary()


class Groups:
    """The groups of one model. ``ranks``: their members, in the order of their ranks in the group."""

    def __init__(self, ranks: Sequence[int], backend: str) -> None:
        world = dist.group.WORLD
        assert world is not None, "a process group is initialised"
        self._ranks, self._backend, self._world = tuple(ranks), backend, weakref.ref(world)
        self._known = _WORLDS.setdefault(world, {}).setdefault(self._ranks, _Ranks())
        self._held: _Held = {}
        # the collector may run in any thread at any time, so this takes no lock and closes nothing
        weakref.finalize(self, self._known.left.update, self._held).atexit = False

    @property
    def is_open(self) -> bool:
        """Whether the groups can be used: False after ranks are lost, or the program has destroyed all groups."""
        return bool(self._held) and dist.is_initialized() and dist.group.WORLD is self._world()

    def new(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        *,
        like: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        members: Sequence[int] | None = None,
    ) -> dist.ProcessGroup:
        """Makes another group; every rank calls it. ``backend``: None means that of host memory. ``timeout``: None
        means the backend's own. ``like`` and ``device``: see `torch_private.new_group`. ``members``: by their numbers
        among all, this rank's part of them, which are divided into such groups; None: all."""
        self._known.count += 1
        name, ranks = f"zc/{'_'.join(map(str, self._ranks))}/{self._known.count}", self._ranks
        if members is not None:
            name, ranks = f"{name}/{'_'.join(map(str, members))}", tuple(self._ranks[k] for k in members)
        group = torch_private.new_group(
            ranks, backend or self._backend, name, timeout, high_priority=True, like=like, device=device
        )
        self._held[self._known.count] = group, [], []
        return group

    def number_of_model(self) -> int:
        """Numbers the models that these ranks compile. Every rank calls it once per model."""
        self._known.num_models += 1
        return self._known.num_models

    def started(self, group: dist.ProcessGroup | None, work: dist.Work) -> None:
        """Records a collective that possibly nobody waits for."""
        for own_group, works, _ in self._held.values():
            if own_group is group:
                works[:] = [*(w for w in works if not w.is_completed()), work]

    def keep(self, tensor: Tensor) -> None:
        """Keeps memory that other ranks read: after this rank has dropped the model, until all have."""
        for _, _, kept in self._held.values():
            kept.append(tensor)
            return

    def abandon(self) -> None:
        """Keeps all groups open for good, because ranks are out of step or gone."""
        _ABANDONED.extend(group for group, *_ in self._held.values())
        self._held.clear()

    def sweep(self, gather: Callable[[Tensor], Tensor], *, own: bool = False) -> None:
        """Closes the groups that all ranks have dropped; with ``own`` also these groups. ``gather`` collects a row [n]
        of every rank as [W, n]."""
        left = {**self._known.left, **(self._held if own else {})}
        is_kept = torch.ones(self._known.count, dtype=torch.uint8)
        for number, (_, works, _) in left.items():
            is_kept[number - 1] = not all(work.is_completed() for work in works)
        if len(is_kept) > 1:  # otherwise the only group is the one that would carry this exchange
            is_kept = gather(is_kept).amax(0)
        for number in ((is_kept == 0).nonzero().flatten() + 1).tolist():
            for groups in (self._known.left, self._held):
                if number in groups:
                    _close(groups.pop(number)[0])


def _close(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(ValueError):  # the program has destroyed all groups meanwhile
        dist.destroy_process_group(group)
