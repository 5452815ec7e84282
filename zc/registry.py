"""The compiled models: from a module to zc's state for it, and what programs ask of one: its whole weights, outside of
its forward and backward, and what a training loop calls.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import weakref
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc.config import check_count
from zc.engine.memory_order import values_in
from zc.errors import PlanError

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.ranks.group import Group

T = TypeVar("T")

# Not an attribute of the module: a deepcopy of the module must not share its gradients with the original.
COMPILED: weakref.WeakKeyDictionary[nn.Module, ShardedModel] = weakref.WeakKeyDictionary()


def sharded(model: nn.Module) -> ShardedModel:
    """zc's state for a compiled model. Raises PlanError for any other model."""
    sharded_model = COMPILED.get(model) if isinstance(model, nn.Module) else None
    if sharded_model is None:
        raise PlanError(f"this {type(model).__name__} was not compiled: call zc.compile(model, optimizer) first")
    return sharded_model


def is_ours(optimizer: Optimizer) -> bool:
    """Whether a compiled model has this optimizer, or the one that it wraps."""
    from zc.optim.assignment import innermost  # late: else the longest chain of imports

    inside = innermost(optimizer)
    return any(one.optimizer is inside for each in COMPILED.values() for one in each.optimizers)


def persistent_nbytes(model: nn.Module) -> dict[str, int]:
    """Bytes that this rank holds for the model, by kind, counted from the tensors themselves.

    Those of gradients (acc, flat_grad, scratch) exist from a backward until the gradients are set to None; whole_grad
    during an update, arena while weights are read, sum while a reduction sums.
    """
    sharded_model = sharded(model)
    runtime = sharded_model.runtime
    nbytes = runtime.buffers.nbytes()
    by_param = [list(optimizer.state_of_class.values()) for optimizer in sharded_model.optimizers]
    states = [value for _, value in values_in(None, by_param)]
    whole = sum(param.nbytes for name, param in runtime.frozen.items() if name not in runtime.placed)
    if whole:
        nbytes["frozen"] = nbytes.get("frozen", 0) + whole
    nbytes["optimizer_state"] = sum(v.nbytes for v in states if isinstance(v, Tensor) and v.dim() > 0)
    return nbytes


_LARGE_NBYTES = 2**20


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """All parameters have all their bytes inside, on every rank: to evaluate, average, export or change weights.

    All ranks enter it together, between two updates, and hold the whole model meanwhile. Where ranks make other numbers
    of backwards, those that have made theirs wait for the others. What is written into parameters inside, the same on
    all ranks, goes to the shards and the masters at the end. Tensors that share their memory, such as those of
    ``model.state_dict()``, keep the values of that moment. In stages 1 and 2, where parameters are always whole, it
    does nothing.

    Raises:
        ZcError: ``optimizer.step()`` was called inside; or a parameter was given a tensor of another shape or dtype,
            and its shards stay as they were. RankMismatchError: not all ranks have entered it.
    """
    runtime = sharded(model).runtime
    if not runtime.weights.is_unsharded:
        runtime.settle()
    with runtime.weights.unsharded():
        yield


