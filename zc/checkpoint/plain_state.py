"""Loads plain state dicts: whole tensors by name, or by number as in an unsharded optimizer's state_dict."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zc.checkpoint import other_state
from zc.checkpoint.shards import ReadOnly, ShardOf
from zc.checkpoint.state import Owned, groups_of, others, owned, trained
from zc.checkpoint.target import Target, check_groups, check_names, flat_items
from zc.checkpoint.together import KEY
from zc.engine.memory_order import is_cut
from zc.errors import CheckpointError
from zc.optim.assignment import parts_of

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer


PART_KEY = "zc"  # in an optimizer's state_dict: it is one rank's part (zc/checkpoint/state_marks.py)
WAYS = (
    "call zc.full_optimizer_state(model, optimizer) on every rank and save what it gives on rank 0, which "
    "optimizer.load_state_dict and zc.load_state_dict take on every rank, or use zc.save and zc.load"
)
PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel, of torch.compile


def from_plain(model: nn.Module, sharded_model: ShardedModel, state: Mapping[str, Any]) -> Target:
    """Makes a target from a `zc.state_dict`, or from whole tensors or DTensors. Only reads the live state, and is
    collective for DTensors alone."""
    if not isinstance(state, Mapping) or "model" not in state:
        raise TypeError(
            'a state has the key "model", and "optimizer" where it has one: {"model": ..., "optimizer": ...}'
        )
    where = "the given state"
    target, mine, rest = Target(where), owned(sharded_model), others(model, sharded_model)
    wanted = {*mine, *rest, *model.state_dict(keep_vars=True)}
    names = _without_wrappers(list(state["model"]), wanted)
    given = zip(names, state["model"].values(), strict=True)
    weights = {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in given}
    check_names(model, sharded_model, set(weights), where)
    for name in (*mine, *rest):
        value = weights[name]
        shape = mine[name].slot.shape if name in mine else getattr(rest[name], "shape", None)
        if shape is not None and tuple(getattr(value, "shape", ())) != tuple(shape):
            raise CheckpointError(f"{where}: {name} has shape {tuple(value.shape)}, the model's is {tuple(shape)}")
        if name in mine:
            _check_part(mine[name], name, value, where)
        target.add(("model", name), _part(mine.get(name), value))
    optimizer = state.get("optimizer")
    target.has_optimizer = optimizer is not None
    if optimizer is not None:
        _add_optimizer(sharded_model, target, optimizer)
    check_groups(sharded_model, target)
    return target


def from_optimizer_state(sharded_model: ShardedModel, state: Any) -> Target:
    """As `from_plain`, from the state of the optimizers alone."""
    target = Target("the given state")
    _add_optimizer(sharded_model, target, state)
    check_groups(sharded_model, target)
    return target


def _add_optimizer(sharded_model: ShardedModel, target: Target, optimizer: Any) -> None:
    where = target.where
    states: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    saved: Mapping[str, Any] = {}
    by_string: dict[str, Any] = {}
    rank = f"rank_{sharded_model.runtime.group.rank}"
    for one, part in _parts(sharded_model, optimizer, where):
        if PART_KEY in part:
            mark = text_of_mark(part[PART_KEY])
            raise CheckpointError(f"{where}: its optimizer state is {mark}, and a whole one is wanted: {WAYS}")
        part_states, part_groups, names, part_by_string = optimizer_part(sharded_model, part, where, one)
        target.with_state.update(names)
        for number, by_rank in part.get(other_state.KEY, {}).items():  # of `zc.state_dict`
            by_string[number] = _part(None, {rank: by_rank[rank if rank in by_rank else "rank_0"]})
        if part_by_string:
            by_string[str((one or sharded_model.optimizers[0]).number)] = {rank: part_by_string}
        states.update(part_states)
        groups += part_groups
        saved = part.get(KEY, saved)
    tree = {"state": states, "param_groups": groups, KEY: saved, other_state.KEY: by_string}
    for path, value in flat_items(tree, ("optimizer",)).items():
        target.add(path, value)


def _parts(
    sharded_model: ShardedModel, given: Any, where: str
) -> list[tuple[ShardedOptimizer | None, Mapping[str, Any]]]:
    """Pairs each optimizer with its own state, from a container like the one that `zc.compile` got. A single state for
    all optimizers, as torch.distributed.checkpoint.state_dict makes it, is paired with None."""
    if isinstance(given, Mapping) and "state" in given and "param_groups" in given:
        return [(None, given)]
    parts = parts_of(sharded_model.container, given)
    if parts is None or not all(isinstance(p, Mapping) and "state" in p and "param_groups" in p for p in parts):
        kinds = [type(each.optimizer).__name__ for each in sharded_model.optimizers]
        raise CheckpointError(
            f"{where}: its optimizer state is a {type(given).__name__} of {len(given)}, and wanted is one state_dict, "
            f"or a {type(sharded_model.container).__name__} of them as zc.compile was given {', '.join(kinds)}"
        )
    return list(zip(sharded_model.optimizers, parts, strict=True))


def optimizer_part(
    sharded_model: ShardedModel, state: Mapping[str, Any], where: str, one: ShardedOptimizer | None
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], list[str], dict[str, Any]]:
    """Returns this rank's part of a whole optimizer state by parameter name, the groups with names for members, the
    names of all parameters with state, and the state under strings. ``one``: whose state it is; None: one state for all
    optimizers. Raises CheckpointError if the state belongs to other parameters."""
    optimizers = sharded_model.optimizers if one is None else [one]
    groups = _named_groups(groups_of(optimizers), state["param_groups"], where)
    numbered = {k: name for group in groups for k, name in zip(group.pop("numbers"), group["params"], strict=True)}
    mine = {name: own for name, own in trained(sharded_model).items() if own.optimizer in optimizers}
    frozen = {name for each in optimizers for name in other_state.frozen_of(each)}
    has_numbers = len(optimizers) == 1 and all(isinstance(key, int) for key in numbered)
    by_string: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    names: list[str] = []
    for key, values in state["state"].items():
        name = numbered.get(key, _bare(key, mine.keys() | frozen) if isinstance(key, str) else key)
        if has_numbers and isinstance(key, str):
            by_string[key] = _part(None, values)
            continue
        if name in frozen:
            states[name] = _part(None, values)
            continue
        if name not in mine:
            raise CheckpointError(f"{where} has optimizer state for {name}, which is in no parameter group here")
        own = mine[name]
        names.append(name)
        assert own.optimizer is not None
        cuts = not own.optimizer.rule.whole and sharded_model.runtime.group.shard.world_size > 1
        for option, value in values.items():
            whole = is_cut(option, value, torch.Size(own.slot.shape))
            if isinstance(value, Tensor) and not whole and value.numel() != 1 and cuts:
                raise CheckpointError(
                    f"{where}: optimizer state {option} of {name} has shape {tuple(value.shape)}, the parameter "
                    f"{own.slot.shape}"
                )
            _check_part(own, name, value, where)
            if own.slice is not None:
                states.setdefault(name, {})[option] = _part(own if whole else None, value)
    return states, groups, names, by_string


def _check_part(own: Owned, name: str, value: Any, where: str) -> None:
    """Raises CheckpointError if ``value`` is another rank's part."""
    if not isinstance(value, ShardOf) or (value.start, value.local.numel()) == (own.start, own.numel):
        return
    start, stop = value.start, value.start + value.local.numel()
    raise CheckpointError(
        f"{where} has elements [{start}, {stop}) of {name}, another rank's part: here are [{own.start}, "
        f"{own.start + own.numel}). Every rank gives its own part, through torch.distributed.checkpoint, or all give a "
        "whole state: StateDictOptions(full_state_dict=True), or zc.full_optimizer_state"
    )


