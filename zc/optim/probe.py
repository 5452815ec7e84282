"""An optimizer tried on small data: does its update of a slice give what its update of the whole parameter gives?

Nobody can see from a class what its update reads. So a copy of the caller's optimizer, with each group's own options,
updates a small parameter as a whole, and other copies update its slices, as ranks do; then values and states are
compared. The caller's objects and random numbers stay as they were. (`torch.autograd.gradcheck` has the idea: a promise
about a function is tried on numbers before anybody relies on it.)
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc import torch_private
from zc.errors import PlanError

STEPS = 3
ROWS, COLUMNS = 54, 256  # three slices of at least 4,096 elements: what 8-bit optimizers leave alone is smaller
CLOSE = 1e-4  # of the largest change; beside it rounding: a vector's tail may be summed in another order


class Communicates(Exception):
    """An update started a collective of its own."""


Outcome = dict[str, Tensor]  # of one parameter: its change under "", and its states


def check_elementwise(optimizer: Optimizer, block: int, device: torch.device) -> None:
    """Raises PlanError where the update of a slice that begins and ends at multiples of ``block`` elements is not that
    of the whole parameter, in some group of ``optimizer``; nothing has changed."""
    name = type(optimizer).__name__
    _refuse_wrappers(optimizer, f"zc.elementwise({name})")
    columns = max(COLUMNS, block)
    cuts = [0, *(((k * ROWS // 3) * columns + columns // 3) // block * block for k in (1, 2)), ROWS * columns]
    slices = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
    value, grads = _data((ROWS, columns), device)
    for number, group in enumerate(optimizer.param_groups):
        where = f"zc.elementwise({name}): parameter group {number}"
        try:
            (whole,) = _updated(optimizer, group, [value], [grads], seed=1)
            (again,) = _updated(optimizer, group, [value], [grads], seed=2)
        except Communicates as error:
            raise PlanError(_of_its_own(name, error)) from None
        except Exception as error:
            raise PlanError(f"{where} can't be tried on small data: {type(error).__name__}: {error}") from error
        if _differs(whole, again) is not None:
            raise PlanError(f"{where} draws random numbers, so a slice's update is never the whole parameter's")
        found: list[Outcome] = []
        for part in slices:  # each alone, as on its rank
            try:
                flat = [grad.view(-1)[part] for grad in grads]
                found += _updated(optimizer, group, [value.view(-1)[part]], [flat], seed=1)
            except Exception as error:
                raise PlanError(
                    f"{where} is not elementwise: it updates a matrix {(ROWS, columns)} and refuses elements "
                    f"[{part.start}, {part.stop}) of it ({type(error).__name__}: {error}). Take the declaration away"
                ) from error
        joined = {key: torch.cat([f[key].view(-1) for f in found]) for key in whole if all(key in f for f in found)}
        key = _differs({k: v.view(-1) for k, v in whole.items() if k in joined}, joined)
        if key is not None:
            what = f"the state {key!r}" if key else "the new weights"
            at = (whole[key].view(-1) - joined[key]).abs().argmax()
            raise PlanError(
                f"{where} is not elementwise: {what} of a matrix {(ROWS, columns)} differ from those of its slices "
                f"(element {int(at)}: {whole[key].view(-1)[at]:g} and {joined[key][at]:g}"
                f"{f', with block={block}' if block > 1 else ''}). Take the declaration away, and whole parameters "
                "stay on one rank; or give the block in which elements share something"
            )


def check_independent(optimizer: Optimizer, device: torch.device) -> None:
    """Raises PlanError where the update of one parameter depends on the others, or on other ranks: each rank owns other
    parameters.

    A class that can't be tried (it wraps another optimizer, takes no small data, draws random numbers) passes.
    """
    if _wrapped(optimizer) is not None:
        return
    (first, first_grads), (second, second_grads) = (_data(shape, device) for shape in ((16, 24), (40, 8)))
    for group in optimizer.param_groups:
        try:
            joint = _updated(optimizer, group, [first, second], [first_grads, second_grads], seed=1)
            again = _updated(optimizer, group, [first, second], [first_grads, second_grads], seed=2)
            apart = _updated(optimizer, group, [first], [first_grads], seed=1)
            apart += _updated(optimizer, group, [second], [second_grads], seed=1)
        except Communicates as error:
            raise PlanError(_of_its_own(type(optimizer).__name__, error)) from None
        except Exception:  # noqa: BLE001  (it may want a closure, or other shapes: then nothing is known)
            return
        if any(_differs(a, b) is not None for a, b in zip(joint, again, strict=True)):
            return
        if any(_differs(a, b) is not None for a, b in zip(joint, apart, strict=True)):
            raise PlanError(
                f"the update of {type(optimizer).__name__} depends on all of its parameters together (a norm or an "
                "estimate over them), and ranks own different ones: it can't be shared between ranks. Clip by "
                "zc.clip_grad_norm_ in the loop and leave it out of the update, or use an optimizer that treats "
                "parameters one by one"
            )


def num_closure_calls(optimizer: Optimizer) -> int | None:
    """How often one ``step(closure)`` calls its closure; None where that can't be tried."""
    if _wrapped(optimizer) is not None:
        return None
    count = 0
    value, grads = _data((16, 24), torch.device("cpu"))

    def closure() -> Tensor:
        nonlocal count
        count += 1
        return torch.zeros(())

    group = next((g for g in optimizer.param_groups if g["params"]), optimizer.param_groups[0])
    try:
        _updated(optimizer, group, [value], [grads[:1]], seed=1, closure=closure)
    except Exception:  # noqa: BLE001  (nothing is known of it then)
        return None
    return count


