"""`zc.close`: closes everything that a compiled model has opened, and leaves a plain module."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch import nn

from zc import guards, torch_private
from zc.checkpoint.saving import finish_pending
from zc.errors import ZcError
from zc.fill import restore
from zc.offload.host_step import unlock_dropped
from zc.optim.optimizer import refuse_closed, restore_methods
from zc.registry import COMPILED

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel


def close(model: nn.Module) -> None:
    """Releases, on all ranks, a compiled model's process groups, threads, masters, gradients and optimizer state.

    A model that is not compiled, or already closed, is left alone. Afterwards ``model`` is a plain module, equal on
    every rank: whole parameters in their current dtype, in their own memory, without gradients. It can be evaluated,
    saved, and compiled again with a new optimizer. The old optimizer has neither parameters nor state, and its
    ``step()`` raises. Save before you close (`zc.save`; with offload="disk" `zc.flush_state`). A pending asynchronous
    save is finished first.

    A program that only drops the model need not call it. Memory and threads are released with the model. The next
    `compile` or `close` of the same ranks releases its process groups and the page-locked host memory of offload.

    Raises:
        RankMismatchError, RankLostError: not all ranks have called it. Everything on this rank is closed except the
            groups.
        CheckpointError: the pending save has failed; nothing has changed.
        ZcError: it was called inside `whole_parameters` of sharded weights; nothing has changed.
    """
    unlock_dropped()
    compiled = COMPILED.get(model)
    if compiled is None:
        return
    runtime = compiled.runtime
    if runtime.weights.is_held_whole:
        raise ZcError(
            "zc.close was called inside `with zc.whole_parameters(model)`, which at its end writes the shards that "
            "zc.close releases: leave it before you close the model"
        )
    finish_pending(compiled)
    try:
        with contextlib.suppress(ZcError):  # of a step that was given up
            runtime.clear(set_to_none=True)  # after a backward that raised here, others wait for the agreed reductions
            runtime.streams.synchronize()
            runtime.weights.synchronize()
            runtime.weights.unshard()
        runtime.group.close()
    finally:
        _make_plain(model, compiled)


def _make_plain(model: nn.Module, compiled: ShardedModel) -> None:
    """Removes from the model and its optimizers what `zc.compile` has put there."""
    del COMPILED[model]
    guards.remove(model)
    torch_private.call_instead(model, None)
    restore(compiled.runtime, {name: param.dtype for name, param in compiled.runtime.placed.items()})
    for sharded_optimizer in compiled.optimizers:
        sharded_optimizer.let_go()
        restore_methods(sharded_optimizer)
        sharded_optimizer.optimizer.register_step_pre_hook(refuse_closed)
