"""Turns a compiled model's state into named tensors: the parts that this rank owns, and optimizer state that is not of
one slice: of frozen parameters, under names of the optimizer's own, and of several parameters together.

A frozen parameter stays in its group, and may have state: from before it was frozen, or made by the optimizer's
``__init__``, as Adagrad does. Its state is whole on every rank, and `zc.recompile` cuts it once the parameter trains.
An optimizer may also keep state under a string, such as a count of its own: ``optimizer.state["count"]``. And a state
may belong to several parameters, such as a momentum stacked under a group's first one; it is saved under the parameter
that stores it, and the checkpoint also lists the parameters that each rank updates::

    optimizer.state.<name>.<key>                     of a frozen parameter, as rank 0 has it
    optimizer.state.<name> (<number>).<key>          the same of another optimizer that has it, too, by its number
    optimizer.other.<number>.rank_<r>.<key>          under strings, of each rank, by the optimizer's number
    optimizer.own.<number>.<key>                     what the class adds to ``state_dict()``, as rank 0 has it
    optimizer.together.<number>                      [["a", "c"], ["b", "d"]]: rank 0 updates a and c

`zc.optim.trials.habits_of` finds the optimizers that may have the last kind. It is loaded only where one
rank updates the same parameters in the same order, and so is state under strings of such an optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc.checkpoint.shards import ReadOnly, ShardOf, with_text_keys
from zc.engine.memory_order import change_each, flattened, is_cut, values_in
from zc.errors import CheckpointError, PlanError
from zc.optim.assignment import Optimizers, optimizers_in
from zc.planning.layout import Slot
from zc.registry import sharded

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer

OTHER, OWN, TOGETHER = "other", "own", "together"  # keys of a checkpoint, below "optimizer"
PART_KEY = "zc"  # in an optimizer's state_dict: it is one rank's part


def synchronized(model: nn.Module, optimizer: Optimizers) -> ShardedModel:
    """The sharded model, after everything that reads or writes masters or states has finished."""
    sharded_model = sharded(model)
    optimizers = optimizers_in(optimizer)
    if [id(one) for one in optimizers] != [id(each.optimizer) for each in sharded_model.optimizers]:
        names = " and ".join(type(one).__name__ for one in optimizers)
        ours = ", ".join(type(each.optimizer).__name__ for each in sharded_model.optimizers)
        raise PlanError(
            f"this {names} is not what {type(model).__name__} was compiled with: give the same {ours}"
            f"{' in that order, as zc.compile was given them' if len(sharded_model.optimizers) > 1 else ''}"
        )
    for each in sharded_model.optimizers:
        each.look_at_groups()
    runtime = sharded_model.runtime
    runtime.weights.synchronize()  # overlap_gather: gathers that step() started may still read the masters
    runtime.streams.synchronize()  # the host reads and writes masters and states, in any thread
    return sharded_model


@dataclass(frozen=True)
class Owned:
    """This rank owns elements [start, start + numel) of ``slot``, in its memory order. They are in ``slice``, if there
    are any: a parameter of ``optimizer``; or, of a frozen parameter in shards, a part of the shard. ``slot`` has the
    name by which the model calls it now, if ``is_in_model``; ``planned`` is the plan's."""

    planned: str
    is_in_model: bool
    optimizer: ShardedOptimizer | None
    slot: Slot
    start: int
    numel: int
    slice: Tensor | None
    dtype: torch.dtype

    @property
    def may_be_cut(self) -> bool:
        """Whether ranks may divide it, so that each of its states must have its shape, or be one number."""
        one = self.optimizer
        return one is not None and not one.rule.whole and one.runtime.group.shard.world_size > 1

    @property
    def is_cut(self) -> bool:
        """Whether this rank updates some of its elements, and another rank the others."""
        return self.slice is not None and self.numel != self.slot.numel

    def part(self, local: Tensor) -> ShardOf:
        """``local``: these elements in the slot's order; or, if they are the whole parameter, in its shape."""
        return ShardOf(self.slot.shape, flattened(local, self.slot), self.start, self.slot.order)

    @property
    def now(self) -> ShardOf:
        """The elements as they are, not a copy."""
        none = torch.empty(0, dtype=self.dtype, device="cpu")
        return self.part(self.slice.detach() if self.slice is not None else none)

    def parts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's state of ``slice``: tensors with its elements as parts, the rest as it is."""
        assert self.slice is not None, "who has no elements has no state"
        shape = self.slice.shape

        def part(key: Any, value: Any) -> Any:
            return self.part(value) if is_cut(key, value, shape) else value

        return {key: change_each(part, key, item) for key, item in state.items()}

    def part_of(self, whole: Tensor) -> Tensor:
        return flattened(whole, self.slot)[self.start : self.start + self.numel]

    def write(self, local: Tensor) -> None:
        """Writes these elements, 1-D, if the rank has any."""
        if self.slice is not None:
            flattened(self.slice.detach(), self.slot).copy_(local)


