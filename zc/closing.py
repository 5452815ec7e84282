"""`zc.close`: what a compiled model has opened is closed, and the model is the caller's own again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from zc import torch_private
from zc.checkpoint.saving import _CHANNELS
from zc.copies import unmark
from zc.engine.host_memory import unlock_dropped
from zc.errors import ZcError
from zc.registry import COMPILED

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel


def close(model: nn.Module) -> None:
    """Ends what `compile` began, on all ranks: process groups, threads, masters, gradients and optimizer state go now,
    and not when Python's collector finds them. A model that was not compiled, or is closed, stays as it is.

    ``model`` is a plain module then, on every rank the same: whole parameters in their dtype of now, in memory of their
    own, without gradients. It can be evaluated, saved, and given to `compile` again with a new optimizer. The old one
    has neither parameters nor state any more, and its ``step()`` raises. Before it, save what is to be kept
    (`zc.save`; with offload="disk" `zc.flush_state`); a save that is under way is waited for.

    A program that only drops the model need not call it. Its memory and threads go with it; its process groups go with
    the next `compile` or `close` of the same ranks, and so does page-locked host memory of offload.

    Raises:
        RankMismatchError, RankLostError: not all ranks have called it; everything of this rank's is closed all the
        same, but for the groups. CheckpointError: the save has failed; nothing has changed.
    """
    unlock_dropped()
    held = COMPILED.get(model)
    if held is None:
        return
    if held in _CHANNELS:
        _CHANNELS[held].finish_pending()
    runtime = held.runtime
    try:
        with contextlib.suppress(ZcError):  # of a step that was given up
            runtime.clear(set_to_none=True)  # of a backward that raised here, others wait for the agreed reductions
            runtime.streams.synchronize()
            runtime.weights.synchronize()
        runtime.group.close()
    finally:
        _hand_back(model, held)


@torch.no_grad()
def _hand_back(model: nn.Module, held: ShardedModel) -> None:
    runtime = held.runtime
    del COMPILED[model]
    unmark(model)
    torch_private.call_instead(model, None)
    for handle in (*runtime.hooks, *runtime.weights.hooks):
        handle.remove()
    for param in runtime.params.values():
        param.grad = None
        param.data = param.data.clone()
    held.let_go()
    for each in held.optimizers:
        for name in ("zero_grad", "add_param_group"):  # of _own_methods
            vars(each.optimizer).pop(name, None)
        each.optimizer.register_step_pre_hook(_refuse)
    runtime.buffers.close()  # compiled code, which Dynamo keeps, knows the runtime
    close_threads: Any = getattr(runtime.streams, "close", None)
    if close_threads is not None:
        close_threads()


def _refuse(optimizer: torch.optim.Optimizer, *_: Any) -> NoReturn:
    raise ZcError(
        f"zc.close(model) has let go of what this {type(optimizer).__name__} had: make a new optimizer over "
        "the model's parameters"
    )
