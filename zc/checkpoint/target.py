"""Loads a state into a compiled model, after it has compared all names and shapes.

Whatever wrote it, a state is entries by path; a path has the keys of a `zc.state_dict`, one after the other::

    ("model", name)                              a weight, buffer or extra state
    ("optimizer", "state", name, key)            a state of a parameter
    ("optimizer", "param_groups", number, key)   an option; other keys below "optimizer": zc/checkpoint/state.py

Each format makes the entries of what it has, values in memory or `Stored` ones. `add_model` and `add_optimizers` check
them and take this rank's part into a `Target`, beside the live state, and `commit` replaces that.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from zc import torch_private
from zc.checkpoint.shards import ReadOnly, ShardOf, own_key, with_own_keys
from zc.checkpoint.state import (
    OTHER,
    OWN,
    TOGETHER,
    Owned,
    check_together,
    frozen_keys,
    frozen_of,
    group_of,
    groups_of,
    in_model,
    is_extra_state,
    members_of,
    others,
    owned,
    refuse_hidden,
    take_own_entries,
    trained,
)
from zc.engine.memory_order import change_each, in_shape
from zc.errors import CheckpointError, some
from zc.optim.assignment import is_known, shape_of_state

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer
    from zc.planning.layout import Slot


Path = tuple[Any, ...]  # of a value in the nested state: keys and, in lists, numbers


def nested(items: Iterable[tuple[Path, Any]]) -> Any:
    """The tree that has these leaves, with the keys that it was saved with (`zc.checkpoint.shards`)."""
    return with_own_keys(_tree(items))


def _tree(items: Iterable[tuple[Path, Any]]) -> Any:
    """The same with keys as DCP has them. It flattens dicts, and lists that contain tensors: their keys are numbers."""
    below: dict[Any, list[tuple[Path, Any]]] = {}
    for path, value in items:
        if not path:
            return value
        below.setdefault(path[0], []).append((path[1:], value))
    tree = {key: _tree(values) for key, values in below.items()}
    return [tree[key] for key in sorted(tree)] if tree and all(isinstance(key, int) for key in tree) else tree


@dataclass(frozen=True)
class Stored:
    """A tensor that a file has. In a target it is memory, into which DCP reads."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def part(self, own: Owned, dtype: torch.dtype) -> ShardOf:
        """Memory of ``dtype`` for this rank's elements."""
        return own.part(torch.empty(own.numel, dtype=dtype, device="cpu"))


@dataclass
class Target:
    """What is loaded, beside the live state. ``items`` are by DCP's key; ``paths`` gives the place of each key in the
    nested state."""

    where: str
    items: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    has_optimizer: bool = True
    with_state: set[str] = field(default_factory=set)  # parameters with optimizer state, on any rank

    def add(self, path: Path, value: Any) -> None:
        key = ".".join(map(str, path))
        self.items[key], self.paths[key] = value, path

    def under(self, *prefix: Any) -> Iterator[tuple[Path, Any]]:
        """Paths below ``prefix`` and their values."""
        for key, path in self.paths.items():
            if path[: len(prefix)] == prefix:
                yield path[len(prefix) :], self.items[key]

    def by_name(self, *prefix: Any) -> dict[Any, dict[Any, Any]]:
        """The values of each key, of each name below ``prefix``."""
        items: dict[Any, dict[Any, list[tuple[Path, Any]]]] = {}
        for (name, key, *deeper), value in self.under(*prefix):
            items.setdefault(name, {}).setdefault(key, []).append((tuple(deeper), value))
        return {name: {own_key(key): nested(at) for key, at in by_key.items()} for name, by_key in items.items()}

    def by_string(self, one: ShardedOptimizer) -> dict[str, Any]:
        """What ``one`` kept under strings, on this rank or on rank 0."""
        by_rank = self.by_name("optimizer", OTHER, str(one.number))
        return next(iter(by_rank.values()), {})

    def groups(self) -> list[dict[str, Any]]:
        return nested(self.under("optimizer", "param_groups")) or []

    def extra(self) -> Any:
        for _, value in self.under("extra"):
            return torch.load(io.BytesIO(value.numpy().tobytes()), weights_only=True)
        return {}


