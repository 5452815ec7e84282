"""Runs an optimizer on small matrices, and compares what comes out.

A copy of the caller's optimizer, with a group's own options, updates them. The caller's objects and random numbers stay
as they were, and what the optimizer compiles runs eagerly. (`torch.autograd.gradcheck` tries a promise about a function
in the same way.) `zc.optim.trials` has the questions that are asked so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc import torch_private
from zc.optim.local import class_of

STEPS = 3
CLOSE = 1e-4  # of the largest change; a vector's tail may be summed in another order, which rounds differently


class Communicates(Exception):
    """An update started a collective of its own."""


class Updated(NamedTuple):
    """One parameter after the updates: its change, and its state as the optimizer keeps it."""

    change: Tensor
    state: Mapping[str, Any]
    returned: Any = None  # by the last of the methods that were called
    grad: Tensor | None = None  # what is left of its last gradient

    def elementwise(self) -> dict[str, Tensor]:
        """The change under "", and each floating-point state of the parameter's size. Codes of a quantised state are
        left out: they may differ by one where values differ by a rounding."""
        states = {
            str(key): item.detach().float()
            for key, item in self.state.items()
            if type(item) is Tensor and item.is_floating_point() and item.numel() == self.change.numel()
        }
        return {"": self.change, **states}


def small_data(shape: tuple[int, int], device: torch.device, seed: int = 20) -> tuple[Tensor, list[Tensor]]:
    """A matrix and its gradients. Each third of the elements has another magnitude, so the norm of the whole is not
    that of a part."""
    generator = torch.Generator().manual_seed(seed)
    numel = shape[0] * shape[1]
    scale = torch.tensor([1.0, 10.0, 0.1]).repeat_interleave(-(-numel // 3))[:numel].view(shape)
    value = 0.02 * torch.randn(shape, generator=generator) * scale.sqrt()
    grads = [torch.randn(shape, generator=generator) * scale for _ in range(STEPS)]
    return value.to(device), [grad.to(device) for grad in grads]


def update_copy(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    seed: int,
    closure: Any = None,
    methods: Sequence[str] = (),
) -> list[Updated]:
    """What a copy of ``optimizer`` makes of ``values`` with ``grads``, in as many steps as each has gradients, and in
    calls of ``methods`` after them. State under strings counts as state of each parameter, under ""."""
    params = [nn.Parameter(value.clone()) for value in values]
    twin = torch_private.bare_copy(optimizer, class_of(optimizer))
    options = {key: _copy(option, optimizer) for key, option in group.items() if key != "params"}
    if "lr" in options and not float(options["lr"]) > 0:  # a warmup that begins at 0 would hide every difference
        rates = (group.get("initial_lr"), optimizer.defaults.get("lr"), 1e-3)
        options["lr"] = float(next(rate for rate in rates if rate is not None and float(rate) > 0))
    twin.param_groups = [{**options, "params": params}]
    first = optimizer.state.get(group["params"][0], {}) if group["params"] else {}  # by __init__ (Adagrad)
    twin.state.update({key: copy.deepcopy(item) for key, item in optimizer.state.items() if isinstance(key, str)})
    for param in params if first else ():
        twin.state[param] = {key: _like(key, item, group["params"][0], param) for key, item in first.items()}

    def refuse(collective: str) -> None:
        raise Communicates(collective)

    devices = [value.device for value in values[:1] if value.device.type != "cpu"]
    forked = torch.random.fork_rng([d.index for d in devices], device_type=devices[0].type if devices else "cuda")
    # Eager: Dynamo skips a frame for good that it first meets under a dispatch mode, here that of watching_collectives.
    eager = torch.compiler.set_stance("force_eager")
    with forked, eager, torch_private.watching_collectives(refuse):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would leave other devices' generators changed
        for device in devices:
            with torch.accelerator.device_index(device.index):
                torch.get_device_module(device).manual_seed(seed)
        for k in range(len(grads[0]) if grads else 1):
            for param, own in zip(params, grads, strict=True):
                param.grad = own[k].clone()
            twin.step(*([closure] if closure is not None else []))
        returned: Any = None
        for method in methods:
            returned = getattr(twin, method)()
    changes = [(param.detach() - value).float() for param, value in zip(params, values, strict=True)]
    others = {key: item for key, item in twin.state.items() if isinstance(key, str)}
    states = [{**twin.state.get(param, {}), **({"": others} if others else {})} for param in params]
    returned = None if returned is twin else returned
    left = [param.grad for param in params]
    return [Updated(change, state, returned, grad) for change, state, grad in zip(changes, states, left, strict=True)]


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], close: float = CLOSE) -> str | None:
    """The first common key under which the two differ by more than rounding."""
    for key in (key for key in one if key in other):
        if not _is_close(one[key], other[key], close, key == ""):
            return key
    return None


def _is_close(one: Tensor, other: Tensor, close: float, is_change: bool = False) -> bool:
    if one.shape != other.shape:
        return False
    largest = max(float(one.abs().max()), float(other.abs().max())) if one.numel() else 0.0
    rounding = 1e-6 * 0.1 if is_change else 0.0  # a change of weights of at most 0.1, stored in fp32
    return bool(torch.isclose(one, other, rtol=0.0, atol=close * largest + rounding, equal_nan=True).all())


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The items of nested dicts, lists and tuples, by their paths."""
    if isinstance(state, (Mapping, list, tuple)):
        for key, item in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from leaves(item, (*path, key))
    else:
        yield path, state


def same_state(one: Mapping[Any, Any], other: Mapping[Any, Any], close: float | None) -> bool:
    """Whether both have the same items. ``close``: None where values differ by the random numbers that were drawn."""
    if one.keys() != other.keys():
        return False
    for key, item in one.items():
        counterpart = other[key]
        if type(item) is not type(counterpart):
            return False
        if isinstance(item, Tensor):
            if item.shape != counterpart.shape or item.dtype != counterpart.dtype:
                return False
            if close is None or not item.is_floating_point():
                continue
            if not _is_close(item.detach().float(), counterpart.detach().float(), close):
                return False
        elif isinstance(item, (int, float)) and item != counterpart and close is not None:
            return False
    return True


def _like(key: str, item: Any, like: Tensor, param: Tensor) -> Any:
    """``param``'s state, made like that of the parameter ``like``."""
    if not isinstance(item, Tensor):
        return copy.copy(item)
    if key == "step" or item.shape != like.shape:  # the count of steps is 0-d, and so may a parameter be
        return item.clone()
    return torch.full_like(param, float(item.reshape(-1)[0]) if item.numel() else 0.0)


def _copy(option: Any, optimizer: Optimizer) -> Any:
    """Of a group's option. Parameters of ``optimizer`` in it become ones without elements: they may have no bytes."""
    if isinstance(option, Tensor):
        return option.clone()
    with torch_private.without_torch_function():
        params = [param for group in vars(optimizer)["param_groups"] for param in group["params"]]
        on_meta = {id(p): nn.Parameter(p.new_empty(p.shape, device="meta"), p.requires_grad) for p in params}
    return copy.deepcopy(option, on_meta)


def wrapped(optimizer: Optimizer) -> str | None:
    """The attribute through which a copy of ``optimizer`` would reach another optimizer, or the caller's own
    parameters; None if there is none."""
    of_caller = vars(optimizer)["param_groups"]
    groups = {id(group) for group in of_caller} | {id(of_caller)}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults") or name.startswith("_optimizer_"):
            continue
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        for item in (value, *inside):
            if isinstance(item, (Optimizer, nn.Parameter, nn.Module)) or id(item) in groups:
                return name
    return None