def _of_its_own(name: str, error: Communicates) -> str:
    return (
        f"{name} exchanges tensors between ranks in its own step ({error}): under zc ranks update different "
        "parameters, and zc exchanges them. Use its variant for a single process"
    )


def _data(shape: tuple[int, int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A matrix and its gradients; the first third, the second and the last have other magnitudes, so that a norm over
    all is not the norm of a part."""
    generator = torch.Generator().manual_seed(20)
    numel = shape[0] * shape[1]
    scale = torch.tensor([1.0, 10.0, 0.1]).repeat_interleave(-(-numel // 3))[:numel].view(shape)
    value = 0.02 * torch.randn(shape, generator=generator) * scale.sqrt()
    grads = [torch.randn(shape, generator=generator) * scale for _ in range(STEPS)]
    return value.to(device), [grad.to(device) for grad in grads]


def _updated(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    seed: int,
    closure: Any = None,
) -> list[Outcome]:
    """What a copy of ``optimizer`` makes of ``values`` in ``len(grads[0])`` steps."""
    params = [nn.Parameter(value.clone()) for value in values]
    tried = torch_private.bare_copy(optimizer)
    options = {key: _copied(option) for key, option in group.items() if key != "params"}
    if "lr" in options and not float(options["lr"]) > 0:  # a warmup that begins at 0 would hide every difference
        rates = (group.get("initial_lr"), optimizer.defaults.get("lr"), 1e-3)
        options["lr"] = float(next(rate for rate in rates if rate is not None and float(rate) > 0))
    tried.param_groups = [{**options, "params": params}]
    made = optimizer.state.get(group["params"][0], {}) if group["params"] else {}  # by __init__ (Adagrad)
    for param in params if made else ():
        tried.state[param] = {key: _like(item, group["params"][0], param) for key, item in made.items()}
    devices = [params[0].device] if params[0].device.type == "cuda" else []

    def refuse(collective: str) -> None:
        raise Communicates(collective)

    with torch.random.fork_rng(devices=devices), torch_private.watching_collectives(refuse):
        torch.manual_seed(seed)
        for k in range(len(grads[0])):
            for param, own in zip(params, grads, strict=True):
                param.grad = own[k].clone()
            tried.step(*([closure] if closure is not None else []))
    return [_outcome(param, value, tried.state.get(param, {})) for param, value in zip(params, values, strict=True)]


def _outcome(param: nn.Parameter, before: Tensor, state: Mapping[str, Any]) -> Outcome:
    found = {"": (param.detach() - before).float()}
    for key, item in state.items():  # codes of a quantised state may differ by one where values differ by a rounding
        if type(item) is Tensor and item.is_floating_point() and item.numel() == param.numel():
            found[str(key)] = item.detach().float()
    return found


def _differs(one: Outcome, other: Outcome) -> str | None:
    """The first thing in which the two differ by more than rounding."""
    for key in one:
        a, b = one[key], other[key]
        largest = max(float(a.abs().max()), float(b.abs().max())) if a.numel() else 0.0
        rounding = 1e-6 * 0.1 if key == "" else 0.0  # a change of weights of at most 0.1, stored in fp32
        same = torch.isclose(a, b, rtol=0.0, atol=CLOSE * largest + rounding, equal_nan=True)
        if not bool(same.all()):
            return key
    return None


def _like(item: Any, like: Tensor, param: Tensor) -> Any:
    if not isinstance(item, Tensor):
        return copy.copy(item)
    if item.dim() == 0 or item.shape != like.shape:
        return item.clone()
    return torch.full_like(param, float(item.reshape(-1)[0]) if item.numel() else 0.0)


def _copied(option: Any) -> Any:
    return option.clone() if isinstance(option, Tensor) else copy.deepcopy(option)


def _wrapped(optimizer: Optimizer) -> str | None:
    """The attribute through which a copy of ``optimizer`` would reach another optimizer, or the caller's own
    parameters; None: there is none."""
    groups = {id(group) for group in optimizer.param_groups} | {id(optimizer.param_groups)}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults") or name.startswith("_optimizer_"):
            continue
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        for item in (value, *inside):
            if isinstance(item, (Optimizer, nn.Parameter, nn.Module)) or id(item) in groups:
                return name
    return None


def _refuse_wrappers(optimizer: Optimizer, what: str) -> None:
    name = _wrapped(optimizer)
    if name is not None:
        raise PlanError(
            f"{what}: its attribute {name} holds another optimizer or the parameters themselves, so it can't be tried "
            "on small data. Take the declaration away, and whole parameters stay on one rank"
        )
