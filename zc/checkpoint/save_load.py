"""Checkpoints through torch.distributed.checkpoint: named, resharded, crash-safe (docs/checkpoints.md).

A checkpoint has the keys of ``torch.distributed.checkpoint.state_dict``, so DDP and FSDP2 programs can read it::

    model.<name>                       fp32 master in the parameter's shape; frozen parameters and buffers as they are
    optimizer.state.<name>.<key>       each optimizer state, in the parameter's shape; scalars as they are
    optimizer.param_groups             options, and the names of the group's parameters
    extra.rank_<r>                     rank r's ``extra``, serialized by ``torch.save``
"""

from __future__ import annotations

import functools
import io
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from zc.checkpoint.files import Reader, Unfinished, Writer, partial_of
from zc.checkpoint.plain_state import from_plain
from zc.checkpoint.saving import Saving, channel_of, checkpoint_errors, finish_pending
from zc.checkpoint.state import for_dcp, host_copy, state_of, synchronized
from zc.checkpoint.target import check_groups, check_values, commit, make_target
from zc.engine.memory_order import values_in
from zc.errors import CheckpointError
from zc.optim.assignment import Optimizers
from zc.registry import sharded
from zc.version import __version__


def state_dict(model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    """Returns a state for DCP: ``{"model": {name: ...}, "optimizer": {"state": ..., "param_groups": ...}}``.

    Trainable parameters and their optimizer states are this rank's parts of tensors in the parameters' own shapes. They
    are views of the shards (`ShardOf`), not copies. ``dcp.save`` writes them and ``dcp.load`` fills them in place; call
    `load_state_dict` after the latter. A tied weight appears under its first name.
    """
    return for_dcp(state_of(model, synchronized(model, optimizer)))


@torch.inference_mode(False)
def load_state_dict(model: nn.Module, optimizer: Optimizers, state: Mapping[str, Any]) -> None:
    """Loads a state: one from `state_dict`, filled by ``dcp.load``, or one of plain whole tensors.

    A plain state is ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`` of an unsharded program or
    of DDP. Without "optimizer", the optimizer starts with fresh state. With several optimizers, "optimizer" is a list
    or dict of their state_dicts, like the container that `compile` got. It may also be one state for all, as
    torch.distributed.checkpoint.state_dict makes it. Prefixes ``module.`` and ``_orig_mod.`` are dropped.

    Every rank passes the same state. Call it between updates. Gradients stay, as in DDP.

    Raises:
        CheckpointError: names what is missing, extra or has another shape. Nothing is changed.
    """
    sharded_model = synchronized(model, optimizer)
    with channel_of(sharded_model).together("loading a state"):
        target = from_plain(model, sharded_model, state)
    commit(model, sharded_model, target)


P = ParamSpec("P")
R = TypeVar("R")
_TURNS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of each model, a lock


def _in_turn(function: Callable[P, R]) -> Callable[P, R]:
    """Threads that save or load one model at once come one after the other: their collectives would answer each
    other's, and gloo ends the process. A thread may come again, in a signal's handler."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        model: Any = kwargs.get("model", args[1] if len(args) > 1 else None)
        with _TURNS.setdefault(sharded(model), threading.RLock()), torch.inference_mode(False):
            return function(*args, **kwargs)

    return run


@_in_turn
def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
    overwrite: bool = False,
) -> Saving:
    """Writes a checkpoint into the new folder ``path``, which all ranks share. Every rank calls it, between updates.

    The folder gets its name after everything in it is complete and synced to disk. A killed save leaves nothing that
    `latest` would return, and does not touch earlier checkpoints.

    Args:
        extra: other state (scheduler, GradScaler, random states, data position), of types that
            ``torch.load(weights_only=True)`` reads. The checkpoint keeps one per rank.
        asynchronous: return as soon as this rank's part is copied to host memory (one copy of masters and optimizer
            state). The next save, or ``wait()`` on the result, waits for the writing. Call ``wait()`` before you
            destroy the process group.
        keep: afterwards remove all but the newest ``keep`` checkpoints beside ``path``, and unfinished ones of ended
            jobs.
        overwrite: replace a checkpoint of the same name, which stays until this one is complete.

    Raises:
        CheckpointError, on every rank: ``path`` exists (another job may have been first), the disk has no room,
            something can't be written, rank 0 does not find what another rank has written (they don't share the
            folder), or an asynchronous save failed (raised by ``wait`` or the next save).
        RankMismatchError: ranks gave other paths or options. Nothing is written.
        RankLostError: a rank is gone, or stands still.
    """
    sharded_model = synchronized(model, optimizer)
    finish_pending(sharded_model)
    channel = channel_of(sharded_model)
    channel.same_call("zc.save", path, keep=keep, overwrite=bool(overwrite), asynchronous=bool(asynchronous))
    channel.between_updates("zc.save", sharded_model)
    path = _absolute("zc.save", path)
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be a whole number of at least 1, or None, got {keep!r}")
    rank = channel.group.rank
    folder: Unfinished | None = None
    try:
        with channel.together(f"saving {path}"):
            sharded_model.runtime.unset.check("zc.save")
            tree = for_dcp(state_of(model, sharded_model))
            tree["extra"] = {f"rank_{rank}": _encoded(extra)}
            if asynchronous:
                tree = host_copy(tree)
            if rank == 0:
                folder = Unfinished(path, channel.job, _nbytes(tree), overwrite)
    except BaseException:
        if folder is not None:
            folder.close()
        raise
    info = {"zc": __version__, "torch": torch.__version__, "world_size": channel.group.world_size}
    writer = Writer(partial_of(path, channel.job))

    def write(saving: Saving) -> None:
        try:
            dcp_save(tree, storage_writer=writer, planner=DefaultSavePlanner(), **channel.options)
            if folder is not None and not saving.is_given_up:
                folder.make_visible(info, keep)
        except CheckpointException:  # raised on every rank, and no rank writes any more
            writer.remove()  # where the folder that this rank has filled is not rank 0's
            raise
        finally:
            if folder is not None:
                folder.close()

    saving = Saving(path, channel, write)
    if not asynchronous:
        saving.wait()
    return saving


@_in_turn
def load(path: str | Path | None, model: nn.Module, optimizer: Optimizers) -> Any:
    """Loads a checkpoint from any number of ranks into any plan. Every rank calls it, between updates.

    It reads and checks everything before it changes anything, so it needs memory for one more copy of this rank's part.
    It also reads DCP checkpoints of DDP and FSDP2 programs with the same keys, without checksums. Gradients stay, as in
    DDP.

    Returns:
        The ``extra`` that was saved: this rank's own if the checkpoint is of as many ranks, otherwise rank 0's.

    Raises:
        CheckpointError, on every rank: the checkpoint is missing, damaged, or of another model. Names the file or the
            parameters. The state is unchanged.
        RankMismatchError: ranks gave other paths, or see other checkpoints under it. The state is unchanged.
    """
    sharded_model = synchronized(model, optimizer)
    finish_pending(sharded_model)
    channel = channel_of(sharded_model)
    channel.same_call("zc.load", path)
    path = _absolute("zc.load", path)
    what, reader = f"loading {path}", Reader(path)
    with channel.together(what), checkpoint_errors(what):  # a damaged checkpoint raises anything
        target = make_target(model, sharded_model, reader.read_metadata(), str(path))
    channel.same_content(path, [f"an index (.metadata) with the SHA-256 {reader.digest}"])
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    read = channel.start(partial(dcp_load, target.items, storage_reader=reader, planner=planner, **channel.options))
    channel.group.wait_for(read, what)
    with channel.together(what), checkpoint_errors(what):
        reader.check_unchanged()  # before the result: the read may have met anything then
        read.result()
        check_values(sharded_model, target)
        check_groups(sharded_model, target)
        extra = target.extra()
    commit(model, sharded_model, target)
    return extra


def _absolute(call: str, path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            f"{call} was given {path!r} for a path: give it the path of a folder. zc.latest gives None where there is "
            "no complete checkpoint, so load only if newest is not None"
        )
    return Path(path).absolute()


class _Planner(DefaultLoadPlanner):
    """DCP's planner, restricted to unpickling plain values."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        self.original_state_dict[read_item.dest_index.fqn] = self.state_dict[read_item.dest_index.fqn]


def _encoded(extra: Mapping[str, Any] | None) -> Tensor:
    """``torch.save`` as uint8. Refuses objects that could not be loaded without running code from the file."""
    buffer = io.BytesIO()
    torch.save(dict(extra or {}), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"extra holds what torch.load(weights_only=True) refuses: {error}") from error
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _nbytes(value: Any) -> int:
    """The size of the whole checkpoint, without the files' own overhead."""
    return sum(item.numel() * item.dtype.itemsize for _, item in values_in(None, value) if isinstance(item, Tensor))
