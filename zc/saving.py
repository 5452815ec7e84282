"""A save under way, and what its ranks share: a process group of its own, and the outcome."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager

from zc.comm import Group
from zc.errors import CheckpointError, PlanError, ZcError
from zc.optimizer import ShardedOptimizer


class Channel:
    """A process group for checkpoints alone, since a save may run beside the training; and the save under way."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.pending: Saving | None = None  # of which not every rank knows the outcome yet
        self.data = group.new_group() if group.world_size > 1 else None

    @property
    def options(self) -> dict[str, Any]:
        return {"process_group": self.data, "no_dist": self.data is None}

    def finish_pending(self) -> None:
        if self.pending is not None:
            self.pending.wait()

    def agree(self, what: str, failure: BaseException | None) -> None:
        """Raises on every rank where some rank has failed."""
        found: list[Any] = [failure and f"{type(failure).__name__}: {failure}"]
        if self.group.world_size > 1:
            found = found * self.group.world_size
            dist.all_gather_object(found, found[self.group.rank], group=self.group.control)
        bad = [rank for rank, text in enumerate(found) if text is not None]
        if not bad:
            return
        if isinstance(failure, ZcError | PlanError | TypeError):
            raise failure
        raise CheckpointError(f"{what} failed on rank {bad[0]}: {found[bad[0]]}") from failure


_CHANNELS: weakref.WeakKeyDictionary[ShardedOptimizer, Channel] = weakref.WeakKeyDictionary()


def channel_of(held: ShardedOptimizer) -> Channel:
    if held not in _CHANNELS:
        _CHANNELS[held] = Channel(held.runtime.group)
    return _CHANNELS[held]


class Saving:
    """A save that may still be under way. The checkpoint is in its folder when `wait` has returned."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written = threading.Event()
        self._failure: BaseException | None = None
        self._channel: Channel | None = None  # None: every rank knows the outcome

    def begin(self, channel: Channel) -> None:
        """For `zc.save`: this is the save under way."""
        self._channel, channel.pending = channel, self

    def end(self, failure: BaseException | None) -> None:
        """For `zc.save`: this rank has nothing more to do for it."""
        self._failure = failure
        self._written.set()

    @property
    def is_done(self) -> bool:
        """Whether this rank has nothing more to do for it."""
        return self._written.is_set()

    def wait(self) -> Path:
        """Waits for all ranks; every rank calls it. Raises CheckpointError on every rank where one has failed."""
        self._written.wait()
        if self._channel is not None:
            channel, self._channel, channel.pending = self._channel, None, None
            try:
                channel.agree(f"saving {self.path}", self._failure)
            except ZcError as error:
                self._failure = error  # whoever asks again hears the same, on every rank
        if self._failure is not None:
            raise self._failure
        return self.path


class AlreadyStaged(AsyncStager):
    """The copy was taken before: DCP's own stager knows nothing of a part of a shard."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass
