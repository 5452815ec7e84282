"""Checks of a model's parameters while it trains: none is replaced under its name, each has a value, and the caller
does only what is allowed to ``param.grad`` and to the hooks on parameters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from zc import torch_private
from zc.errors import UncoveredGradientError, ZcError, not_its_own
from zc.planning.plan import Plan

Places = Sequence[tuple[dict[str, Any], str, nn.Parameter]]  # of parameters: a module's dict, the key in it, its value

BlockPlaces = tuple[weakref.ref[nn.Module], list[tuple[dict[str, Any], str, nn.Parameter]]]  # of one block


_Function = Callable[..., Any]
_ASKED: dict[type, tuple[_Function, frozenset[Any]]] = {}  # of each class below


class AskingParameter(nn.Parameter):
    """A parameter while functions that read it go through ``ask``, with the function, its positional and its keyword
    arguments; those in ``reads_nothing`` don't. Nothing of this is an attribute: ``dir(param)`` is a plain one's."""

    def __init_subclass__(cls, ask: _Function, reads_nothing: frozenset[Any]) -> None:
        _ASKED[cls] = ask, reads_nothing

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Parameter:  # type: ignore[misc]
        """``type(param)(...)`` is meant to make an ordinary parameter."""
        return nn.Parameter(*args, **kwargs)

    @classmethod
    @torch_private.not_compiled_alone
    def __torch_function__(cls, func: _Function, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        ask, reads_nothing = _ASKED[cls]
        if func in reads_nothing:
            with torch_private.without_torch_function():
                return func(*args, **(kwargs or {}))
        return ask(func, args, kwargs or {})


def refuse_in_step(what: Callable[[], str]) -> None:
    """Raises ZcError inside the step of a class that zc does not know, in its thread: the model has its new values when
    that has ended."""
    thread, optimizer = ParamOfModel.stepping or (None, None)
    if optimizer is not None and thread == threading.get_ident():
        raise ZcError(
            f"{type(optimizer).__name__}.step() met {what()}: the model has its new values when the step has ended, "
            f"and {not_its_own(optimizer)}"
        )


def _ask_in_step(func: _Function, args: Any, kwargs: Any) -> Any:
    tensors = torch_private.tensors_in((args, kwargs))
    shapes = (tuple(each.shape) for each in tensors if isinstance(each, ParamOfModel))
    refuse_in_step(lambda: f"a parameter of the model, of shape {next(shapes)}")
    with torch_private.without_torch_function():
        return func(*args, **kwargs)


class ParamOfModel(
    AskingParameter,
    ask=_ask_in_step,
    reads_nothing=torch_private.NO_VALUE | torch_private.hook_functions() | {Tensor.__hash__},
):
    """The class of the model's parameters while the step of a class that zc does not know runs. It updates slices: what
    the model has is old, or in parts new, until the step has ended. Other threads read it as under DDP."""

    stepping: ClassVar[tuple[int, Optimizer] | None] = None  # the thread, and the second object whose step runs there


class Names:
    """A model's parameters by name, as `compile` or `recompile` has found them. The model keeps this object, since it
    refers to the model's modules; a runtime that did so could keep the model alive. ``placed``: those in buckets."""

    def __init__(self, model: nn.Module, placed: Mapping[str, nn.Parameter]) -> None:
        self._model, self._placed = weakref.ref(model), placed
        self._params = dict(model.named_parameters(remove_duplicate=False))
        self._remember(model)

    def _remember(self, model: nn.Module) -> None:
        self._dicts = torch_private.registered_in(model)
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))

    def now(self) -> dict[int, str]:
        """The first name that each of the model's parameters has now, by its id."""
        model = self._model()
        assert model is not None, "the model keeps this object"
        return {id(param): name for name, param in model.named_parameters()}

    def check(self) -> None:
        """Raises ZcError for a parameter that was replaced. Called at every boundary, so that what has not changed
        costs some 30 ns for a module or parameter: the interpreter runs no code of ours for it."""
        if all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._values)):
            return
        model = self._model()
        assert model is not None, "the model keeps this object"
        placed = {id(param) for param in self._placed.values()}
        for name, now in model.named_parameters(remove_duplicate=False):
            before = self._params.get(name, now)
            is_lost = id(before) in placed or (now.requires_grad and id(now) not in placed)
            if before is not now and is_lost:
                what = (
                    "the plan has it under another name. Call"
                    if id(now) in placed
                    else "it has no place in a bucket (a new layer or a resized embedding, "
                    "load_state_dict(assign=True), or a tensor set by hand). Give it to an optimizer by "
                    "add_param_group, and call"
                )
                raise ZcError(
                    f"parameter {name} is another one now: it was {_text(before)}, and is {_text(now)}; {what} "
                    "zc.recompile(model) on all ranks: the old one's place and optimizer state go. Or put the old one "
                    "back"
                )
        self._remember(model)  # modules came, went or moved


def _text(param: nn.Parameter) -> str:
    return f"{tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ' without a gradient'}"


class MetaBuffer(NamedTuple):
    """A buffer that stood on meta, by its place, and the version of the memory that it got."""

    name: str
    module: weakref.ref[nn.Module]
    key: str
    tensor: weakref.ref[Tensor]
    version: int

    def unset(self) -> Tensor | None:
        """The buffer, while nobody has written to it or put another one in its place."""
        module, tensor = self.module(), self.tensor()
        is_there = module is not None and tensor is not None and getattr(module, self.key, None) is tensor
        return tensor if is_there and tensor is not None and torch_private.version(tensor) == self.version else None


def poison(values: Tensor) -> None:
    """NaN where the dtype has it: memory that has no value yet."""
    if values.is_floating_point():
        values.fill_(float("nan"))


class Unset:
    """``params``: names, each until it is given a value. ``buffers``: (name, module, name in the module)."""

    def __init__(self, params: Iterable[str] = (), buffers: Iterable[tuple[str, nn.Module, str]] = ()) -> None:
        self.params = set(params)
        self.buffers: list[MetaBuffer] = []
        for name, module, key in buffers:
            buffer = module.get_buffer(key)
            version = torch_private.version(buffer)
            self.buffers.append(MetaBuffer(name, weakref.ref(module), key, weakref.ref(buffer), version))

    def buffers_of(self, module: nn.Module) -> list[Tensor]:
        """Those of ``module`` itself that have no value."""
        own = [each.unset() for each in self.buffers if each.module() is module]
        return [buffer for buffer in own if buffer is not None]

    def check(self, what: str) -> None:
        """Raises ZcError, which names what has no value, if there is something. ``what`` is about to read all."""
        if not self.params and not self.buffers:
            return
        self.buffers = [each for each in self.buffers if each.unset() is not None]
        for kind, names in (("parameter", sorted(self.params)), ("buffer", [each.name for each in self.buffers])):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                direct = ", or write to it in place" if kind == "buffer" else ""
                raise ZcError(
                    f"{what}: {len(names)} {kind}(s) of this model, which was made on meta, have no value yet "
                    f"({', '.join(names[:3])}{more}). Load them by zc.load_pretrained or zc.load, call "
                    f"zc.initialize(model){direct}, on all ranks"
                )


def is_shared(tensor: Tensor) -> bool:
    """Whether other processes may have this memory too (share_memory, a tensor that came through a queue)."""
    return tensor.device.type == "cpu" and bool(tensor.is_shared())  # type: ignore[no-untyped-call, unused-ignore]


def refuse_accumulate_hooks(params: Mapping[str, nn.Parameter], name_now: Callable[[str], str]) -> None:
    """Raises ZcError for a post-accumulate-grad hook that is not ours."""
    with torch_private.without_torch_function():  # faster: parameters may be watched
        counts = torch_private.num_accumulate_hooks(params.values())
    for name, count in zip(params, counts, strict=True):
        if count > 1:  # one is ours
            raise ZcError(
                f"{name_now(name)} has a post-accumulate-grad hook: it would find no gradient, since zc has moved it "
                "to its bucket. Use register_hook for this rank's gradient, or read param.grad after the backward"
            )


