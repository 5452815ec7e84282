"""zc inside other people's loops. Nothing here is imported by zc itself; each module needs its framework.

docs/integrations.md has a script for each, and what is refused. Here stands what the modules share: `needed` and `seam`
import and check packages, which zc does not install; the rest is what a framework's checkpoint has of zc, a folder
beside the framework's files, or whole tensors in its one file.

A framework saves an optimizer's ``state_dict()`` from rank 0, which is a part. So zc's checkpoint goes into the same
folder, and what the framework writes of the optimizer is a `pointer` to it. It loads on any number of ranks::

    step_100/model.safetensors     by the framework
    step_100/optimizer.bin         {"zc": "the state is in the folder zc beside this file", ...}
    step_100/zc/3/                 by zc.save; the number is one more than before where a folder is written anew

Whole states are for frameworks that write one file from rank 0. They equal DDP's, so either can load the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zc.checkpoint.files import latest
from zc.checkpoint.save_load import load, load_state_dict, save
from zc.checkpoint.saving import channel_of
from zc.checkpoint.state import state_of, synchronized
from zc.checkpoint.stock_state import gather_parts
from zc.errors import CheckpointError, ZcError
from zc.optim.assignment import Optimizers
from zc.registry import COMPILED, full_state_dict, sharded


def needed(module: str, extra: str) -> Any:
    """Imports the module. Raises an ImportError that names the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(
            f"zc.integrations.{extra} needs {module}: pip install 'zero-compile[{extra}]'", name=module
        ) from error


def seam(cls: type, distribution: str, seen: str, names: Mapping[str, str]) -> None:
    """Raises ZcError if ``cls`` lacks a private method that zc overrides. Without this check, state or results would
    silently be lost. ``names`` gives each method's purpose; ``seen`` is the version that had all of them."""
    for name, purpose in names.items():
        if not isinstance(getattr(cls, name, None), Callable):  # type: ignore[arg-type]
            raise ZcError(
                f"{cls.__name__} of {distribution} {metadata.version(distribution)} has no {name}, through which zc "
                f"{purpose}: it was there in {distribution} {seen}. Install that version"
            )


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
    """Loads on all ranks. Returns False if a program without zc wrote the folder. Raises RankMismatchError if ranks
    gave other folders, or see another newest checkpoint there."""
    root = Path(folder) / name
    newest = latest(root.absolute())
    which = root if newest is None else root / newest.name
    sharded_model = COMPILED.get(model)
    if sharded_model is not None:  # a closed model may load what programs without zc wrote
        channel_of(sharded_model).same_call("the load of the newest checkpoint of a folder", which)
    if newest is not None:
        load(newest, model, optimizers)
    return newest is not None


class StatePointer:
    """Replaces ``state_dict`` and ``load_state_dict`` of a framework's wrapper around an optimizer.

    The first ``state_dict()`` after a `point_to`, which is the framework's own, returns the pointer. A caller's own
    ``state_dict()`` is the optimizer's. A pointer that is loaded changes nothing: `load_beside` has loaded the state,
    and `note_load` says so. Without it the load raises CheckpointError, since the state would be lost.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._folder: str | None = None
        self._loaded: str | None = None

    def take_place(self, wrapper: Any) -> None:
        """Redirects the framework's ``wrapper`` to this object."""
        wrapper.pointer = self
        wrapper.state_dict, wrapper.load_state_dict = self.state_dict, self.load_state_dict

    def point_to(self, name: str | None) -> None:
        """The next ``state_dict()`` says that the state is in the folder ``name``. None takes that back: on a rank that
        writes no file nothing asks for the state."""
        self._folder = name

    def note_load(self, name: str | None) -> None:
        """The state in the folder ``name`` has been loaded, and the next pointer to it may be. None: no state has."""
        self._loaded = name

    @property
    def is_loaded(self) -> bool:
        """Whether a `note_load` waits for its pointer."""
        return self._loaded is not None

    def state_dict(self) -> dict[str, Any]:
        if self._folder is None:
            return self._optimizer.state_dict()
        folder, self._folder = self._folder, None
        return {"zc": f"the state is in the folder {folder} beside this file, zc.load reads it", _KEY: folder}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if _KEY not in state:
            self._optimizer.load_state_dict(dict(state))
            return
        loaded, self._loaded = self._loaded, None
        if loaded != state[_KEY]:
            raise CheckpointError(
                f"the optimizer's state is in the folder {state[_KEY]} beside the file that was loaded, and "
                f"{'no such folder' if loaded is None else f'the folder {loaded}'} was read; the model may have its "
                "weights already. Copy the whole checkpoint with that folder, and prepare models in the order of the "
                "save; or call zc.load(folder, model, optimizer) with the newest number in it"
            )


def shards_weights(model: nn.Module) -> bool:
    """Whether ranks keep shards of weights of ``model``: all in stage 3, frozen ones with ``shard_frozen``."""
    sharded_model = COMPILED.get(model)
    return sharded_model is not None and bool(sharded_model.runtime.plan.sharded)


@contextmanager
def names_in_state(model: nn.Module) -> Iterator[None]:
    """Inside, ``state_dict()`` of a model of stage 3, and of each module in it, has parameters without bytes, for who
    reads its names, not its values, and maybe on one rank: before a ``load_state_dict``, or beside whole weights."""
    if not shards_weights(model):
        yield
        return
    modules = list(model.modules())
    for module in modules:
        vars(module)["state_dict"] = partial(module.state_dict, keep_vars=True)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["state_dict"]


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()``; on rank 0 with fp32 masters instead of narrower parameters. Every rank calls it. In stage
    3 the other ranks get an empty dict."""
    state: dict[str, Any] = full_state_dict(model) if shards_weights(model) else model.state_dict()
    sharded_model = COMPILED.get(model)
    if sharded_model is None or not any(bucket.has_master for bucket in sharded_model.runtime.plan.buckets):
        return state
    synchronized(model, sharded_model.container)
    shards = {name: {"master": shard} for name, shard in state_of(model, sharded_model)["model"].items()}
    masters: dict[str, Tensor] = {}
    for one in sharded_model.optimizers:
        whole = gather_parts(sharded_model, one, shards, "the fp32 masters")
        masters.update({name: values["master"] for name, values in whole.items()})
    names = _first_names(model)
    return {key: masters.get(names.get(key, ""), value) for key, value in state.items()}


def load_masters(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """The fp32 masters take what narrower parameters have lost of ``weights``, a state that ``model.load_state_dict``
    has loaded: with ``strict=False`` it may lack names and have others. Optimizer states, and masters that are not in
    it, stay, and so do gradients. Every rank calls it."""
    sharded_model = COMPILED.get(model)
    if sharded_model is None or not any(bucket.has_master for bucket in sharded_model.runtime.plan.buckets):
        return
    synchronized(model, sharded_model.container)
    state, names = state_of(model, sharded_model), _first_names(model)
    state["model"].update({names[name]: value for name, value in weights.items() if name in names})
    load_state_dict(model, sharded_model.container, state)


def _first_names(model: nn.Module) -> dict[str, str]:
    """The name that each parameter's master has, by all names: a tied weight has one master."""
    firsts = {id(param): name for name, param in model.named_parameters()}
    return {name: firsts[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}
