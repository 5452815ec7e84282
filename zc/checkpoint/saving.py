"""Collectives of checkpoints, on their own process group and in threads that can be abandoned; and pending saves.

DCP and torch.distributed's object collectives block until every rank has answered. So they run in a daemon thread, and
the calling thread waits under the ranks' watch (zc/ranks/watch.py). If a rank is gone or stands still, the wait raises
RankLostError and abandons the thread.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from zc.errors import CheckpointError, ZcError
from zc.ranks.exchanges import Call

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel


class Channel:
    """A process group only for checkpoints, because a save may run during training; and the pending save."""

    def __init__(self, sharded_model: ShardedModel) -> None:
        self.group, self._device = sharded_model.runtime.group, sharded_model.runtime.plan.buckets[0].device
        self.pending: Saving | None = None  # until every rank knows its outcome
        # the end of the last call; not the call, whose error has the frames that raised it, with their tensors
        self._last = threading.Event()
        self._last.set()
        what = "the first zc.save, zc.load or zc.full_optimizer_state of this model"
        self.data = self.group.new_group(text=what) if self.group.world_size > 1 else None
        # in the names of this model's unfinished folders
        self.job: str = self.group.gather_objects(secrets.token_hex(8), what)[0]

    @property
    def options(self) -> dict[str, Any]:
        return {"process_group": self.data, "no_dist": self.data is None}

    def start(self, run: Callable[[], Any]) -> Call:
        """Runs it in a thread, after the call before, whose caller a signal may have taken away: two that ran at once
        would answer each other's collectives."""
        before = self._last

        def in_turn() -> Any:
            before.wait()
            return run()

        call = Call(in_turn, self._device)
        self._last = call.is_done
        return call

    def same_call(self, call: str, path: object, **options: object) -> None:
        """Raises RankMismatchError on every rank, unless all ranks make this ``call`` with one path and these options.

        The path may be spelt in two ways on ranks with one working directory, as one that is relative and one that is
        absolute. It may also be relative to working directories that differ, since machines may have the folder that
        they share under different names. So this does not say that ranks see one folder: `same_content` and `Writer`
        do."""
        given, absolute = (f"path {name}" for name in _spellings(path))
        lines = [f"{name}={value!r}" for name, value in options.items()]
        self.group.same_everywhere(
            f"{call} with {absolute}",
            [call, absolute, *lines],
            "Give all ranks the same: a name with a clock or a rank in it, or a zc.latest that one rank has called too "
            "early, differs. Choose it on rank 0 and broadcast it",
            instead=[call, given, *lines],
        )

    def between_updates(self, call: str, sharded_model: ShardedModel) -> None:
        """Raises an error on every rank, unless all stand between the same two updates. A signal's handler may not: it
        would save old masters of some parameters, or ranks, with new ones of others."""
        lines, advice = [], "A signal's handler sets a flag; save in the loop, once all ranks know (all_reduce)"
        for one in sharded_model.optimizers:
            name = type(one.optimizer).__name__
            lines.append(f"update {one.num_updates} of {name} {'begun' if one.is_updating else 'done'}")
        self.group.same_everywhere(f"where ranks call {call}", lines, advice)
        if begun := [line for line in lines if line.endswith("begun")]:
            raise ZcError(
                f"{call} was called with {begun[0]} and not done, so only some weights are new: call it between two "
                f"updates. {advice}. If step() was cut off, as by Ctrl-C, load the last checkpoint and train on"
            )

    def same_content(self, where: object, lines: Sequence[str]) -> None:
        """Raises RankMismatchError on every rank, unless all ranks have read these ``lines`` of ``where``."""
        self.group.same_everywhere(
            f"what {where} holds",
            lines,
            "Ranks don't see the same folder, or something has written it meanwhile. Nothing is loaded",
        )

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:
        """The body succeeds on all ranks, or raises on each: its own ZcError or TypeError where it raised one,
        CheckpointError with the text of the first such rank elsewhere."""

        def error_of(failure: Exception | None, rank: int, text: str) -> Exception:
            if isinstance(failure, ZcError | TypeError):
                return failure
            return CheckpointError(f"{what} failed on rank {rank}: {text}")

        return self.group.together(error_of, what)


def _spellings(path: object) -> tuple[str, str]:
    """As it was given, and absolute. What is no path, such as the None of `latest`, is refused later, on all ranks."""
    if not isinstance(path, str | os.PathLike):
        return repr(path), repr(path)
    return str(Path(path)), str(Path(path).absolute())


_CHANNELS: weakref.WeakKeyDictionary[ShardedModel, Channel] = weakref.WeakKeyDictionary()
_UNDER_WAY: set[Saving] = set()  # lifetime: until somebody has waited, even if the model is dropped before


def channel_of(sharded_model: ShardedModel) -> Channel:
    if sharded_model not in _CHANNELS:
        _CHANNELS[sharded_model] = Channel(sharded_model)
        atexit.unregister(_finish)  # the last to be registered is called first: before the ranks' watch ends
        atexit.register(_finish)
    return _CHANNELS[sharded_model]


def finish_pending(sharded_model: ShardedModel) -> None:
    """Waits for the model's last asynchronous save, if it is still running. Raises what that save raised."""
    channel = _CHANNELS.get(sharded_model)
    if channel is not None and channel.pending is not None:
        channel.pending.wait()


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
        return self._call.is_done.is_set()

    def finish(self) -> None:
        """This rank's part."""
        if self._channel is not None:
            self._channel.group.wait_for(self._call, f"saving {self.path}")
            self._call.result()

    def wait(self) -> Path:
        """Waits for all ranks; every rank calls it. Raises CheckpointError on every rank where one has failed,
        RankLostError where one is gone or stands still."""
        if self._channel is not None:
            channel, what = self._channel, f"saving {self.path}"
            try:
                channel.group.wait_for(self._call, what)
                with channel.together(what), checkpoint_errors(what):
                    self._call.result()
            except (ZcError, RuntimeError) as error:
                self.is_given_up = not self._call.is_done.is_set()
                self._failure = error  # whoever asks again hears the same, on every rank
            # not where a signal's handler has raised: the next save, load or the end of the process waits for it
            self._channel = channel.pending = None
            _UNDER_WAY.discard(self)
        if self._failure is not None:
            raise self._failure
        return self.path


@contextmanager
def checkpoint_errors(what: str) -> Iterator[None]:
    """Raises CheckpointError for any error of the body, such as DCP's. ZcErrors and OSErrors stay as they are."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        cause = _cause_of(what, error)
        if cause is error:
            raise
        raise cause from error


def _cause_of(what: str, error: BaseException) -> Exception:
    """The first rank's error. DCP wraps the errors of all ranks in one that is not an Exception."""
    failures = getattr(error, "failures", None)
    rank, first = None, error
    if failures:
        rank, (first, _) = next(iter(sorted(failures.items())))
    if isinstance(first, ZcError) or (rank is None and isinstance(first, OSError)):
        return first  # `Channel.together` adds the rank of an OSError
    where = f"failed on rank {rank}" if rank is not None else "failed"
    return CheckpointError(f"{what} {where}: {type(first).__name__}: {first}")