def owned(sharded_model: ShardedModel) -> dict[str, Owned]:
    """By the name of now, for every parameter in a bucket: those that train in order of registration, then frozen
    ones."""
    planned: dict[str, tuple[Any, ...]] = {}
    runtime, rank = sharded_model.runtime, sharded_model.runtime.group.shard.rank
    for bucket in runtime.plan.buckets:
        optimizer = sharded_model.optimizers[bucket.optimizer]
        for slot in bucket.slots:
            first, stop = bucket.layout.owned(slot, rank)
            start = first - slot.offset if stop > first else 0
            # a rank that owns nothing saves the state of its empty slice only for elementwise optimizers
            has_part = slot.name in optimizer.slices and (stop > first or not slot.numel or not optimizer.rule.whole)
            own = optimizer.slices[slot.name] if has_part else None
            planned[slot.name] = optimizer, slot, start, stop - first, own, bucket.acc_dtype
    for bucket in runtime.plan.frozen:
        for slot in bucket.slots:
            part, elements = runtime.buffers.weight_part(bucket, slot)
            start, shard = (elements.start, part) if part.numel() else (0, None)
            if not slot.is_left:
                planned[slot.name] = None, slot, start, part.numel(), shard, bucket.param_dtype
    now, by_name = runtime.names_now(), dict[str, Owned]()
    for name, param in runtime.placed.items():
        optimizer, slot, *rest = planned[name]
        called = now.get(id(param), name)
        by_name[called] = Owned(name, id(param) in now, optimizer, replace(slot, name=called), *rest)
    return by_name


def in_model(sharded_model: ShardedModel) -> dict[str, Owned]:
    """Those of `owned` that the model has, as its ``state_dict()``."""
    return {name: own for name, own in owned(sharded_model).items() if own.is_in_model}


def trained(sharded_model: ShardedModel) -> dict[str, Owned]:
    """Those of `owned` that an optimizer updates."""
    return {name: own for name, own in owned(sharded_model).items() if own.optimizer is not None}


def others(model: nn.Module, sharded_model: ShardedModel) -> dict[str, Any]:
    """What of ``model.state_dict()`` is in no bucket: frozen parameters, buffers, extra states; each tensor once."""
    seen = {id(param) for param in sharded_model.runtime.placed.values()}
    untrained: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            if id(value) in seen:
                continue
            seen.add(id(value))
            value = value.detach()
        untrained[name] = value
    return untrained


def is_extra_state(name: str) -> bool:
    """Whether this key of a ``state_dict`` is what a module's ``get_extra_state`` has returned, of any type and shape,
    and its ``set_extra_state`` takes."""
    return name.rpartition(".")[2] == "_extra_state"


