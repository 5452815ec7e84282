"""Loads named tensors into a compiled model, after it has compared all names and shapes."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from zc import torch_private
from zc.checkpoint import other_state
from zc.checkpoint.shards import ShardOf
from zc.checkpoint.state import groups_of, others, owned
from zc.checkpoint.together import KEY, check_together, members_of
from zc.engine.memory_order import flattened, in_shape
from zc.errors import CheckpointError, some

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer
    from zc.planning.layout import Slot


Path = tuple[Any, ...]  # of a value in the nested state: keys and, in lists, numbers


def flat_items(tree: Any, path: Path = ()) -> dict[Path, Any]:
    """The leaves of nested dicts, and of lists of dicts."""
    if isinstance(tree, Mapping):
        return {p: v for key, item in tree.items() for p, v in flat_items(item, (*path, str(key))).items()}
    if isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        return {p: v for k, item in enumerate(tree) for p, v in flat_items(item, (*path, k)).items()}
    return {path: tree}


@dataclass
class Target:
    """Memory that a checkpoint is read into, beside the live state. ``items`` are by DCP's key; ``paths`` gives the
    place of each key in the nested state."""

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

    def groups(self) -> list[dict[str, Any]]:
        groups: dict[int, dict[str, Any]] = {}
        for (number, option, *deeper), value in self.under("optimizer", "param_groups"):
            if deeper:  # a list of tensors
                groups.setdefault(number, {}).setdefault(option, []).append(value)
            else:
                groups.setdefault(number, {})[option] = value
        return [groups[number] for number in sorted(groups)]

    def extra(self) -> Any:
        for _, value in self.under("extra"):
            return torch.load(io.BytesIO(value.numpy().tobytes()), weights_only=True)
        return {}


def make_target(model: nn.Module, sharded_model: ShardedModel, metadata: Metadata, where: str) -> Target:
    """Allocates this rank's part of the checkpoint. Raises CheckpointError if names or shapes are not the model's."""
    if not metadata.planner_data:
        raise CheckpointError(f"{where} was not written by DCP's default planner: its keys have no paths")
    entries: dict[Path, Any] = {tuple(metadata.planner_data[k]): md for k, md in metadata.state_dict_metadata.items()}
    target, group = Target(where), sharded_model.runtime.group
    mine, rest = owned(sharded_model), others(model, sharded_model)
    frozen = {name for one in sharded_model.optimizers for name in other_state.frozen_of(one)}
    ranks_with_others = {(path[2], path[3]) for path in entries if path[:2] == ("optimizer", other_state.KEY)}
    check_names(model, sharded_model, {path[1] for path in entries if path[0] == "model"}, where)

    for path, entry in entries.items():
        if path[0] == "model" and path[1] in mine:
            own = mine[path[1]]
            _check_tensor(path, entry, own.slot.shape, own.dtype, where)
            if own.slot.numel:
                target.add(path, own.part(torch.empty(own.numel, dtype=own.dtype)))
        elif path[0] == "model" and path[1] in rest:
            current = rest[path[1]]
            if isinstance(current, Tensor):
                _check_tensor(path, entry, tuple(current.shape), current.dtype, where)
                target.add(path, torch.empty(current.shape, dtype=current.dtype))
            else:
                target.add(path, _room(entry))
        elif path[:2] == ("optimizer", "state") and path[2] in frozen:
            target.add(path, _room(entry))
        elif path[:2] == ("optimizer", other_state.KEY):
            own_rank = f"rank_{group.rank}"
            if path[3] == (own_rank if (path[2], own_rank) in ranks_with_others else "rank_0"):
                target.add(path, _room(entry))
        elif path[:2] == ("optimizer", "state"):
            if path[2] not in mine or mine[path[2]].optimizer is None:
                raise CheckpointError(f"{where} has optimizer state for {path[2]}, which is in no parameter group here")
            own = mine[path[2]]
            target.with_state.add(path[2])
            if own.slice is None:
                continue
            is_tensor = isinstance(entry, TensorStorageMetadata)
            if is_tensor and tuple(entry.size) == own.slot.shape and path[3] != "step":  # as `is_cut`
                target.add(path, own.part(torch.empty(own.numel, dtype=entry.properties.dtype)))
            elif is_tensor and entry.size.numel() != 1 and own.numel != own.slot.numel:
                raise CheckpointError(
                    f"{where}: optimizer state {path[3]} of {path[2]} has shape {tuple(entry.size)}, the parameter "
                    f"{own.slot.shape}: it can't be cut like the parameter"
                )
            else:
                target.add(path, _room(entry))
        elif path[:2] in (("optimizer", "param_groups"), ("optimizer", KEY)):
            target.add(path, _room(entry))
    target.has_optimizer = any(path[0] == "optimizer" for path in entries)
    ranks = [path for path in entries if path[0] == "extra"]
    rank = group.rank if len(ranks) == group.world_size else 0
    if ("extra", f"rank_{rank}") in entries:
        target.add(("extra", f"rank_{rank}"), _room(entries["extra", f"rank_{rank}"]))
    return target


def _room(entry: Any) -> Tensor | None:
    """Memory for a tensor. None for any other value: DCP puts that in its place."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def check_names(model: nn.Module, sharded_model: ShardedModel, names_there: set[str], where: str) -> None:
    """Raises CheckpointError unless ``names_there`` are those of the model's parameters, buffers and extra states."""
    wanted = set(owned(sharded_model)) | set(others(model, sharded_model))
    seconds = set(model.state_dict(keep_vars=True))  # a tied weight's second name may be there
    refuse_other_model(model, where, wanted - names_there, names_there - wanted - seconds)


