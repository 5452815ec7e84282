"""Whole optimizer states on rank 0, for programs without zc::

    torch.optim.AdamW(model.parameters()).load_state_dict(zc.full_optimizer_state(model, optimizer))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zc.checkpoint.other_state import OWN, refuse_together, state_by_string, states_of_frozen
from zc.checkpoint.saving import channel_of
from zc.checkpoint.shards import ShardOf
from zc.checkpoint.state import groups_of, host_copy, numbered, owned, state_of, synchronized
from zc.engine.memory_order import change_each, in_shape
from zc.optim.assignment import Optimizers, innermost, like_container
from zc.registry import sharded

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer
    from zc.planning.layout import Slot


def full_optimizer_state(model: nn.Module, optimizer: Optimizers) -> Any:
    """Returns, on rank 0 in host memory, the ``state_dict()`` that the optimizer would have without zc; None on others.

    With several optimizers it returns a list or a dict of states, like the container that `compile` got. With one of
    several, it returns the state of that one.

    ``type(optimizer)(model.parameters(), ...).load_state_dict(...)`` loads the state, if the parameters come in the
    optimizer's original order. Every rank calls it. Rank 0 needs memory for the whole state, which it receives one
    tensor at a time.
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
    sharded_model: ShardedModel, one: ShardedOptimizer, parts_by_name: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Only the first replica takes part: the others have the same state."""
    ranks = sharded_model.runtime.group
    group, rank, replicas = ranks.shard, ranks.shard.rank, ranks.replicas
    whole: dict[str, dict[str, Any]] = {}
    if replicas is not None and replicas.rank > 0:
        return whole
    for name, own in owned(sharded_model).items():
        if own.optimizer is not one:
            continue
        mine = parts_by_name.get(name, {})
        everyone: list[Any] = [(own.start, own.numel, list(mine))]
        if group.world_size > 1:
            everyone = everyone * group.world_size
            dist.all_gather_object(everyone, (own.start, own.numel, list(mine)), group=group.object_group)
        keys: list[str] = next((keys for _, numel, keys in everyone if numel and keys), [])
        for key in keys:
            local = change_each(_sent, key, mine.get(key))
            parts: list[Any] | None = [local] if group.world_size == 1 else None
            if group.world_size > 1:
                parts = [None] * group.world_size if rank == 0 else None
                dist.gather_object(local, parts, group_dst=0, group=group.object_group)
            if parts is None:
                continue
            have = [(start, part) for (start, numel, _), part in zip(everyone, parts, strict=True) if numel]
            in_order = [part for _, part in sorted(have, key=lambda item: item[0])]
            whole.setdefault(name, {})[key] = _joined(in_order, own.slot)
    return whole


@dataclass(frozen=True)
class _Elements:
    """A rank's elements of a state that is cut, in host memory."""

    flat: Tensor


def _sent(_: Any, value: Any) -> Any:
    return _Elements(value.local.detach().cpu()) if isinstance(value, ShardOf) else value


def _joined(parts: Sequence[Any], slot: Slot) -> Any:
    """The whole of what ranks have parts of, in the order of their elements. What is not cut is the first one's."""
    first = parts[0]
    if isinstance(first, _Elements):
        return in_shape(torch.cat([part.flat for part in parts]), slot)
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts], slot) for key in first}
    if isinstance(first, list):
        return [_joined(items, slot) for items in zip(*parts, strict=True)]
    return first
