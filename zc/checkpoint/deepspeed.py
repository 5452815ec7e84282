"""Loads DeepSpeed ZeRO-1/2 checkpoints, in the formats that DeepSpeed's own scripts export.

- Weights alone: ``zero_to_fp32.py`` writes a plain state dict, which `zc.load_state_dict` loads.
- Weights and Adam moments: ``ds_to_universal.py`` writes a folder ``zero/<parameter>/`` with ``fp32.pt``,
  ``exp_avg.pt``, ``exp_avg_sq.pt`` and ``step.pt``, which `load_universal` loads (arXiv:2406.18820).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zc.checkpoint.save_load import load_state_dict, synchronized
from zc.checkpoint.state import groups_of, others, owned, trained
from zc.checkpoint.target import refuse_other_model
from zc.errors import CheckpointError
from zc.optim.assignment import Optimizers


def load_universal(path: str | Path, model: nn.Module, optimizer: Optimizers) -> None:
    """Loads weights and optimizer states of a DeepSpeed universal checkpoint into a compiled model, under any plan.

    ``path`` contains the folder ``zero``. Frozen parameters, buffers and the optimizer's options are not in it and stay
    as they are. If every parameter has only ``fp32.pt``, the optimizer starts with fresh state. Every rank reads all of
    it.

    Raises:
        CheckpointError: a parameter is missing, extra or of another size, or reading a file would run code from it.
            Nothing is changed.
    """
    sharded_model, folder = synchronized(model, optimizer), Path(path) / "zero"
    if not folder.is_dir():
        raise CheckpointError(f"{path} is no universal checkpoint: it has no folder zero")
    mine = trained(sharded_model)
    names = {file.parent.relative_to(folder).as_posix() for file in folder.rglob("fp32.pt")}
    seconds = model.state_dict(keep_vars=True).keys()  # frozen parameters, and a tied weight's second name
    refuse_other_model(model, str(path), mine.keys() - names, names - mine.keys() - seconds)
    frozen = {name: own.now for name, own in owned(sharded_model).items() if own.optimizer is None}
    weights: dict[str, Any] = {**others(model, sharded_model), **frozen}
    states: dict[str, dict[str, Any]] = {}
    for name, own in mine.items():
        for file in sorted((folder / name).glob("*.pt")):
            value = _read(file)
            if file.stem == "step":
                states.setdefault(name, {})["step"] = torch.tensor(float(value))
                continue
            if not isinstance(value, Tensor) or value.numel() != own.slot.numel:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise CheckpointError(f"{file} holds {shape}, the parameter's shape is {own.slot.shape}")
            value = value.reshape(own.slot.shape)
            if file.stem == "fp32":
                weights[name] = value
            else:
                states.setdefault(name, {})[file.stem] = value
    state: dict[str, Any] = {"model": weights}
    if states:
        state["optimizer"] = {"state": states, "param_groups": groups_of(sharded_model.optimizers)}
    load_state_dict(model, optimizer, state)


def _read(file: Path) -> Any:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{file} can't be read without running code from it, or is damaged: {error}") from error
    return content["param"] if isinstance(content, dict) and "param" in content else content
