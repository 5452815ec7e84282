"""The optimizer as the methods of its own class see it on this rank: a second object, whose groups have slices.

The caller's object keeps the model's parameters in its groups, as under DDP, and finds state under them. The methods of
its class run on a second object with the same ``__dict__``, so they read and write the caller's attributes; but the
second object has ``param_groups`` and ``state`` of its own. Nothing has to be restored if a method raises.

A class that stacks the gradients of a group fails on an empty group. If a trial shows this (`refuses_empty` of
`zc.optim.trials.Habits`), ``step`` sees only the groups of which this rank owns something that trains: it may leave out
the frozen ones itself. One that fails without gradients (`needs_a_gradient`) sees those of which this rank has one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, MethodType
from typing import Any

from torch.optim import Optimizer

from zc import torch_private

# methods that zc replaces on the caller's object (zc/optim/optimizer.py), beside those of its class alone
REPLACED = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")


class _OfClass:
    """A method of the class, where the shared ``__dict__`` has zc's in its place. It is a data descriptor, so it takes
    precedence over the ``__dict__``."""

    hooked = True  # for torch, which would wrap a step without it

    def __init__(self, name: str, function: Any) -> None:
        self._name, self._function = name, function

    def __get__(self, owner: Any, cls: Any = None) -> Any:
        return self if owner is None else MethodType(self._function, owner)

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self._name] = value


def _set_state(self: Any, state: dict[str, Any]) -> None:
    """``__setstate__``, by which torch's load_state_dict brings groups and state: they are the second object's."""
    outside = {key: vars(self)[key] for key in ("param_groups", "state") if key in vars(self)}
    for key in ("param_groups", "state"):
        if key in state:
            setattr(self, key, state[key])
    super(type(self), self).__setstate__(state)
    vars(self).update(outside)


def second_object(optimizer: Optimizer, zero_grad: Callable[..., None], others: Iterable[str] = ()) -> Any:
    """A second object with the ``__dict__`` of ``optimizer``, and with groups, state and step hooks of its own, all
    empty. ``zero_grad``: stands in place of torch's. ``others``: methods that zc may replace on the caller's object,
    beside `REPLACED`."""
    cls, own = type(optimizer), ("param_groups", "state", *torch_private.STEP_HOOKS)
    functions = {name: getattr(cls, name) for name in (*REPLACED, *others)}
    patched = vars(optimizer).get("zero_grad")
    if patched is not None:  # by the caller, so that a method of the class calls it, too
        functions["zero_grad"] = lambda _, *args, **kwargs: patched(*args, **kwargs)
    elif cls.zero_grad is Optimizer.zero_grad:
        functions["zero_grad"] = zero_grad
    body = {
        "__slots__": own,  # slots take precedence over the ``__dict__``
        "__setstate__": _set_state,
        **{name: _OfClass(name, function) for name, function in functions.items()},
    }
    second = with_zero_grad(optimizer, zero_grad, body)
    second.param_groups, second.state = [], {}
    for name in torch_private.STEP_HOOKS:
        setattr(second, name, OrderedDict())
    return second


def with_zero_grad(
    optimizer: Optimizer, zero_grad: Callable[..., None], body: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """``optimizer`` once more, with the same ``__dict__``. Where its class overrides zero_grad and calls that of its
    superclass, it finds ``zero_grad`` (a method) in place of torch's. ``body``: what its class has beside that."""
    cls = type(optimizer)
    of_torch = type(Optimizer.__name__, (Optimizer,), {"__module__": __name__, "zero_grad": zero_grad})
    own_body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **body}
    own_class: Any = type(cls)(cls.__name__, (cls, of_torch), own_body)  # type: ignore[misc]  # its metaclass
    again: Any = object.__new__(own_class)
    again.__dict__ = optimizer.__dict__
    return again


def class_of(optimizer: Optimizer) -> type[Optimizer]:
    """The caller's class, also of a second object."""
    cls = type(optimizer)
    return cls.__bases__[0] if vars(cls).get("__setstate__") is _set_state else cls
