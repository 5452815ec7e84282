"""Loads DeepSpeed ZeRO-1/2 checkpoints, in the formats that DeepSpeed's own scripts export.

- Weights alone: ``zero_to_fp32.py`` writes a plain state dict, which `zc.load_state_dict` loads.
- Weights and Adam moments: ``ds_to_universal.py`` writes a folder ``zero/<parameter>/`` with ``fp32.pt``,
  ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``, which `load_universal` loads (arXiv:2406.18820).
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zc.checkpoint.saving import channel_of
from zc.checkpoint.shards import ShardOf
from zc.checkpoint.state import Owned, groups_of, synchronized, trained
from zc.checkpoint.target import Stored, Target, add_model, add_optimizers, check_groups, commit, refuse_other_model
from zc.errors import CheckpointError
from zc.optim.assignment import Optimizers
from zc.optim.trials import states_of_trial

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer


@torch.inference_mode(False)
def load_universal(path: str | Path, model: nn.Module, optimizer: Optimizers) -> None:
    """Loads weights and optimizer states of a DeepSpeed universal checkpoint into a compiled model, under any plan.

    ``path`` contains the folder ``zero``. Frozen parameters, buffers and the optimizer's options are not in it and stay
    as they are. If every parameter has only ``fp32.pt``, the optimizer starts with fresh state. Every rank reads all
    files, one after the other, and keeps its own elements.

    Raises:
        CheckpointError: a parameter is missing, extra or of another size, lacks a state that the optimizer keeps or
            other parameters have, or reading a file would run code from it. Nothing is changed.
        RankMismatchError: ranks gave other paths, or see other files or step counts there. Nothing is changed.
    """
    sharded_model = synchronized(model, optimizer)
    channel = channel_of(sharded_model)
    channel.same_call("zc.load_universal", path)
    with channel.together(f"loading {path}"):
        target, files = _target(Path(path), model, sharded_model)
    channel.same_content(path, files)
    commit(model, sharded_model, target)


@dataclass(frozen=True)
class _File(Stored):
    """A file with a whole tensor, which is read where this rank's elements are asked for."""

    path: Path

    def part(self, own: Owned, dtype: torch.dtype) -> ShardOf:
        value = _read(self.path)
        if not isinstance(value, Tensor) or value.numel() != own.slot.numel:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"{self.path} holds {shape}, the parameter's shape is {own.slot.shape}")
        return own.part(own.part_of(value.reshape(own.slot.shape)).clone())


def _target(path: Path, model: nn.Module, sharded_model: ShardedModel) -> tuple[Target, list[str]]:
    """And what tells this checkpoint from another one, without the values of its tensors."""
    folder, mine = path / "zero", trained(sharded_model)
    if not folder.is_dir():
        raise CheckpointError(f"{path} is no universal checkpoint: it has no folder zero")
    names = {file.parent.relative_to(folder).as_posix() for file in folder.rglob("fp32.pt")}
    seconds = model.state_dict(keep_vars=True).keys()  # frozen parameters, and a tied weight's second name
    refuse_other_model(model, str(path), mine.keys() - names, names - mine.keys() - seconds)
    entries: dict[tuple[Any, ...], Any] = {}
    files: list[str] = []
    for name, own in mine.items():
        for file in sorted((folder / name).glob("*.pt")):
            step = torch.tensor(float(_read(file)), device="cpu") if file.stem == "step" else None
            value = _File(own.slot.shape, own.dtype, file) if step is None else step
            content = f"the number {value.item()}" if isinstance(value, Tensor) else f"{file.stat().st_size} bytes"
            files.append(f"{file.relative_to(folder)} with {content}")
            entries[("model", name) if file.stem == "fp32" else ("optimizer", "state", name, file.stem)] = value
    _check_states(folder, mine, {path[2:] for path in entries if path[0] == "optimizer"})
    target = Target(str(path))
    add_model(target, model, sharded_model, entries)
    add_optimizers(target, sharded_model, sharded_model.optimizers, entries)
    target.has_optimizer = bool(target.with_state)
    for number, group in enumerate(groups_of(sharded_model.optimizers)) if target.has_optimizer else ():
        for option, value in group.items():
            target.add(("optimizer", "param_groups", number, option), value)
    check_groups(sharded_model, target)
    return target, files


def _check_states(folder: Path, mine: Mapping[str, Owned], there: Collection[tuple[str, str]]) -> None:
    """Raises CheckpointError, where ``there`` are states at all, for the first that a parameter lacks: its optimizer
    keeps it, or another parameter of that optimizer and of as many dimensions has it. ``there``: names and keys."""
    alike: dict[tuple[ShardedOptimizer, int], dict[str, None]] = {}
    for name, own in mine.items() if there else ():
        if own.optimizer is not None:
            alike.setdefault((own.optimizer, len(own.slot.shape)), {})[name] = None
    for (one, num_dims), names in alike.items():
        kept = _keys_kept(one, num_dims)
        for key in sorted(kept | {key for name, key in there if name in names}):
            for name in names:
                if (name, key) not in there:
                    why = "keeps it" if key in kept else "has it for other parameters here"
                    raise CheckpointError(
                        f"{folder / name / key}.pt is not there, and {type(one.optimizer).__name__} {why}. Export the "
                        "checkpoint again; with fp32.pt alone, for every parameter, the optimizer starts afresh"
                    )


def _keys_kept(one: ShardedOptimizer, num_dims: int) -> set[str]:
    """What the optimizer keeps for a parameter of so many dimensions, in whichever group. Nothing, if untried."""
    states = states_of_trial(one.local, num_dims)
    kept = [{str(key) for key, item in state.items() if item is not None and key != ""} for state in states]
    return set.intersection(*kept) if kept else set()


def _read(file: Path) -> Any:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{file} can't be read without running code from it, or is damaged: {error}") from error
    return content["param"] if isinstance(content, dict) and "param" in content else content
