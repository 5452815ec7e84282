"""zc's checkpoint beside a framework's own files: masters and optimizer state, for any number of ranks.

A framework saves an optimizer's ``state_dict()`` from rank 0, which is a part. So zc's checkpoint goes into the same
folder, and what the framework writes of the optimizer is a `pointer` to it::

    step_100/model.safetensors     by the framework
    step_100/optimizer.bin         {"zc": "the state is in the folder zc beside this file", ...}
    step_100/zc/3/                 by zc.save; the number is one more than before where a folder is written anew
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zc.checkpoint.folders import latest
from zc.checkpoint.save_load import load, save
from zc.optim.assignment import Optimizers
from zc.registry import sharded

_KEY = "zc_folder"


def save_beside(folder: str | Path, name: str, model: nn.Module, optimizers: Optimizers) -> None:
    """Saves on all ranks. An earlier checkpoint is removed when the new one is complete."""
    root = Path(folder).absolute() / name
    last = latest(root)
    number = int(last.name) + 1 if last is not None else 0
    # a rank may see the folder late, on a shared file system
    number = max(sharded(model).runtime.group.gather_objects(number, f"naming a checkpoint in {root}"))
    save(root / str(number), model, optimizers, keep=1)


def load_beside(folder: str | Path, name: str, model: nn.Module, optimizers: Optimizers) -> bool:
    """Loads on all ranks. Returns False if a program without zc wrote the folder."""
    newest = latest(Path(folder).absolute() / name)
    if newest is not None:
        load(newest, model, optimizers)
    return newest is not None


class StatePointer:
    """Replaces ``state_dict`` and ``load_state_dict`` of a framework's wrapper around an optimizer.

    The first ``state_dict()`` after a `point_to`, which is the framework's own, returns the pointer. A caller's own
    ``state_dict()`` is the optimizer's. A pointer that is loaded changes nothing: `load_beside` has loaded the state.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._folder: str | None = None

    def take_place(self, wrapper: Any) -> None:
        """Redirects the framework's ``wrapper`` to this object."""
        wrapper.pointer = self
        wrapper.state_dict, wrapper.load_state_dict = self.state_dict, self.load_state_dict

    def point_to(self, name: str) -> None:
        """The next ``state_dict()`` says that the state is in the folder ``name``."""
        self._folder = name

    def stop(self) -> None:
        """Takes a `point_to` back: on a rank that writes no file nothing asks for the state."""
        self._folder = None

    def state_dict(self) -> dict[str, Any]:
        if self._folder is None:
            return self._optimizer.state_dict()
        folder, self._folder = self._folder, None
        return {"zc": f"the state is in the folder {folder} beside this file, zc.load reads it", _KEY: folder}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if _KEY not in state:
            self._optimizer.load_state_dict(dict(state))