def _part(own: Owned | None, value: Any) -> Any:
    """A copy of this rank's part, or of a nested state: the caller's tensor is never kept."""
    if isinstance(value, Mapping):
        return {key: _part(None, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_part(None, item) for item in value]
    if isinstance(value, ReadOnly):
        return value.local.detach().clone().view(value.shape)
    if isinstance(value, ShardOf):
        return value.with_local(value.local.detach().clone())
    if own is not None and own.slot.numel:
        return own.part(own.part_of(value.detach()).clone())
    return value.detach().clone() if isinstance(value, Tensor) else value


def text_of_mark(mark: Any) -> str:
    if not isinstance(mark, Mapping):
        return f"marked as {mark!r}, which this zc does not know"
    return f"rank {mark.get('rank')}'s part of {mark.get('world_size')} (what optimizer.state_dict() gave there)"


def _named_groups(ours: list[dict[str, Any]], groups: Any, where: str) -> list[dict[str, Any]]:
    """Replaces the members' numbers by names. A plain optimizer numbers its parameters across all groups, in the order
    in which it got them."""
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in ours]:
        raise CheckpointError(
            f"{where} has parameter groups of {[len(g['params']) for g in groups]} members, the optimizer was given "
            f"{[len(g['params']) for g in ours]}"
        )
    named = []
    for their, our in zip(groups, ours, strict=True):
        members = [
            _bare(m, our["params"]) if isinstance(m, str) else name
            for m, name in zip(their["params"], our["params"], strict=True)
        ]
        named.append({**their, "params": members, "numbers": list(their["params"])})
    return named


def _without_wrappers(names: list[str], wanted: Collection[str]) -> list[str]:
    """These names without the prefixes of wrappers around the model that was saved. A model may itself have an
    attribute ``module``: what all names have in common goes first, and no name of ``wanted`` is changed after that."""
    while names and any(name not in wanted for name in names):
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in names)), None)
        if prefix is None:
            return [_bare(name, wanted) for name in names]
        names = [name[len(prefix) :] for name in names]
    return names


def _bare(name: str, wanted: Collection[str]) -> str:
    """A name of ``wanted``, if it is one with prefixes of wrappers."""
    while name not in wanted and name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name