def _stored(entry: Any) -> Any:
    return Stored(tuple(entry.size), entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else entry


def make_target(model: nn.Module, sharded_model: ShardedModel, metadata: Metadata, where: str) -> Target:
    """Allocates this rank's part of the checkpoint. Raises CheckpointError if names or shapes are not the model's."""
    if not metadata.planner_data:
        raise CheckpointError(f"{where} was not written by DCP's default planner: its keys have no paths")
    entries = {tuple(metadata.planner_data[key]): _stored(entry) for key, entry in metadata.state_dict_metadata.items()}
    check_names(model, sharded_model, {path[1] for path in entries if path[0] == "model"}, where)
    group = sharded_model.runtime.group
    target = Target(where, has_optimizer=any(path[0] == "optimizer" for path in entries))
    add_model(target, model, sharded_model, entries)
    add_optimizers(target, sharded_model, sharded_model.optimizers, entries)
    rank = group.rank if sum(path[0] == "extra" for path in entries) == group.world_size else 0
    if ("extra", f"rank_{rank}") in entries:
        target.add(("extra", f"rank_{rank}"), _whole(entries["extra", f"rank_{rank}"]))
    return target


def add_model(target: Target, model: nn.Module, sharded_model: ShardedModel, entries: Mapping[Path, Any]) -> None:
    """Adds this rank's part of the weights among ``entries``, and buffers and extra states. Raises CheckpointError if a
    shape is not the model's."""
    mine, rest = owned(sharded_model), others(model, sharded_model)
    for path, value in entries.items():
        if path[0] != "model":
            continue
        name, text = path[1], ".".join(map(str, path[1:]))
        if name in mine:
            own = mine[name]
            check_tensor(target.where, text, value, own.slot.shape, own.dtype)
            if own.slot.numel:
                target.add(path, _part(target.where, own, value, own.dtype))
        elif name in rest:  # and no second name of a tied weight
            current = rest[name]
            if isinstance(current, Tensor) and not is_extra_state(name):
                check_tensor(target.where, text, value, tuple(current.shape), current.dtype)
            target.add(path, _whole(value))


def add_optimizers(
    target: Target, sharded_model: ShardedModel, optimizers: Sequence[ShardedOptimizer], entries: Mapping[Path, Any]
) -> None:
    """Adds this rank's part of the state of ``optimizers`` among ``entries``. Raises CheckpointError if a state belongs
    to no parameter of theirs, or can't be cut."""
    where, own_rank = target.where, f"rank_{sharded_model.runtime.group.rank}"
    mine = {name: own for name, own in trained(sharded_model).items() if own.optimizer in optimizers}
    frozen = {key for one in optimizers for key in frozen_keys(one).values()}
    ranks_with_others = {(path[2], path[3]) for path in entries if path[:2] == ("optimizer", OTHER)}
    for path, value in entries.items():
        kind = path[1] if path[0] == "optimizer" else None
        if kind == OTHER:
            if path[3] == (own_rank if (path[2], own_rank) in ranks_with_others else "rank_0"):
                target.add(path, _whole(value))
        elif kind == "state" and path[2] not in frozen:
            name = path[2]
            if name not in mine:
                raise CheckpointError(f"{where} has optimizer state for {name}, which is in no parameter group here")
            own = mine[name]
            key = next((key for key in reversed(path[3:]) if isinstance(key, str)), path[3])  # in a list: the list's
            target.with_state.add(name)
            loaded = change_each(partial(_part_of_state, where, own), key, value)
            if own.slice is not None or path[3:] == ("step",):  # how many updates there were, every rank says
                target.add(path, loaded)
        elif kind in ("state", "param_groups", OWN, TOGETHER):
            target.add(path, _whole(value))


def _part_of_state(where: str, own: Owned, key: Any, value: Any) -> Any:
    """This rank's part of a value of a parameter's state, a copy; of what all ranks keep alike, the whole. Raises
    CheckpointError, on every rank, if a tensor is not what the optimizer's class keeps."""
    shape, slot, what = _shape_of(value), own.slot, f"{where}: optimizer state {key} of {own.slot.name}"
    assert own.optimizer is not None
    optimizer = own.optimizer.optimizer
    # what is stored is as the ranks had it that saved: it fits where the parameter is not cut
    must_fit = own.is_cut if isinstance(value, Stored) else own.may_be_cut
    if isinstance(shape, str):
        if must_fit:
            refuse_hidden(what, value)
        return _whole(value)
    kept, is_one_number = shape_of_state(optimizer, key, slot.shape), math.prod(shape) == 1
    if kept is not None and shape != kept and not (is_one_number and math.prod(kept) == 1):
        raise CheckpointError(
            f"{what} has shape {shape}, the parameter {slot.shape}: {type(optimizer).__name__} keeps {kept} for it. "
            "Give the state of this model, or load the weights alone, by zc.load_state_dict without the key 'optimizer'"
        )
    if shape == slot.shape and key != "step":  # as `zc.engine.memory_order.is_cut`
        return _part(where, own, value)
    if must_fit and not is_one_number:
        raise CheckpointError(
            f"{what} has shape {shape}, the parameter {slot.shape}: it can't be cut like the parameter"
        )
    return _whole(value)


def _shape_of(value: Any) -> tuple[int, ...] | str:
    """Of what is no tensor, the name of its type."""
    return tuple(value.shape) if isinstance(value, Tensor | Stored) else type(value).__name__


def _part(where: str, own: Owned, value: Any, dtype: torch.dtype | None = None) -> ShardOf:
    """This rank's elements of ``value``, a copy; of what is stored, memory for them, of ``dtype`` if given."""
    if isinstance(value, Stored):
        return value.part(own, dtype or value.dtype)
    if not isinstance(value, ShardOf):
        return own.part(own.part_of(value.detach()).clone())
    start, stop = value.start, value.start + value.local.numel()
    if (start, stop) != (own.start, own.start + own.numel):
        raise CheckpointError(
            f"{where} has elements [{start}, {stop}) of {own.slot.name}, another rank's part: here are [{own.start}, "
            f"{own.start + own.numel}). Every rank gives its own part, through torch.distributed.checkpoint, or all "
            "give a whole state: StateDictOptions(full_state_dict=True), or zc.full_optimizer_state"
        )
    return value.with_local(value.local.detach().clone())


def _whole(value: Any) -> Any:
    """A copy of a nested value: the caller's tensor is never kept. Of what is stored, memory for it, or None: DCP puts
    any other value in its place."""
    if isinstance(value, Stored):
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")
    if isinstance(value, BytesStorageMetadata):
        return None
    return change_each(_copy, None, value)


def _copy(_: Any, value: Any) -> Any:
    if isinstance(value, ReadOnly):
        return value.local.detach().clone().view(value.shape)
    return value.detach().clone() if isinstance(value, Tensor) else value


def check_names(model: nn.Module, sharded_model: ShardedModel, names_there: set[str], where: str) -> None:
    """Raises CheckpointError unless ``names_there`` are those of the model's parameters, buffers and extra states."""
    wanted = set(in_model(sharded_model)) | set(others(model, sharded_model))
    seconds = set(model.state_dict(keep_vars=True))  # a tied weight's second name may be there
    refuse_other_model(model, where, wanted - names_there, names_there - wanted - seconds)


def refuse_other_model(model: nn.Module, where: str, missing: Iterable[str], extra: Iterable[str]) -> None:
    """Raises CheckpointError if a name of the model is ``missing`` in ``where``, or ``where`` has an ``extra`` one."""
    kinds = {"missing": sorted(missing), "extra": sorted(extra)}
    parts = [f"{len(names)} {kind} ({some(names)})" for kind, names in kinds.items() if names]
    if parts:
        raise CheckpointError(f"{where} is of another model than this {type(model).__name__}: {' and '.join(parts)}")


def check_tensor(where: str, name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises CheckpointError unless ``value`` of ``where`` is a tensor like the model's. One in memory may have any
    dtype, as in ``load_state_dict``."""
    if _shape_of(value) != tuple(shape):
        raise CheckpointError(f"{where}: {name} has shape {_shape_of(value)}, the model's is {tuple(shape)}")
    if isinstance(value, Stored) and _kind_of(value.dtype) != _kind_of(dtype):
        raise CheckpointError(f"{where}: {name} is {value.dtype}, the model's is {dtype}")


def _kind_of(dtype: torch.dtype) -> str:
    """Between dtypes of one kind values may be cast."""
    return "complex" if dtype.is_complex else "floating point" if dtype.is_floating_point else "whole number"


def check_values(sharded_model: ShardedModel, target: Target) -> None:
    """Raises CheckpointError if what DCP has read beside the tensors can't be cut like a parameter."""
    mine = trained(sharded_model)
    for (name, key, *_), value in target.under("optimizer", "state"):
        if name in mine and mine[name].is_cut:
            refuse_hidden(f"{target.where}: optimizer state {key} of {name}", value)


def check_groups(sharded_model: ShardedModel, target: Target) -> None:
    """Raises unless the checkpoint's parameter groups have this optimizer's members and all of its options. A state
    that belongs to several parameters must belong to the same ones here."""
    if not target.has_optimizer:
        return
    theirs, ours, where = target.groups(), groups_of(sharded_model.optimizers), target.where
    if len(theirs) != len(ours):
        raise CheckpointError(f"{where} has {len(theirs)} parameter groups, the optimizer {len(ours)}")
    owners = [each for each in sharded_model.optimizers for _ in each.members]
    for number, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        if their.get("params") != our["params"]:
            differing = sorted(set(their.get("params") or ()) ^ set(our["params"])) or ["the order"]
            raise CheckpointError(f"{where}: parameter group {number} has other members: {some(differing)}")
        later = _options_of_later(owners[number].optimizer, their, set(our) - set(their))
        for key, value in later.items():
            target.add(("optimizer", "param_groups", number, key), value)
        lacking = sorted(set(our) - set(their) - set(later) - {"initial_lr"})
        if lacking:
            raise CheckpointError(
                f"{where}: parameter group {number} lacks {some(lacking)}: another optimizer than "
                f"{type(owners[number].optimizer).__name__}?"
            )
    saved = {number: names for (number,), names in target.under("optimizer", TOGETHER)}
    for one in sharded_model.optimizers:
        has_others = any(True for _ in target.under("optimizer", OTHER, str(one.number)))
        check_together(one, members_of(one) if has_others else target.with_state, saved, where)


def _options_of_later(optimizer: Optimizer, group: Mapping[str, Any], lacking: set[str]) -> dict[str, Any]:
    """Those of the options ``lacking`` that the optimizer's class gives to a state from before it had them, as its
    ``load_state_dict`` does by ``__setstate__``."""
    copy = torch_private.bare_copy(optimizer)
    filled = {**group, "params": []}
    copy.__setstate__({"state": defaultdict(dict), "param_groups": [filled]})
    return {key: filled[key] for key in lacking if key in filled}


@torch.no_grad()
def commit(model: nn.Module, sharded_model: ShardedModel, target: Target) -> None:
    """Copies the checked ``target`` into the live state and gathers the weights. Collective. Gradients stay."""
    for each in sharded_model.optimizers:
        each.count_from_load()
    sharded_model.runtime.weights.before_writes()
    mine, rest = owned(sharded_model), others(model, sharded_model)
    extra_states: list[tuple[Path, Any]] = []
    for (name, *deeper), value in target.under("model"):
        if name in mine:
            mine[name].write(value.local)
        elif isinstance(rest.get(name), Tensor) and not is_extra_state(name):
            rest[name].copy_(value)
        else:
            extra_states.append(((name, *deeper), value))
    if extra_states:
        model.load_state_dict(nested(extra_states), strict=False)  # of modules
    sharded_model.runtime.unset.params.difference_update(own.planned for own in mine.values())
    sharded_model.publish_all()

    states = target.by_name("optimizer", "state")
    for name, own in mine.items():
        if own.slice is None or own.optimizer is None:
            continue
        optimizer = own.optimizer.local
        optimizer.state.pop(own.slice, None)
        if name in states:
            optimizer.state[own.slice] = _placed(states[name], own.slice, optimizer, own.slot)
    for each in sharded_model.optimizers:
        _commit_others(each, target, states)
        of_each = [(name, own) for name, own in mine.items() if own.optimizer is each and name in target.with_state]
        each.state.loaded({own.planned: num_updates(states.get(name, {})) for name, own in of_each})
    groups = [group for each in sharded_model.optimizers for group in each.optimizer.param_groups]
    for group, loaded in zip(groups, target.groups(), strict=False):
        for key, value in loaded.items():
            if key != "params":
                current = group.get(key)
                if isinstance(current, Tensor):
                    current.copy_(value if isinstance(value, Tensor) else torch.as_tensor(value))
                else:
                    group[key] = value
    for each in sharded_model.optimizers:
        each.updater.take_loaded_state([bucket.index for bucket in each.buckets])
    of_classes = target.by_name("optimizer", OWN)
    for each in sharded_model.optimizers:
        if of_classes.get(str(each.number)):
            take_own_entries(each, of_classes[str(each.number)])


def num_updates(state: Mapping[str, Any]) -> int:
    """How many updates a state of one parameter has had, as far as it says so."""
    step = state.get("step")
    if isinstance(step, Tensor) and step.numel() == 1:
        step = step.item()
    return int(step) if isinstance(step, (int, float)) else 0


def _commit_others(one: ShardedOptimizer, target: Target, states: Mapping[str, dict[str, Any]]) -> None:
    """Frozen parameters without state in the checkpoint keep theirs: the optimizer's ``__init__`` may have made it."""
    state, keys = one.state_of_class, frozen_keys(one)
    for name, param in frozen_of(one).items():
        if (saved := states.get(keys[name])) is not None:
            state[param] = _placed(saved, param, one.local)
    if target.has_optimizer:
        for key in [key for key in state if isinstance(key, str)]:
            del state[key]
    state.update(target.by_string(one))


def _placed(state: Mapping[str, Any], param: Tensor, optimizer: Optimizer, slot: Slot | None = None) -> dict[str, Any]:
    """Moves a state to where the optimizer expects it, which is its parameter's device. A step count stays on the host,
    unless the update is one kernel that reads it. torch's classes get the dtype of what they update, of which they keep
    their states; another may want its own. (Both as in ``torch.optim.Optimizer.load_state_dict``.)"""
    group = group_of(optimizer, param)
    has_dtype = slot is not None and is_known(optimizer)  # a frozen parameter's waits as it is

    def place(key: Any, value: Any) -> Any:
        if isinstance(value, ShardOf):
            assert slot is not None
            value = in_shape(value.local, slot)
        is_moved = isinstance(value, Tensor) and (key != "step" or group.get("fused") or group.get("capturable"))
        if is_moved and has_dtype and value.is_floating_point() and value.dim() > 0:
            return value.to(param)
        return value.to(param.device) if is_moved else value

    return {key: change_each(place, key, item) for key, item in state.items()}
