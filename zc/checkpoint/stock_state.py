"""Optimizer states as programs without zc have them: whole ones on rank 0, and those of
torch.distributed.checkpoint.state_dict (get_state_dict, set_state_dict, ...) on a compiled model::

    torch.optim.AdamW(model.parameters()).load_state_dict(zc.full_optimizer_state(model, optimizer))

Torch's functions look for the optimizer's parameters among the model's, but zc's optimizers have slices of them. This
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

from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zc import torch_private
from zc.checkpoint.plain_state import from_optimizer_state
from zc.checkpoint.saving import channel_of
from zc.checkpoint.shards import ShardOf
from zc.checkpoint.state import (
    OWN,
    group_of,
    groups_of,
    host_copy,
    numbered,
    owned,
    refuse_together,
    state_by_string,
    state_of,
    states_of_frozen,
    synchronized,
    trained,
)
from zc.checkpoint.target import commit
from zc.engine.memory_order import Sent, change_each, joined
from zc.errors import CheckpointError, PlanError
from zc.optim.assignment import Optimizers, innermost, like_container
from zc.optim.trials import update_copy
from zc.registry import COMPILED, is_ours, sharded

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer


def full_optimizer_state(model: nn.Module, optimizer: Optimizers) -> Any:
    """Returns, on rank 0 in host memory, the ``state_dict()`` that the optimizer would have without zc; None on others.

    With several optimizers it returns a list or a dict of states, like the container that `compile` got. With one of
    several, it returns the state of that one.

    ``type(optimizer)(model.parameters(), ...).load_state_dict(...)`` loads the state, if the parameters come in the
    optimizer's original order. Every rank calls it. Rank 0 needs memory for the whole state, which it receives one
    parameter at a time.
    """
    sharded_model = sharded(model)
    inside = innermost(optimizer) if isinstance(optimizer, Optimizer) else None
    alone = [each for each in sharded_model.optimizers if each.optimizer is inside]
    synchronized(model, sharded_model.container if alone else optimizer)
    channel = channel_of(sharded_model)
    channel.between_updates("zc.full_optimizer_state", sharded_model)
    with channel.together("zc.full_optimizer_state"):
        refuse_together(sharded_model, alone or sharded_model.optimizers, "zc.full_optimizer_state")
        state: dict[str, dict[str, Any]] = state_of(model, sharded_model)["optimizer"]
    parts = []
    for one in alone or sharded_model.optimizers:
        numbers, groups = numbered(groups_of([one]))
        whole = whole_states(sharded_model, one, state["state"])
        by_number = {numbers[name]: values for name, values in whole.items()}
        own = state.get(OWN, {}).get(str(one.number), {})
        by_string = {**by_number, **host_copy(state_by_string(one))}
        parts.append({"state": by_string, "param_groups": groups, **host_copy(own)})
    return like_container(optimizer, parts) if sharded_model.runtime.group.rank == 0 else None


def whole_states(
    sharded_model: ShardedModel, one: ShardedOptimizer, states: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The whole states of ``one`` by parameter name, in host memory, frozen parameters included. Those that train are
    on rank 0 alone. ``states``: this rank's parts. All ranks call it."""
    whole = gather_parts(sharded_model, one, states, "the whole optimizer state")
    whole.update(host_copy(states_of_frozen(one)))
    return whole


def gather_parts(
    sharded_model: ShardedModel, one: ShardedOptimizer, parts: Mapping[str, Mapping[str, Any]], what: str
) -> dict[str, dict[str, Any]]:
    """Gathers ``parts``, by parameter name, on rank 0 as whole tensors; an empty dict elsewhere. All ranks call it.
    ``what`` names them in errors."""
    runtime, gather = sharded_model.runtime, partial(_gather, sharded_model, one, parts)
    device = runtime.plan.buckets[0].device
    whole: dict[str, dict[str, Any]] = runtime.group.call(f"gathering {what}", gather, device)
    return whole