def state_of(model: nn.Module, sharded_model: ShardedModel) -> dict[str, Any]:
    """See `zc.state_dict`."""
    sharded_model.take_over_writes()
    weights: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    for name, mine in owned(sharded_model).items():
        if mine.is_in_model:
            weights[name] = mine.now if mine.slot.numel else sharded_model.runtime.params[mine.planned].detach()
        if mine.slice is None or mine.optimizer is None or not mine.slot.numel:
            continue
        state = mine.optimizer.state_of_class.get(mine.slice, {})
        if state:
            if mine.is_cut:
                for key, value in values_in(None, state):
                    _check_part(name, mine, key, value)
            states[name] = mine.parts(state)
    rank = sharded_model.runtime.group.rank
    weights.update({name: _of_rank_0(rank, value) for name, value in others(model, sharded_model).items()})
    optimizer: dict[str, Any] = {"state": states, "param_groups": groups_of(sharded_model.optimizers)}
    for one in sharded_model.optimizers:
        keys = frozen_keys(one)
        for name, state in states_of_frozen(one).items():
            states[keys[name]] = {key: _of_rank_0(rank, value) for key, value in state.items()}
        by_string = state_by_string(one)
        if by_string:
            optimizer.setdefault(OTHER, {})[str(one.number)] = {f"rank_{rank}": by_string}
        own = own_entries(one)
        if own:
            of_rank_0 = change_each(lambda _, value: _of_rank_0(rank, value), None, own)
            optimizer.setdefault(OWN, {})[str(one.number)] = of_rank_0
    note = note_of(sharded_model)
    if note is not None:
        sharded_model.runtime.say_once(note)
        optimizer[TOGETHER] = together(sharded_model)
    return {"model": weights, "optimizer": optimizer}


def for_dcp(state: dict[str, Any]) -> dict[str, Any]:
    """The same state with text for keys, below the names of parameters, groups and optimizers."""

    def of_each(what: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: with_text_keys(f"{what} {name}", value) for name, value in values.items()}

    optimizer = dict(state["optimizer"])
    optimizer["state"] = of_each("the optimizer state of", optimizer["state"])
    groups = enumerate(optimizer["param_groups"])
    optimizer["param_groups"] = [of_each(f"of parameter group {number} the option", group) for number, group in groups]
    if OTHER in optimizer:
        optimizer[OTHER] = with_text_keys("the optimizer's state under strings", optimizer[OTHER])
    if OWN in optimizer:
        optimizer[OWN] = with_text_keys("what the optimizer adds to its state_dict", optimizer[OWN])
    return {**state, "model": of_each("the extra state", state["model"]), "optimizer": optimizer}


def host_copy(value: Any) -> Any:
    """A copy of a nested state in host memory."""
    return change_each(_copy_to_host, None, value)


def _copy_to_host(_: Any, value: Any) -> Any:
    if isinstance(value, ShardOf):
        return value.host_copy()
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _of_rank_0(rank: int, value: Any) -> Any:
    """Untrained tensors may differ between ranks. DCP treats equal keys as copies, of which any rank writes some."""
    is_read = rank > 0 and isinstance(value, Tensor)
    return ReadOnly(value.shape, value.detach().reshape(-1), 0) if is_read else value


def _check_part(name: str, mine: Owned, key: Any, value: Any) -> None:
    """Raises unless a value in the state of a cut parameter is cut alike, or is one number. Otherwise ranks would write
    different values under one name."""
    assert mine.slice is not None
    refuse_hidden(f"the optimizer state {key} of {name}", value)
    if not isinstance(value, Tensor) or (value.numel() == 1 and value.shape != mine.slice.shape):
        return
    if value.shape != mine.slice.shape or type(value) not in (Tensor, nn.Parameter):
        raise CheckpointError(
            f"the optimizer state {key} of {name} is a {type(value).__name__} of shape {tuple(value.shape)}, this "
            f"rank's slice {tuple(mine.slice.shape)} of {mine.slot.shape}: it can't be saved by parts. Without "
            "zc.elementwise the parameter stays whole, and so does its state"
        )


def refuse_hidden(what: str, value: Any) -> None:
    """Raises CheckpointError if a value of a cut parameter's state is a container that zc does not look into, and has
    tensors."""
    if not isinstance(value, Tensor) and _has_tensors(value):
        raise CheckpointError(
            f"{what} is a {type(value).__name__} of tensors, which can't be cut like the parameter: keep them in a "
            "list, or in a dict"
        )


