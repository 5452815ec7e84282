"""Supports torch.distributed.checkpoint.state_dict (get_state_dict, set_state_dict, ...) on a compiled model.

Those functions look for the optimizer's parameters among the model's, but zc's optimizers have slices of them. This
module replaces them for optimizers of zc, and keeps their format:

| get_optimizer_state_dict, get_state_dict | result |
|---|---|
| by default | this rank's parts of tensors in the parameters' shapes (`ShardOf`), for `dcp.save` and `dcp.load` |
| full_state_dict=True | whole tensors on every rank; with cpu_offload=True only on rank 0 |
| before the optimizer's first update | zeros, for `dcp.load` to fill; the optimizer does not change |

set_optimizer_state_dict and set_state_dict load both forms, on any number of ranks. The weights in these states are the
module's own; `zc.state_dict` has fp32 masters for narrower weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zc import torch_private
from zc.checkpoint.export import gathered
from zc.checkpoint.other_state import states_of_frozen
from zc.checkpoint.plain_state import from_optimizer_state
from zc.checkpoint.save_load import copied, settled, take
from zc.checkpoint.saving import channel_of
from zc.checkpoint.state import state_of, trained
from zc.checkpoint.together import refuse_together
from zc.errors import CheckpointError, PlanError
from zc.registry import COMPILED

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel


class OfOneRank(dict[str, Any]):
    """States by name of the parameters that one rank updates. A lookup of any other parameter explains its absence."""

    def __init__(self, rank: int, states: dict[str, Any]) -> None:
        super().__init__(states)
        self.rank = rank

    def __reduce__(self) -> Any:
        return OfOneRank, (self.rank, dict(self))

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"rank {self.rank} has no state of {name}: each rank gets the states of the parameters that it updates. "
            "Give options=StateDictOptions(full_state_dict=True) for all states, whole, on every rank"
        )


def install() -> None:
    """For all models of this process."""
    torch_private.serve_optimizer_states(_get, _put)


def _get(model: nn.Module, optimizers: Sequence[Optimizer], options: Any) -> dict[str, Any] | None:
    held = _found(model, optimizers, options)
    if held is None:
        return None
    state: dict[str, Any] = state_of(model, held)["optimizer"]
    if any(bucket.has_master for bucket in held.runtime.plan.buckets):
        held.runtime.say_once(
            "torch.distributed.checkpoint.state_dict gives the weights as the model has them, without the fp32 masters "
            "behind them; zc.state_dict(model, optimizer) and zc.save have those"
        )
    if not state["state"]:
        state["state"] = _first_states(held)
    if not options.full_state_dict:
        state = copied(state) if options.cpu_offload else state
        return {**state, "state": OfOneRank(held.runtime.group.rank, state["state"])}
    device = held.runtime.plan.buckets[0].device
    refuse_together(held, held.optimizers, "full_state_dict=True")
    channel, whole = channel_of(held), dict[str, Any]()
    for one in held.optimizers:
        whole.update(channel.call("gathering the whole optimizer state", partial(gathered, held, one, state["state"])))
        whole.update(copied(states_of_frozen(one)))
    if options.cpu_offload:
        return {**state, "state": whole} if held.runtime.group.rank == 0 else {}
    whole = _of_rank_0(held, whole)
    return {**state, "state": {n: {k: _on(device, v) for k, v in items.items()} for n, items in whole.items()}}


def _put(model: nn.Module, optimizers: Sequence[Optimizer], state: Any, options: Any) -> bool:
    held = _found(model, optimizers, options)
    if held is None:
        return False
    if options.broadcast_from_rank0:
        state = _of_rank_0(held, state)
    held.take_over_writes()  # so that the weights stay as they are
    take(model, held, lambda: from_optimizer_state(held, state))
    return True


def _found(model: nn.Module, optimizers: Sequence[Optimizer], options: Any) -> ShardedModel | None:
    """Returns None if these are not zc's optimizers. Raises PlanError for unsupported arguments, before any change."""
    ours = {id(one.optimizer) for held in COMPILED.values() for one in held.optimizers}
    if not ours & {id(optimizer) for optimizer in optimizers}:
        return None
    if model not in COMPILED:
        raise PlanError(
            "torch.distributed.checkpoint.state_dict was given an optimizer of zc's and another module than zc.compile "
            f"was, a {type(model).__name__}: give the compiled one"
        )
    if options.flatten_optimizer_state_dict or options.submodule_prefixes:
        what = "flatten_optimizer_state_dict=True" if options.flatten_optimizer_state_dict else "submodules"
        raise PlanError(f"zc gives optimizer states by parameter, of the whole model: leave out {what}")
    return settled(model, list(optimizers))


def _of_rank_0(held: ShardedModel, value: Any) -> Any:
    values, group = [value], held.runtime.group
    if group.world_size > 1:
        send = partial(dist.broadcast_object_list, values, group_src=0, group=group.control)
        channel_of(held).call("sending the whole optimizer state", send)
    return values[0]


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) and value.dim() > 0 else value


def _first_states(held: ShardedModel) -> dict[str, dict[str, Any]]:
    """The states that the optimizers will create at their first update: tried on copies of the slices, one at a time,
    with gradients of zero."""
    refuse_together(held, held.optimizers, "the state of an optimizer that has made no update")
    states: dict[str, dict[str, Any]] = {}
    for name, own in trained(held).items():
        if own.slice is None or own.optimizer is None or not own.slot.numel:
            continue
        optimizer, like = own.optimizer.optimizer, nn.Parameter(own.slice.detach().clone())
        like.grad = torch.zeros_like(like)
        group = next(g for g in optimizer.param_groups if any(p is own.slice for p in g["params"]))
        tried = torch_private.bare_copy(optimizer)
        tried.param_groups = [{**group, "params": [like]}]
        try:
            with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
                tried.step()
        except Exception as error:
            raise CheckpointError(
                f"the {type(optimizer).__name__} has made no update yet, and one on zeros fails ({error}), so the "
                "shapes of its state are not known: use zc.load, or ask after the first step"
            ) from error
        items = {key: value for key, value in tried.state[like].items() if value is not None}
        if "step" in items:  # no step has been taken
            items["step"] = items["step"] * 0
        states[name] = {
            key: own.part(value) if isinstance(value, Tensor) and value.shape == own.slice.shape else value
            for key, value in items.items()
        }
    return states