def refuse_other_model(model: nn.Module, where: str, missing: Iterable[str], extra: Iterable[str]) -> None:
    """Raises CheckpointError if a name of the model is ``missing`` in ``where``, or ``where`` has an ``extra`` one."""
    kinds = {"missing": sorted(missing), "extra": sorted(extra)}
    parts = [f"{len(names)} {kind} ({some(names)})" for kind, names in kinds.items() if names]
    if parts:
        raise CheckpointError(f"{where} is of another model than this {type(model).__name__}: {' and '.join(parts)}")


def _check_tensor(path: Path, entry: Any, shape: tuple[int, ...], dtype: torch.dtype, where: str) -> None:
    actual = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else type(entry).__name__
    if actual != shape:
        raise CheckpointError(f"{where}: {'.'.join(map(str, path[1:]))} has shape {actual}, the model's is {shape}")
    if entry.properties.dtype.is_floating_point != dtype.is_floating_point:
        raise CheckpointError(f"{where}: {path[1]} is {entry.properties.dtype}, the model's is {dtype}")


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
    saved = {number: names for (number,), names in target.under("optimizer", KEY)}
    for one in sharded_model.optimizers:
        has_others = any(True for _ in target.under("optimizer", other_state.KEY, str(one.number)))
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
    """Copies the checked ``target`` into the live state and gathers the weights. Collective."""
    sharded_model.zero_grad()
    sharded_model.runtime.weights.before_writes()
    mine, rest = owned(sharded_model), others(model, sharded_model)
    plain: dict[str, Any] = {}
    for (name, *deeper), value in target.under("model"):
        if name in mine:
            own = mine[name]
            if own.slice is not None:
                local = value.local if isinstance(value, ShardOf) else value.reshape(-1)
                flattened(own.slice, own.slot).copy_(local)
        elif isinstance(rest.get(name), Tensor):
            rest[name].copy_(value)
        else:
            _set(plain, (name, *deeper), value)
    if plain:
        model.load_state_dict(plain, strict=False)  # extra states of modules
    sharded_model.runtime.unset.params.difference_update(mine)
    sharded_model.publish_all()

    states: dict[str, dict[str, Any]] = {}
    for path, value in target.under("optimizer", "state"):
        _set(states, path, value)
    for name, own in mine.items():
        if own.slice is None or own.optimizer is None:
            continue
        optimizer = own.optimizer.local
        optimizer.state.pop(own.slice, None)
        if name in states:
            optimizer.state[own.slice] = _placed(states[name], own.slice, optimizer, own.slot)
    for each in sharded_model.optimizers:
        _commit_others(each, target, states)
        each.state.loaded({name for name in target.with_state if name in mine and mine[name].optimizer is each})
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


def _commit_others(one: ShardedOptimizer, target: Target, states: Mapping[str, dict[str, Any]]) -> None:
    """Frozen parameters without state in the checkpoint keep theirs: the optimizer's ``__init__`` may have made it."""
    state = one.local.state
    for name, param in other_state.frozen_of(one).items():
        if name in states:
            state[param] = _placed(states[name], param, one.local)
    if target.has_optimizer:
        for key in [key for key in state if isinstance(key, str)]:
            del state[key]
    by_rank: dict[str, Any] = {}
    for path, value in target.under("optimizer", other_state.KEY, str(one.number)):
        _set(by_rank, path, value)
    state.update(other_state.as_lists(next(iter(by_rank.values()), {})))


def _placed(state: Mapping[str, Any], param: Tensor, optimizer: Optimizer, slot: Slot | None = None) -> dict[str, Any]:
    """Moves a state to where the optimizer expects it, which is its parameter's device. A step count stays on the host,
    unless the update is one kernel that reads it (as in ``torch.optim.Optimizer.load_state_dict``)."""
    group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
    placed: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, ShardOf):
            assert slot is not None
            value = in_shape(value.local, slot)
        is_moved = isinstance(value, Tensor) and (key != "step" or group.get("fused") or group.get("capturable"))
        placed[key] = value.to(param.device) if is_moved else value
    return placed


def _set(tree: dict[Any, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
