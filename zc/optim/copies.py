"""Copies of what an optimizer refers to, so that a trial (`zc.optim.trials`) changes nothing of the caller's.

| object | becomes |
|---|---|
| tensors, containers, and objects that pickle can take apart and put together | a copy, however deep |
| the optimizer itself, its state, its parameters | those of the copied optimizer, as `Copies` is told |
| functions, classes, modules, what is of torch.distributed, locks, files, and what has a ``__del__`` | shared |
| a generator, another iterator that can't be copied, another optimizer | `UncopyableError`: a step would change it |

Pickle does the work, inside this process: it calls `Copies.persistent_id` with each object that it meets.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_SHARED = (type, FunctionType, ModuleType, nn.Module)
_OF_RANKS = ("torch.distributed", "torch._C._distributed")  # modules: process groups, meshes, stores


class UncopyableError(Exception):
    """A copy of the optimizer could change an object of the caller's."""


class Copies(pickle.Pickler):
    """Makes copies for ``twin``, a copy of ``optimizer``. ``known``: the copies that exist already, by id."""

    def __init__(self, optimizer: Optimizer, twin: Optimizer, known: Mapping[int, Any]) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL)
        self._optimizer, self._twin = optimizer, twin
        self.known = dict(known)  # `copy.deepcopy` adds to it
        self._met: list[tuple[Any, Any]] = []  # objects that pickle leaves alone, and what each becomes
        self._loads = _Loads(self._file, self._met)

    def copied(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Copies of the values. They refer to each other, and to earlier copies, as the values do."""
        result: dict[Any, Any] = {}
        for key, value in values.items():
            start = self._file.tell()
            try:
                self.dump(value)
                self._file.seek(start)
                result[key] = self._loads.load()
            except UncopyableError as error:
                raise UncopyableError(f"its {key} holds {error}") from None
            except Exception as error:
                raise UncopyableError(f"its {key} can't be copied ({type(error).__name__}: {error})") from error
        return result

    def persistent_id(self, item: Any) -> int | None:
        """A number for an object that pickle is to leave alone; None for one that it takes apart."""
        if id(item) in self.known:
            becomes = self.known[id(item)]
        elif type(item) in _PLAIN:
            return None
        elif isinstance(item, Tensor):
            becomes = self._copy_tensor(item)
        elif isinstance(item, Optimizer):
            if vars(item) is not vars(self._optimizer):
                raise UncopyableError(f"another optimizer, of {type(item).__name__}")
            becomes = self._twin
        elif _is_shared(item):
            becomes = item
        elif _can_deepcopy(item):
            becomes = copy.deepcopy(item, self.known)
        elif _can_reduce(item):
            return None
        elif hasattr(type(item), "__next__") and not isinstance(item, io.IOBase):
            raise UncopyableError(f"a {type(item).__name__}, which can't be copied")
        else:
            becomes = item
        self._met.append((item, becomes))  # also keeps its id from another object
        return len(self._met) - 1

    def reducer_override(self, item: Any) -> Any:
        """A method by its function: pickle would look for its name, which zc and schedulers replace."""
        return (MethodType, (item.__func__, item.__self__)) if isinstance(item, MethodType) else NotImplemented

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            own: Tensor = copy.deepcopy(tensor, self.known)  # views of one storage stay views of one
            return own
        self.known[id(tensor)] = cloned = tensor.clone()  # a result of autograd
        return cloned


class _Loads(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, met: list[tuple[Any, Any]]) -> None:
        super().__init__(file)
        self._met = met

    def persistent_load(self, number: Any) -> Any:
        return self._met[number][1]


def _is_shared(item: Any) -> bool:
    kind = type(item)
    if kind is BuiltinFunctionType:  # or a method of a list, say
        return item.__self__ is None or isinstance(item.__self__, ModuleType)
    return kind is object or isinstance(item, _SHARED) or kind.__module__.startswith(_OF_RANKS)


def _can_deepcopy(item: Any) -> bool:
    return hasattr(type(item), "__deepcopy__") and not hasattr(type(item), "__del__")


def _can_reduce(item: Any) -> bool:
    if isinstance(item, MethodType):
        return True
    if hasattr(type(item), "__del__"):  # a copy's would close what both share
        return False
    try:
        return not isinstance(item.__reduce_ex__(pickle.HIGHEST_PROTOCOL), str)  # a name: of something global
    except Exception:  # noqa: BLE001  (whatever it says)
        return False
