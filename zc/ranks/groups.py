"""Process groups of zc's own: made under names that never come again, and closed where all ranks agree that they can.

A group is some four descriptors and three threads. Python's collector lets go of a model at another moment on each
rank, and a group that closes on one rank alone does harm: ``new_group(use_local_synchronization=True)`` names a group
by how many there are, so ranks would wait for each other under two names; and gloo's destructor waits for a
collective that was started. So what a dropped model leaves is put aside, and closed by the next `zc.compile` or
`zc.close` of the same ranks, the same groups on every rank.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zc import torch_private


class Started(Protocol):
    """A collective under way."""

    def is_completed(self) -> bool: ...


# lifetime: for ever. gloo's destructor waits for a collective that was started, and a lost rank never ends it.
_ABANDONED: list[dist.ProcessGroup] = []

_Held = dict[int, tuple[dist.ProcessGroup, list[Started]]]  # by number, with the collectives that may be under way


class _Ranks:
    """What some ranks have made under one default group."""

    def __init__(self) -> None:
        self.count = 0  # the same on all of them: they make their groups in one order
        self.num_models = 0
        self.left: _Held = {}  # by models that this rank has dropped


_WORLDS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], _Ranks]] = weakref.WeakKeyDictionary()


class Groups:
    """The groups of one model. ``ranks``: who is in them, in the order of their ranks there."""

    def __init__(self, ranks: Sequence[int], backend: str) -> None:
        world = dist.group.WORLD
        assert world is not None, "a process group is initialised"
        self._ranks, self._backend, self._world = tuple(ranks), backend, weakref.ref(world)
        self._known = _WORLDS.setdefault(world, {}).setdefault(self._ranks, _Ranks())
        self._held: _Held = {}
        # the collector may come in any thread, at any time: this takes no lock and closes nothing
        weakref.finalize(self, self._known.left.update, self._held).atexit = False

    @property
    def is_open(self) -> bool:
        """Whether a collective on them makes sense: False once ranks are lost, or the program has ended all groups."""
        return bool(self._held) and dist.is_initialized() and dist.group.WORLD is self._world()

    def new(
        self,
        backend: str | None = None,
        timeout: timedelta | None = None,
        *,
        like: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> dist.ProcessGroup:
        """Makes another group; every rank calls it. ``backend``: None means that of host memory. ``timeout``: None
        means the backend's own. ``like`` and ``device``: see `torch_private.new_group`."""
        self._known.count += 1
        name = f"zc/{'_'.join(map(str, self._ranks))}/{self._known.count}"
        group = torch_private.new_group(
            self._ranks, backend or self._backend, name, timeout, high_priority=True, like=like, device=device
        )
        self._held[self._known.count] = group, []
        return group

    def number_of_model(self) -> int:
        """Of the models that these ranks have compiled; every rank asks, once per model."""
        self._known.num_models += 1
        return self._known.num_models

    def started(self, group: dist.ProcessGroup | None, work: Started) -> None:
        """A collective that nobody may come to wait for."""
        for held, works in self._held.values():
            if held is group:
                works[:] = [*(w for w in works if not w.is_completed()), work]

    def abandon(self) -> None:
        """Ranks are out of step, or gone: nothing is closed any more."""
        _ABANDONED.extend(group for group, _ in self._held.values())
        self._held.clear()

    def sweep(self, gather: Callable[[Tensor], Tensor], *, own: bool = False) -> None:
        """Closes what all ranks have dropped; ``own``: and these, which nobody uses any more. ``gather`` brings all
        ranks' rows [n] together, [W, n]."""
        left = {**self._known.left, **(self._held if own else {})}
        is_kept = torch.ones(self._known.count, dtype=torch.uint8)
        for number, (_, works) in left.items():
            is_kept[number - 1] = not all(work.is_completed() for work in works)
        if len(is_kept) > 1:  # else there is none but the one that carries this
            is_kept = gather(is_kept).amax(0)
        for number in ((is_kept == 0).nonzero().flatten() + 1).tolist():
            for held in (self._known.left, self._held):
                if number in held:
                    _close(held.pop(number)[0])


def _close(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(ValueError):  # the program has ended all groups meanwhile
        dist.destroy_process_group(group)
