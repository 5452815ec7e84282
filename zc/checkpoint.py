"""Checkpoints through torch.distributed.checkpoint: named, resharded, crash-safe (docs/checkpoints.md).

What is saved, by DCP's keys, those of ``torch.distributed.checkpoint.state_dict``: DDP and FSDP2 programs read it::

    model.<name>                       fp32 master in the parameter's shape; frozen parameters and buffers as they are
    optimizer.state.<name>.<key>       each optimizer state, in the parameter's shape; scalars as they are
    optimizer.param_groups             options, and the names of the group's parameters
    extra.rank_<r>                     ``torch.save`` of what rank r gave as ``extra``, as bytes
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

import zc
from zc.api import sharded
from zc.checkpoint_files import Reader, Writer, latest, make_visible, partial_of, prepare
from zc.checkpoint_state import Target, check_groups, commit, flat_items, make_target, state_of
from zc.errors import CheckpointError, PlanError, ZcError
from zc.optimizer import ShardedOptimizer
from zc.plain_state import from_plain
from zc.saving import AlreadyStaged, Saving, channel_of
from zc.shards import ShardOf

__all__ = ["Saving", "latest", "load", "load_state_dict", "save", "state_dict"]


def state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What to save, as DCP takes it: ``{"model": {name: ...}, "optimizer": {"state": ..., "param_groups": ...}}``.

    A trainable parameter and its optimizer states are this rank's part of a tensor of the parameter's own shape
    (`ShardOf`, views of the shards, no copy): ``dcp.save`` writes them and ``dcp.load`` fills them in place; call
    `load_state_dict` after the latter. A tied weight stands under its first name.
    """
    return state_of(model, settled(model, optimizer))