def check(
    assigned: Mapping[str, nn.Parameter],
    frozen: Mapping[str, nn.Parameter],
    is_value: Callable[[str, Tensor], bool],
    name_now: Callable[[str], str],
) -> None:
    """Raises UncoveredGradientError if a ``.grad`` that zc has not set (``assigned``: by name, the parameters that have
    one) is no sharded value of this parameter, and ZcError if a frozen parameter requires a gradient."""
    for name, param in assigned.items():
        if (grad := param.grad) is not None and not is_value(name, grad):
            raise UncoveredGradientError(
                f"{name_now(name)}.grad holds a full gradient that did not come through a backward of this model; zc "
                "trains from its own shards. Don't assign such a param.grad by hand: param.grad.copy_(whole) writes a "
                "tensor that all ranks have, torch.autograd.backward(parameters, gradients) adds gradients as a "
                "backward does, and values that were made of param.grad, such as param.grad * 0.5, can be assigned"
            )
    for name, param in frozen.items():
        if param.requires_grad:
            raise ZcError(
                f"parameter {name} requires a gradient now, and did not when the model was compiled, so no bucket has "
                "a place for it. Call zc.recompile(model) after requires_grad_; all other parameters keep their state"
            )


class Changes(NamedTuple):
    """What the caller has done to ``param.grad`` without calling zc, by bucket and slot."""

    cleared: list[tuple[int, int]]  # set to None by hand, or by torch's own model.zero_grad()
    assigned: list[tuple[int, int]]  # set to another tensor


def changes(
    plan: Plan, flags: Sequence[Sequence[bool]], params: Mapping[str, nn.Parameter], grads: Mapping[str, Tensor]
) -> Changes:
    """``flags``: which parameters have a gradient. ``grads``: the ``.grad`` of each that zc has set."""
    found = Changes([], [])
    with torch_private.without_torch_function():  # faster: parameters may be watched
        for bucket, of_bucket in zip(plan.buckets, flags, strict=True):
            for k, slot in enumerate(bucket.slots):
                if slot.is_left:
                    continue
                grad = params[slot.name].grad
                if grad is None and of_bucket[k]:
                    found.cleared.append((bucket.index, k))
                elif grad is not None and grad is not grads[slot.name]:
                    found.assigned.append((bucket.index, k))
    return found


def grads_differ(plan: Plan, own: Sequence[Sequence[bool]], of_any: Sequence[Sequence[bool]]) -> str:
    """The error for a loop over ``param.grad`` if ranks have one on different parameters. ``own``: whether this rank
    has it; ``of_any``: whether any rank does."""
    lacking = [
        slot.name
        for bucket, here, there in zip(plan.buckets, own, of_any, strict=True)
        for slot, is_here, is_anywhere in zip(bucket.slots, here, there, strict=True)
        if is_anywhere and not is_here
    ]
    where = f"here {', '.join(lacking[:5])} has none" if lacking else "here all have one, on another rank some lack it"
    return (
        "ranks have a param.grad on different parameters, so clipping or a norm over them would differ from rank to "
        f"rank: {where}. The last backward before it must not be inside zc.no_sync, and all ranks or none must have "
        "cleared gradients; or call zc.clip_grad_norm_"
    )


def refuse_compiled_autograd() -> None:
    """Compiled autograd traces through the backward's side effects and would drop them, so it is refused, not
    ignored."""
    if torch_private.compiled_autograd_is_on():
        raise ZcError(
            "compiled autograd is on: it bypasses the compiled backward's schedule. Turn it off "
            "(torch._dynamo.config.compiled_autograd = False); zc compiles the backward itself"
        )