def _gather(
    sharded_model: ShardedModel, one: ShardedOptimizer, parts: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Only the first replica takes part: the others have the same state."""
    ranks = sharded_model.runtime.group
    group, replicas = ranks.shard, ranks.replicas
    whole: dict[str, dict[str, Any]] = {}
    for name, own in owned(sharded_model).items() if replicas is None or replicas.rank == 0 else ():
        if own.optimizer is not one:
            continue
        row = own.start, change_each(_sent, None, parts.get(name, {})) if own.numel else {}
        rows: list[Any] | None = [row]
        if group.world_size > 1:
            rows = [None] * group.world_size if group.rank == 0 else None
            dist.gather_object(row, rows, group_dst=0, group=group.object_group)
        in_order = [part for _, part in sorted(rows or (), key=itemgetter(0)) if part]
        if in_order:
            whole[name] = joined(in_order, own.slot, torch.device("cpu"))
    return whole


def _sent(_: Any, value: Any) -> Sent:
    return Sent.of(value, value.local) if isinstance(value, ShardOf) else Sent.of(value, None)


# --- torch.distributed.checkpoint.state_dict ---


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
    sharded_model = _sharded_model(model, optimizers, options)
    if sharded_model is None:
        return None
    with channel_of(sharded_model).together("reading the optimizer's state"):
        state: dict[str, Any] = state_of(model, sharded_model)["optimizer"]
    if any(bucket.has_master for bucket in sharded_model.runtime.plan.buckets):
        sharded_model.runtime.say_once(
            "torch.distributed.checkpoint.state_dict gives the weights as the model has them, without the fp32 masters "
            "behind them; zc.state_dict(model, optimizer) and zc.save have those"
        )
    if not state["state"]:
        state["state"] = _first_states(sharded_model)
    if not options.full_state_dict:
        state = host_copy(state) if options.cpu_offload else state
        return {**state, "state": OfOneRank(sharded_model.runtime.group.rank, state["state"])}
    device = sharded_model.runtime.plan.buckets[0].device
    refuse_together(sharded_model, sharded_model.optimizers, "full_state_dict=True")
    whole: dict[str, Any] = {}
    for one in sharded_model.optimizers:
        whole.update(whole_states(sharded_model, one, state["state"]))
    if options.cpu_offload:
        return {**state, "state": whole} if sharded_model.runtime.group.rank == 0 else {}
    whole = _from_rank_0(sharded_model, whole)

    def on_device(_: Any, value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and value.dim() > 0 else value

    return {**state, "state": change_each(on_device, None, whole)}


def _put(model: nn.Module, optimizers: Sequence[Optimizer], state: Any, options: Any) -> bool:
    sharded_model = _sharded_model(model, optimizers, options)
    if sharded_model is None:
        return False
    if options.broadcast_from_rank0:
        state = _from_rank_0(sharded_model, state)
    sharded_model.take_over_writes()  # so that the weights stay as they are
    with channel_of(sharded_model).together("loading a state"):
        target = from_optimizer_state(sharded_model, state)
    commit(model, sharded_model, target)
    return True


def _sharded_model(model: nn.Module, optimizers: Sequence[Optimizer], options: Any) -> ShardedModel | None:
    """Returns None if these are not zc's optimizers. Raises PlanError for unsupported arguments, before any change."""
    if not any(map(is_ours, optimizers)):
        return None
    if model not in COMPILED:
        raise PlanError(
            "torch.distributed.checkpoint.state_dict was given an optimizer of zc's and another module than zc.compile "
            f"was, a {type(model).__name__}: give the compiled one"
        )
    if options.flatten_optimizer_state_dict or options.submodule_prefixes:
        what = "flatten_optimizer_state_dict=True" if options.flatten_optimizer_state_dict else "submodules"
        raise PlanError(f"zc gives optimizer states by parameter, of the whole model: leave out {what}")
    return synchronized(model, list(optimizers))


def _from_rank_0(sharded_model: ShardedModel, value: Any) -> Any:
    values, group = [value], sharded_model.runtime.group
    if group.world_size > 1:
        send = partial(dist.broadcast_object_list, values, group_src=0, group=group.object_group)
        group.call("sending the whole optimizer state", send)
    return values[0]


def _first_states(sharded_model: ShardedModel) -> dict[str, dict[str, Any]]:
    """The states that the optimizers will create at their first update: tried on copies of the slices, one at a time,
    with gradients of zero."""
    refuse_together(sharded_model, sharded_model.optimizers, "the state of an optimizer that has made no update")
    states: dict[str, dict[str, Any]] = {}
    for name, own in trained(sharded_model).items():
        if own.slice is None or own.optimizer is None or not own.slot.numel:
            continue
        optimizer, value = own.optimizer.local, own.slice.detach()
        group = group_of(optimizer, own.slice)
        try:
            (updated,) = update_copy(optimizer, group, [value], [[torch.zeros_like(value)]], seed=1)
        except Exception as error:
            raise CheckpointError(
                f"the {type(optimizer).__name__} has made no update yet, and one on zeros fails ({error}), so the "
                "shapes of its state are not known: use zc.load, or ask after the first step"
            ) from error
        items = {key: item for key, item in updated.state.items() if item is not None and key != ""}
        if "step" in items:  # no step has been taken
            items["step"] = items["step"] * 0
        states[name] = own.parts(items)
    return states