def iter_weights(model: nn.Module, *, ranks: Collection[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``model.state_dict()``, whole, one after the other: to hand weights to an inference engine, to
    export them, or to hash them. Works in all stages, between two updates::

        for name, weight in zc.iter_weights(model):      # on all ranks
            engine.load(name, weight)

    Each weight is a copy on its device, which is yours, without gradient. In stage 3 and with ``shard_frozen`` ranks
    gather bucket by bucket, the next one while you work on this one. So a rank holds its shards, at most two buckets,
    and what you keep. Stage 3 does not encode these gathers (``gather_dtype``): values are those of `full_state_dict`.
    The order is the same on all ranks: parameters as their buckets are gathered, then all else.

    All ranks iterate. A rank may leave the loop early, by ``break`` or by an exception that is handled: before its loop
    ends it takes part in the gathers that others still want, without keeping them. A rank that keeps the iterator, and
    does something else with the model, makes the others wait as for any rank that does not come.

    Args:
        ranks: those that get weights; None: all. The loop of any other rank has no round.

    Raises:
        PlanError: ``ranks`` names a rank that does not exist. ZcError: a forward, an update, a save or a load came
            between two weights. RankMismatchError, RankLostError: not all ranks iterate.
    """
    runtime = sharded(model).runtime
    all_ranks = range(runtime.group.world_size)
    if ranks is not None and (not isinstance(ranks, Collection) or any(rank not in all_ranks for rank in ranks)):
        raise PlanError(f"ranks={ranks!r}: there are ranks 0 to {all_ranks[-1]}, as in ranks=[0]")
    return _copies(model, is_wanted=ranks is None or runtime.group.rank in ranks)


@torch.no_grad()
def _copies(model: nn.Module, *, is_wanted: bool) -> Iterator[tuple[str, Tensor]]:
    with contextlib.closing(whole_values(model, is_wanted=is_wanted)) as values:
        for keys, value in values:
            copied = _own_copy(value)
            for key in keys:  # a tied weight has several
                yield key, copied


def _own_copy(value: Tensor) -> Tensor:
    """A clone; a large one on pages of its own. glibc does not always use an aligned piece again that was given back,
    so a loop that clones and drops one weight after the other would grow to the size of the model."""
    if value.device.type != "cpu" or value.nbytes < _LARGE_NBYTES or sys.platform != "linux":
        return value.clone()
    like = torch.empty_like(value, device="meta")
    pages = mmap.mmap(-1, value.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=value.dtype, device="cpu").set_(storage, 0, like.size(), like.stride()).copy_(value)


@torch.no_grad()
def whole_values(model: nn.Module, *, is_wanted: bool) -> Generator[tuple[list[str], Tensor], None, None]:
    """The tensors of ``model.state_dict()``, whole, each with its keys, in memory that changes after the next ones. All
    ranks call it; those with ``is_wanted`` get some."""
    runtime = sharded(model).runtime
    if not runtime.weights.is_unsharded:
        runtime.settle()
    left: dict[int, tuple[list[str], Tensor]] = {}
    for key, value in model.state_dict(keep_vars=True).items() if is_wanted else ():
        if isinstance(value, Tensor):
            left.setdefault(id(value), ([], value))[0].append(key)
    with contextlib.closing(runtime.weights.units(is_wanted=is_wanted)) as units:
        for unit in units:
            for name, value in unit.items():
                keys, _ = left.pop(id(runtime.placed[name]), ((), None))
                if keys:
                    yield list(keys), value
    for keys, value in left.values():
        yield keys, value.detach()


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with whole tensors in host memory, on rank 0; an empty dict on the others.

    All ranks call it. Buckets come as in `iter_weights`, so no device holds more than its shards and two buckets. Works
    in all stages.
    """
    is_first = sharded(model).runtime.group.rank == 0
    whole: dict[str, Tensor] = {}
    for keys, value in whole_values(model, is_wanted=is_first):
        whole.update(dict.fromkeys(keys, value.to("cpu", copy=True)))
    state = model.state_dict(keep_vars=True) if is_first else {}
    return {key: whole.get(key, value) for key, value in state.items()}


# --- for the training loop; every rank calls those on gradients and `join` ---


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Declares that the backward calls inside are not the last before an update.

    Stage 1 then skips their reduction. Stage 2 reduces every backward, since it keeps no full-size gradient, so ranks
    wait for each other inside, too. If they have different numbers of such backwards, the loop may call no collective
    of its own before the next backward outside, or RankMismatchError is raised. Forgetting no_sync changes no number,
    it only costs communication.
    """
    with sharded(model).runtime.no_sync():
        yield


def synchronize(model: nn.Module) -> None:
    """With ``overlap_gather``: makes the current stream (on CPU: this thread) wait for all gathers of new weights.

    Only needed between ``optimizer.step()`` and the next forward, before a read that torch does not see: by a C++
    extension that takes tensors past torch's dispatch, or by an address or a DLPack capsule from before the step.
    Does nothing without ``overlap_gather``. The host does not wait on CUDA.
    """
    sharded(model).runtime.weights.synchronize()


def flush_state(model: nn.Module) -> None:
    """With ``offload="disk"``: makes ``offload_dir`` complete, on all ranks, and returns when it is on the disk.

    A later `compile` with the same folder, plan and optimizer continues with the state if the model has the present
    weights (save them beside it); with other weights it raises. From the next update on the folder is not complete,
    and a run that finds it so starts with fresh state and says that. Save hyper-parameters and schedulers yourself.

    Raises:
        PlanError: the model has no state on a disk, or not all of its state is there. OSError, RankMismatchError: the
        disk refused, here or on another rank; the folder is then not complete.
    """
    sharded(model).flush_state()


def count(model: nn.Module, num_tokens: float | Tensor) -> None:
    """The loss of one backward is a sum over ``num_tokens`` tokens (or samples, or their weights): gradients become the
    mean over the tokens of all ranks and all backwards of the update, whose numbers need not be known before::

        for batch in microbatches:
            zc.count(model, batch.labels.ne(-100).sum())
            cross_entropy(model(batch.inputs), batch.labels, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()

    A mean of means, of ranks or microbatches, weighs a token by how few others its microbatch has
    (https://huggingface.co/blog/gradient_accumulation). Call it once for each backward, before or after it, after
    ``zero_grad()``; on every rank that has a backward, or on none. It exchanges nothing: the counts travel with what
    ranks tell each other before an update. Clipping, norms and ``param.grad`` see the mean over tokens.

    Args:
        num_tokens: at least 0. Of a tensor on a device, the host waits for it.

    Raises:
        ValueError: ``num_tokens`` is negative or not finite. The next read of gradients or ``step()`` raises ZcError,
        on all ranks and before anything changes, if a backward was not counted once, or if the counts add up to 0; so
        does a backward that would add to gradients that are divided already.
    """
    number = float(num_tokens) if isinstance(num_tokens, SupportsFloat) else math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"zc.count takes a finite number of tokens, at least 0, not {num_tokens!r}")
    sharded(model).runtime.count_tokens(number)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients so that their joint 2-norm is at most ``max_norm``; one collective.

    Returns the norm before, fp32, 0-d: the norm of the mean gradient over all ranks, each element counted once, as
    `torch.nn.utils.clip_grad_norm_` gives it under DDP. A NaN or infinity stays one.

    Raises:
        ValueError: ``max_norm`` is negative, NaN or no number; nothing has changed.
    """
    number = float(max_norm) if isinstance(max_norm, SupportsFloat) else math.nan
    if not number >= 0:
        raise ValueError(f"zc.clip_grad_norm_ takes a largest norm of at least 0, such as 1.0, not {max_norm!r}")
    return sharded(model).grad_shards.clip_grad_norm_(number)


def grads_are_finite(model: nn.Module) -> bool:
    """Whether all gradients of all ranks are finite: no infinity, no NaN. The same answer on every rank.

    Every rank must call it. It shares its one collective with clipping, and waits for the device.
    """
    return sharded(model).grad_shards.are_finite()


def full_grad(model: nn.Module) -> dict[str, Tensor | None]:
    """Every trainable parameter's reduced gradient, gathered on all ranks, in the parameter's shape and the
    accumulator's dtype; None where no rank has one. For inspection, not for training: it holds all gradients at
    once."""
    compiled = sharded(model)
    gathered: dict[str, Tensor | None] = {}
    for bucket in compiled.runtime.plan.buckets:
        gathered.update(compiled.grad_shards.full_grads(bucket))
    now = compiled.runtime.names_now()
    return {now.get(id(param), name): gathered[name] for name, param in compiled.runtime.params.items()}


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