def load_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Takes over a state: one from `state_dict`, filled by ``dcp.load``, or plain whole tensors.

    Plain is ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`` of an unsharded program, or DDP's;
    "optimizer" may be left out, and then the optimizer starts afresh. A prefix ``module.`` or ``_orig_mod.`` is
    dropped. Every rank gives the same. Call it between updates: gradients are dropped. Raises CheckpointError naming
    what is missing, extra or has another shape, before anything is changed.
    """
    held = settled(model, optimizer)
    channel = channel_of(held)
    target: Target | None = None
    failure: Exception | None = None
    try:
        target = from_plain(model, held, state)
    except (CheckpointError, TypeError, ValueError, KeyError) as error:
        failure = error
    channel.agree("loading a state", failure)
    assert target is not None
    commit(model, held, target)


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
) -> Saving:
    """Writes a checkpoint into the new folder ``path``, which all ranks share. Every rank calls it, between updates.

    The folder gets its name when everything in it is complete and synced to the disk: a killed save leaves nothing that
    `latest` sees, and earlier checkpoints as they were.

    Args:
        extra: what else goes along (scheduler, GradScaler, random states, data position), of types that
            ``torch.load(weights_only=True)`` reads. Each rank's own is kept.
        asynchronous: returns as soon as this rank's part is copied to host memory (one copy of masters and optimizer
            state); the next save, or ``wait()`` on the result, waits for the writing. Call ``wait()`` before the
            process group is destroyed.
        keep: removes all but the newest ``keep`` checkpoints beside ``path`` afterwards, and unfinished ones.

    Raises:
        CheckpointError, on every rank: ``path`` exists, the disk has no room, something can't be written, or (from
        ``wait``, or the next save) an asynchronous save has failed.
    """
    path = Path(path).absolute()
    held = settled(model, optimizer)
    channel = channel_of(held)
    channel.finish_pending()
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be a whole number of at least 1, or None, got {keep!r}")
    rank = channel.group.rank
    tree: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        tree = state_of(model, held)
        tree["extra"] = {f"rank_{rank}": _encoded(extra)}
        if asynchronous:
            tree = _copied(tree)
        if rank == 0:
            prepare(path, _nbytes(tree))
    except (OSError, ZcError, TypeError, ValueError) as error:
        failure = error
    channel.agree(f"saving {path}", failure)

    saving = Saving(path)
    saving.begin(channel)
    info = {"zc": zc.__version__, "torch": torch.__version__, "world_size": channel.group.world_size}
    written = {"storage_writer": Writer(partial_of(path)), "planner": DefaultSavePlanner(), **channel.options}

    def finish(failure: BaseException | None) -> None:
        try:
            if failure is not None:
                raise failure
            if rank == 0:
                make_visible(path, info, keep)
        except BaseException as error:  # noqa: BLE001  (whatever it is, `wait` raises it where somebody can see it)
            saving.end(_cause(f"saving {path}", error))
        else:
            saving.end(None)

    if asynchronous:
        future = dcp_async_save(tree, async_stager=AlreadyStaged(), **written)
        future.add_done_callback(lambda done: finish(done.exception()))  # type: ignore[union-attr]
        return saving
    try:
        dcp_save(tree, **written)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  (`wait` raises it, on every rank)
        finish(error)
    else:
        finish(None)
    saving.wait()
    return saving


def load(path: str | Path, model: nn.Module, optimizer: Optimizer) -> Any:
    """Loads a checkpoint that any number of ranks has written, into any plan. Every rank calls it, between updates.

    Everything is read and checked before anything is changed, so it needs room for one more copy of this rank's part.
    Also reads DCP checkpoints of DDP and FSDP2 programs with the same keys, without checksums then. Gradients are
    dropped.

    Returns:
        What ``save`` was given as ``extra``: this rank's own where the checkpoint has as many ranks, else rank 0's.

    Raises:
        CheckpointError, on every rank: no checkpoint, damaged, or of another model: names the file or the parameters.
        The state is as before.
    """
    path = Path(path).absolute()
    held = settled(model, optimizer)
    channel = channel_of(held)
    channel.finish_pending()
    target: Target | None = None
    failure: BaseException | None = None
    try:
        reader = Reader(path)
        target = make_target(model, held, reader.read_metadata(), str(path))
    except (OSError, ZcError, TypeError, ValueError) as error:
        failure = error
    channel.agree(f"loading {path}", failure)
    assert target is not None
    try:
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp_load(target.items, storage_reader=reader, planner=planner, **channel.options)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  (raised anew, on every rank)
        failure = _cause(f"loading {path}", error)
    extra: Any = None
    if failure is None:
        try:
            check_groups(model, held, target)
            extra = target.extra()
        except Exception as error:  # noqa: BLE001  (pickle raises anything)
            failure = error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: extra: {error}")
    channel.agree(f"loading {path}", failure)
    commit(model, held, target)
    return extra


class _Planner(DefaultLoadPlanner):
    """DCP's planner, which unpickles nothing but plain values."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        self.original_state_dict[read_item.dest_index.fqn] = self.state_dict[read_item.dest_index.fqn]


def settled(model: nn.Module, optimizer: Optimizer) -> ShardedOptimizer:
    """What zc keeps for the two, with nothing under way that reads or writes masters or states."""
    held = sharded(model)
    if held.optimizer is not optimizer:
        raise PlanError(f"this {type(optimizer).__name__} is not the one that {type(model).__name__} was compiled with")
    runtime = held.runtime
    runtime.weights.synchronize()  # overlap_gather: step() may have left gathers behind that read the masters
    runtime.wait_for_host_memory()  # offload: masters and states are read, and written, by this very thread
    runtime.streams.join_home()
    return held


def _encoded(extra: Mapping[str, Any] | None) -> Tensor:
    """``torch.save`` as uint8; refuses what could not be loaded again without running a stranger's code."""
    buffer = io.BytesIO()
    torch.save(dict(extra or {}), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"extra holds what torch.load(weights_only=True) refuses: {error}") from error
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, ShardOf):
        return value.copied()
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _nbytes(tree: dict[str, Any]) -> int:
    """Of the whole checkpoint, before the files' own overhead."""
    tensors = [item for item in flat_items(tree).values() if isinstance(item, Tensor)]
    return sum(t.numel() * t.dtype.itemsize for t in tensors)


def _cause(what: str, error: BaseException) -> BaseException:
    """DCP wraps what went wrong on each rank; the first of them says it."""
    failures = getattr(error, "failures", None)
    if not failures:
        return error
    rank, (first, _) = next(iter(sorted(failures.items())))
    if isinstance(first, ZcError):
        return first
    return CheckpointError(f"{what} failed on rank {rank}: {type(first).__name__}: {first}")
