"""Exchanges of checkpoints: on a process group of their own, in threads that can be left behind; and a save under way.

DCP, and torch.distributed where it sends objects, block inside until every rank has answered. So they run in a thread,
and the calling one waits for it under the ranks' watch (zc/ranks/watch.py): where a rank is gone or stands still it
raises RankLostError, and the thread, a daemon, is left where it is.
"""

from __future__ import annotations

import atexit
import secrets
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from zc.errors import CheckpointError, ZcError
from zc.ranks.work import Call

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel


class Channel:
    """A process group for checkpoints alone, since a save may run beside the training; and the save under way."""

    def __init__(self, held: ShardedModel) -> None:
        self.group, self._device = held.runtime.group, held.runtime.plan.buckets[0].device
        self.pending: Saving | None = None  # of which not every rank knows the outcome yet
        what = "the first zc.save, zc.load or zc.full_optimizer_state of this model"
        self.data = self.group.new_group(what) if self.group.world_size > 1 else None
        self.job: str = self.share(what, secrets.token_hex(8))[0]  # whose unfinished folders are this model's

    @property
    def options(self) -> dict[str, Any]:
        return {"process_group": self.data, "no_dist": self.data is None}

    def finish_pending(self) -> None:
        if self.pending is not None:
            self.pending.wait()

    def start(self, run: Callable[[], Any]) -> Call:
        return Call(run, self._device)

    def wait(self, call: Call, what: str) -> None:
        """Raises RankLostError where a rank that ``call`` waits for is gone; ``what`` says what this rank did."""
        journal = self.group.journal
        if journal is None:
            call()
            return
        exposed_s = journal.exposed_s
        try:
            journal.wait(call, what, is_call=True)
        finally:
            journal.exposed_s = exposed_s  # no part of a training step

    def call(self, what: str, run: Callable[[], Any]) -> Any:
        """``run()``, which waits for other ranks."""
        call = self.start(run)
        self.wait(call, what)
        return call.result()

    def share(self, what: str, value: Any) -> list[Any]:
        """Every rank's value."""
        if self.group.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.group.world_size
        self.call(what, partial(dist.all_gather_object, found, value, group=self.group.control))
        return found

    def agree(self, what: str, failure: BaseException | None) -> None:
        """Raises on every rank where some rank has failed."""
        found = self.share(what, failure and f"{type(failure).__name__}: {failure}")
        bad = [rank for rank, text in enumerate(found) if text is not None]
        if not bad:
            return
        if isinstance(failure, ZcError | TypeError):
            raise failure
        raise CheckpointError(f"{what} failed on rank {bad[0]}: {found[bad[0]]}") from failure


_CHANNELS: weakref.WeakKeyDictionary[ShardedModel, Channel] = weakref.WeakKeyDictionary()
_UNDER_WAY: set[Saving] = set()  # lifetime: until somebody has waited, also where the model is gone before


def channel_of(held: ShardedModel) -> Channel:
    if held not in _CHANNELS:
        _CHANNELS[held] = Channel(held)
        atexit.unregister(_finish)  # the last to be registered is called first: before the ranks' watch ends
        atexit.register(_finish)
    return _CHANNELS[held]


def _finish() -> None:
    """A process that ends does not cut off a save that nobody has waited for. Asks no rank for its outcome: the others
    may be elsewhere."""
    for saving in list(_UNDER_WAY):
        saving.finish()


class Saving:
    """A save that may still be under way. The checkpoint is in its folder when `wait` has returned."""

    def __init__(self, path: Path, channel: Channel, run: Callable[[Saving], None]) -> None:
        self.path, self.is_given_up = path, False
        self._failure: BaseException | None = None
        self._channel: Channel | None = channel  # None: every rank knows the outcome
        channel.pending = self
        _UNDER_WAY.add(self)
        self._call = channel.start(partial(run, self))

    @property
    def is_done(self) -> bool:
        """Whether this rank has nothing more to do for it."""
        return self._call.is_completed()

    def finish(self) -> None:
        """This rank's part."""
        if self._channel is not None:
            self._channel.wait(self._call, f"saving {self.path}")
            self._call.result()

    def wait(self) -> Path:
        """Waits for all ranks; every rank calls it. Raises CheckpointError on every rank where one has failed,
        RankLostError where one is gone or stands still."""
        if self._channel is not None:
            channel, self._channel, channel.pending = self._channel, None, None
            _UNDER_WAY.discard(self)
            what = f"saving {self.path}"
            try:
                channel.wait(self._call, what)
                try:
                    self._call.result()
                except BaseException as error:  # noqa: BLE001  (of this rank's part: agreed on)
                    self._failure = cause_of(what, error)
                channel.agree(what, self._failure)
            except (ZcError, RuntimeError) as error:
                self.is_given_up = not self._call.is_completed()
                self._failure = error  # whoever asks again hears the same, on every rank
        if self._failure is not None:
            raise self._failure
        return self.path


def cause_of(what: str, error: BaseException) -> Exception:
    """DCP wraps what went wrong on each rank, in no Exception; the first of them says it."""
    failures = getattr(error, "failures", None)
    rank, first = None, error
    if failures:
        rank, (first, _) = next(iter(sorted(failures.items())))
    if isinstance(first, ZcError) or (rank is None and isinstance(first, OSError)):
        return first  # `Channel.agree` says of an OSError on which rank
    where = f"failed on rank {rank}" if rank is not None else "failed"
    return CheckpointError(f"{what} {where}: {type(first).__name__}: {first}")
