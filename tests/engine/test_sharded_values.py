"""Functions of aten on sharded values, each against the same function of plain tensors, cut by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zc.errors import ZcError
from zc.optim.sharded_value import Part, ShardedValue
from zc.planning.layout import Slot

aten = torch.ops.aten
SHAPE = (4, 3, 2, 2)


class Owner:
    """What elementwise functions ask of the ranks' shards."""

    num_changes = 0

    def __init__(self, param: Tensor) -> None:
        self.runtime = SimpleNamespace(params={"w": param}, name_now=str)

    def nonlinear(self, *_: object) -> None:
        """Not inside no_sync."""


def slot_of(param: Tensor) -> Slot:
    return Slot("w", tuple(param.shape), 0, None if param.is_contiguous() else param.stride())


def in_memory(tensor: Tensor) -> Tensor:
    """[n]: the elements of ``tensor`` in the order of its memory."""
    dims = sorted(range(tensor.dim()), key=lambda d: -tensor.stride(d))
    return tensor.permute(dims).reshape(-1)


def value_of(owner: Any, whole: Tensor, elements: slice) -> ShardedValue:
    part = Part(slot_of(owner.runtime.params["w"]), elements, False)
    return ShardedValue(owner, part, in_memory(whole)[elements].clone())


def overloads() -> list[Any]:
    """All that torch tags as elementwise, whatever the process has used so far; random ones draw whole tensors."""
    names = {name.removeprefix("aten::").split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    packets = [getattr(aten, name) for name in sorted(names) if hasattr(aten, name)]
    found = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [f for f in found if torch.Tag.pointwise in f.tags and torch.Tag.nondeterministic_seeded not in f.tags]


def arguments(func: Any, make: Any) -> list[Any] | None:
    """Arguments for a function, or None where it takes something else. ``make(k)``: its k-th tensor."""
    args: list[Any] = []
    num_tensors = 0
    for arg in func._schema.arguments:
        kind = str(arg.type)
        if arg.is_out:
            return None
        if kind == "Tensor":
            args.append(make(num_tensors))
            num_tensors += 1
        elif arg.kwarg_only or arg.has_default_value():
            break
        elif kind in ("number", "float"):
            args.append(0.5)
        elif kind == "int":
            args.append(1)
        else:
            return None
    return args


def assert_cut(func: Any, result: Any, expected: Any, elements: slice, memory_format: torch.memory_format) -> None:
    results, wholes = (result, expected) if isinstance(expected, tuple) else ((result,), (expected,))
    for mine, whole in zip(results, wholes, strict=True):
        assert isinstance(mine, ShardedValue) and (mine.shape, mine.dtype) == (whole.shape, whole.dtype), func
        own = in_memory(whole.contiguous(memory_format=memory_format))[elements]
        torch.testing.assert_close(mine.local, own, equal_nan=True, rtol=1e-6, atol=1e-6, msg=lambda m: f"{func}: {m}")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64])
def test_every_elementwise_function_of_aten(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    """With values alone, and with a whole tensor, a whole row and a number among them; in place and not."""
    param = nn.Parameter(torch.rand(SHAPE).to(memory_format=memory_format))
    owner: Any = Owner(param)
    torch.manual_seed(0)
    wholes = [(torch.rand(SHAPE) * 3 - 0.5).to(dtype).to(memory_format=memory_format) for _ in range(3)]
    others = [wholes[0], wholes[1][:1], torch.tensor(2.0).to(dtype)]
    num_compared = 0
    for func in overloads():
        for other in (None, *others):

            def plain(k: int, other: Tensor | None = other) -> Tensor:
                return (wholes[k] if k == 0 or other is None else other).clone()

            args = arguments(func, plain)
            if args is None or (other is not None and sum(isinstance(a, Tensor) for a in args) < 2):
                continue
            try:
                expected = func(*args)
            except (RuntimeError, NotImplementedError):
                continue  # not of this dtype
            if not isinstance(expected, Tensor | tuple):
                continue  # equal
            for elements in (slice(0, 17), slice(17, 17), slice(17, 48)):

                def cut(k: int, other: Tensor | None = other, elements: slice = elements) -> Tensor:
                    return value_of(owner, wholes[k], elements) if k == 0 or other is None else other.clone()

                result = func(*(arguments(func, cut) or ()))
                assert_cut(func, result, expected, elements, memory_format)
            num_compared += 1
    assert num_compared > (300 if dtype == torch.float32 else 100), num_compared


def test_a_state_in_another_order_than_its_parameter_is_written() -> None:
    owner: Any = Owner(nn.Parameter(torch.rand(SHAPE).to(memory_format=torch.channels_last)))
    state, other = torch.rand(SHAPE), torch.rand(SHAPE)
    expected = state * 2 + other
    value = ShardedValue(owner, Part(slot_of(owner.runtime.params["w"]), slice(0, 48), False), state)
    value.mul_(2).add_(other)
    torch.testing.assert_close(state, expected)


def test_what_does_not_broadcast_is_refused() -> None:
    owner: Any = Owner(nn.Parameter(torch.rand(1, 4)))
    value = value_of(owner, torch.rand(1, 4), slice(0, 2))
    with pytest.raises(ZcError, match="does not broadcast"):
        value * torch.rand(4, 4)
    for call in (lambda: value[0], lambda: value.t(), lambda: value @ torch.rand(4, 1), lambda: value.view(-1)):
        with pytest.raises(ZcError, match="full_tensor"):
            call()
