"""The first values of a model that was made on the meta device, from its own modules, one module at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from zc.checkpoint.saving import channel_of
from zc.checkpoint.state import owned
from zc.engine.memory_order import flattened
from zc.engine.param_checks import poison
from zc.registry import sharded

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel

INIT_WEIGHTS = "_init_weights"  # of transformers' PreTrainedModel: takes one module

Init = Callable[[nn.Module], object]


@torch.no_grad()
def initialize(model: nn.Module, init: Init | None = None) -> None:
    """Gives what has no value yet, of a model that was made on meta, its first one. All ranks call it.

    Modules come one at a time. A module's own parameters are whole while it runs ``init(module)``; by default the
    ``_init_weights`` of a transformers model around it, or its own ``reset_parameters()``. All ranks then take rank 0's
    values. What none of these writes stays without a value, and the first forward names it. What has a value already
    keeps it.

    Raises:
        ZcError: ``init`` reads a parameter of another module. Any error of ``init`` is raised on all ranks.
    """
    sharded_model = sharded(model)
    sharded_model.runtime.weights.before_writes()
    fill_modules(model, sharded_model, init)
    sharded_model.publish_all()


@torch.no_grad()
def fill_modules(
    model: nn.Module, sharded_model: ShardedModel, init: Init | None, *, only_buffers: bool = False
) -> None:
    """See `initialize`. ``only_buffers``: leaves out modules with a parameter that has no value. It writes masters,
    between `before_writes` and the publishing of the caller: a second `before_writes` would put what is whole over
    masters that have new values."""
    runtime, weights = sharded_model.runtime, sharded_model.runtime.weights
    mine, unset = {own.planned: own for own in owned(sharded_model).values()}, runtime.unset
    names = {id(param): name for name, param in runtime.placed.items()}
    for path, module in model.named_modules():
        own = {names[id(p)]: p for p in module.parameters(recurse=False) if id(p) in names}
        wanted, buffers = [name for name in own if name in unset.params], unset.buffers_of(module)
        if not (wanted or buffers) or (only_buffers and wanted):
            continue
        for run in _ways(model, path, module, init):
            with weights.with_bytes(own.values()):
                for param in own.values():
                    poison(param)
                with channel_of(sharded_model).together(f"the initialisation of module {path or 'the model itself'}"):
                    run()
                for name in list(wanted):
                    values = flattened(own[name].detach(), mine[name].slot).contiguous()
                    runtime.group.broadcast_(values)
                    if values.is_floating_point() and values.isnan().any():
                        continue
                    mine[name].write(mine[name].part_of(values))
                    unset.params.discard(name)
                    wanted.remove(name)
            if not wanted and not unset.buffers_of(module):
                break
        for buffer in buffers:
            if not any(buffer is left for left in unset.buffers_of(module)):
                runtime.group.broadcast_(buffer)


def _ways(model: nn.Module, path: str, module: nn.Module, init: Init | None) -> Iterator[Callable[[], object]]:
    """How a module may get its values, in order."""
    if init is not None:
        yield partial(init, module)
        return
    above = path
    while True:
        around = model.get_submodule(above)
        if callable(way := getattr(around, INIT_WEIGHTS, None)):
            yield partial(way, module)
            break
        if not above:
            break
        above = above.rpartition(".")[0]
    if callable(way := getattr(module, "reset_parameters", None)):
        yield way
