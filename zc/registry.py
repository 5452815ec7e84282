"""The compiled models: from a module to zc's state for it, and to its whole weights, for code outside of the model's
forward and backward.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc.engine.memory_order import values_in
from zc.errors import PlanError

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel


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