def _has_tensors(value: Any) -> bool:
    """Without those that are one number."""
    if isinstance(value, Tensor):
        return value.dim() > 0
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        return False
    return any(map(_has_tensors, value.values() if isinstance(value, Mapping) else value))


def group_of(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """The parameter group of a slice, or of a frozen parameter."""
    return next(group for group in optimizer.param_groups if any(one is param for one in group["params"]))


def groups_of(optimizers: Iterable[ShardedOptimizer]) -> list[dict[str, Any]]:
    """The groups of these optimizers, in order, as torch.distributed.checkpoint.state_dict has them: with the names of
    all their parameters, frozen ones included, the same on every rank."""
    groups: list[dict[str, Any]] = []
    for one in optimizers:
        names = names_of(one)
        for group in one.optimizer.param_groups:
            params = [names.get(id(param), "") for param in group["params"]]
            groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": params})
    return groups


def numbered(groups: Iterable[Mapping[str, Any]]) -> tuple[dict[Any, int], list[dict[str, Any]]]:
    """The number of each member, across all groups as in a plain optimizer's state_dict; and groups with numbers."""
    numbers: dict[Any, int] = {}
    with_numbers: list[dict[str, Any]] = []
    count = 0
    for group in groups:
        params = range(count, count + len(group["params"]))
        numbers.update(zip(group["params"], params, strict=True))
        with_numbers.append({**group, "params": list(params)})
        count = params.stop
    return numbers, with_numbers


# --- what is not of one slice ---


def names_of(one: ShardedOptimizer) -> dict[int, str]:
    """The names that this optimizer's parameters have now, by their ids; of one that has left the model, the last."""
    runtime = one.runtime
    planned = {id(param): name for names in (runtime.frozen, runtime.params) for name, param in names.items()}
    return planned | runtime.names_now()


def frozen_of(one: ShardedOptimizer) -> dict[str, Tensor]:
    """The frozen parameters in this optimizer's groups, by name."""
    names = names_of(one)
    return {names[id(m)]: m for members in one.members for m in members if isinstance(m, Tensor) and id(m) in names}


def frozen_keys(one: ShardedOptimizer) -> dict[str, str]:
    """The names of `frozen_of`, each with that under which a checkpoint has this optimizer's state of it."""
    before = one.grad_shards.optimizers[: one.number]
    in_others = {id(param) for other in before for group in other.param_groups for param in group["params"]}
    return {n: f"{n} ({one.number})" if id(param) in in_others else n for n, param in frozen_of(one).items()}


def states_of_frozen(one: ShardedOptimizer) -> dict[str, dict[str, Any]]:
    """By name; without those that have none."""
    state = one.state_of_class
    return {name: dict(state[param]) for name, param in frozen_of(one).items() if state.get(param)}


def state_by_string(one: ShardedOptimizer) -> dict[str, Any]:
    """Raises CheckpointError if the optimizer has state that can't be saved by a name."""
    names = {id(param) for param in (*one.slices.values(), *frozen_of(one).values())}
    by_string: dict[str, Any] = {}
    for key, value in one.state_of_class.items():
        if isinstance(key, str):
            by_string[key] = value
        elif id(key) not in names:
            what = f"a tensor {tuple(key.shape)} that is in no group" if isinstance(key, Tensor) else repr(key)
            raise CheckpointError(
                f"{type(one.optimizer).__name__} keeps state under {what}: zc saves what is kept under a parameter or "
                "a string. Remove it before the save, or keep it under a string"
            )
    return by_string


def own_entries(one: ShardedOptimizer) -> dict[str, Any]:
    """What the optimizer's class, or a hook, adds to ``state_dict()``, such as a count of steps that is an attribute:
    its own ``load_state_dict``, or a hook, takes it back."""
    try:
        return own_part(_part_of_rank(one))
    except NotImplementedError:  # it has no such format
        return {}


def take_own_entries(one: ShardedOptimizer, own: Mapping[str, Any]) -> None:
    """Gives them to the class, whose states and groups are loaded already."""
    one.optimizer.load_state_dict({**_part_of_rank(one), **own})


def _part_of_rank(one: ShardedOptimizer) -> dict[str, Any]:
    one.asked_by_zc = True
    try:
        return one.optimizer.state_dict()
    finally:
        one.asked_by_zc = False


def own_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a plain state has beside the entries of PyTorch and of zc."""
    standard = ("state", "param_groups", PART_KEY, OTHER, OWN, TOGETHER)
    return {key: value for key, value in state.items() if key not in standard}


def together(sharded_model: ShardedModel) -> dict[str, list[list[str]]]:
    """The checkpoint's entry for each such optimizer; equal on every rank."""
    several = [one for one in sharded_model.optimizers if one.habits.stacks_state]
    return {str(one.number): _updated_by_rank(one) for one in several}


def note_of(sharded_model: ShardedModel) -> str | None:
    """The note for a save, or None."""
    names = [type(one.optimizer).__name__ for one in sharded_model.optimizers if one.habits.stacks_state]
    if not names:
        return None
    return (
        f"the state of {' and '.join(names)} was not shown to belong to single parameters: it can be loaded only where "
        "the same parameters are updated together, that is on as many ranks and with the same options of zc.compile"
    )


def check_together(
    one: ShardedOptimizer, states: Iterable[str], saved: Mapping[str, Sequence[Sequence[str]]], where: str
) -> None:
    """Raises CheckpointError, on every rank, if this optimizer can't use the checkpoint's states. ``states`` are their
    parameter names. ``saved`` is from `together`; without an entry for this optimizer, one process updated all."""
    members = members_of(one)
    if not one.habits.stacks_state or not set(states) & set(members):
        return
    theirs = [list(names) for names in saved.get(str(one.number), [members])]
    ours = _updated_by_rank(one)
    for rank, names in enumerate(ours):
        if names and names not in theirs:
            raise CheckpointError(
                f"{where}: its {type(one.optimizer).__name__} state belongs to parameters together, and is of "
                f"{len(theirs)} rank(s) that updated {_shown(theirs)}; here rank {rank} of {len(ours)} updates "
                f"{_shown([names])}. Such a state can't be divided: load it on {len(theirs)} rank(s) with the same "
                "options, or load the weights alone, by zc.load_state_dict without the key 'optimizer'"
            )


def refuse_together(sharded_model: ShardedModel, optimizers: Iterable[ShardedOptimizer], what: str) -> None:
    """Raises CheckpointError if ``what`` needs a state per parameter and an optimizer may not have that."""
    for one in optimizers:
        if one.habits.stacks_state and sharded_model.runtime.group.shard.world_size > 1:
            raise CheckpointError(
                f"{what}: the state of {type(one.optimizer).__name__} was not shown to belong to single parameters, so "
                "the parts of several ranks are not the state of one process: use zc.save and zc.load, on as many ranks"
            )


def members_of(one: ShardedOptimizer) -> list[str]:
    """The names of now."""
    return [called for called, _ in _both_names(one)]


def _both_names(one: ShardedOptimizer) -> list[tuple[str, str]]:
    """Of those that train, in the order of the groups: the names of now and the plan's."""
    now, params = names_of(one), one.runtime.params
    members = [member for members in one.members for member in members if isinstance(member, str)]
    return [(now[id(params[name])], name) for name in members]


def _updated_by_rank(one: ShardedOptimizer) -> list[list[str]]:
    """For each rank, the parameters of which it updates any element, in the order of the groups."""
    slots = {slot.name: (bucket.layout, slot) for bucket in one.buckets for slot in bucket.slots}
    ranges = {
        name: [layout.owned(slot, rank) for rank in range(one.runtime.group.shard.world_size)]
        for name, (layout, slot) in slots.items()
    }
    return [
        [called for called, name in _both_names(one) if ranges[name][rank][0] < ranges[name][rank][1]]
        for rank in range(one.runtime.group.shard.world_size)
    ]


def _shown(lists: Sequence[Sequence[str]], at_most: int = 4) -> str:
    texts = [", ".join(names[:at_most]) + (", ..." if len(names) > at_most else "") for names in lists[:at_most]]
    return "; ".join(f"({text})" for text in texts) + ("; ..." if len(lists) > at_most else "")
