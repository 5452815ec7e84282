"""Says whether a function reads elements of its arguments, by what it does on the meta device.

A tensor on meta has a shape, strides and a dtype, but no elements. A function that reads none gives there what it gives
anywhere: numbers, names, or views of its arguments. Any other one raises there, or makes a tensor that is no view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zc import torch_private

_PLAIN = (
    type(None), bool, int, float, complex, str, type, type(NotImplemented),
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def viewed_by(func: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor | None] | None:
    """For each leaf of what ``func(*args, **kwargs)`` returns: the argument that it is a view of, or None for a leaf
    without memory. None in place of the list: the function may read or write elements of its tensors."""
    twins: dict[int, Tensor] = {}
    of_storage: dict[int, Tensor] = {}  # of a twin -> the argument

    def twin(tensor: Tensor) -> Tensor:
        if id(tensor) not in twins:
            shape, strides = tensor.shape, tensor.stride()
            made = torch.empty_strided(
                shape, strides, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
            )
            twins[id(tensor)], of_storage[torch_private.storage_number(made)] = made, tensor
        return twins[id(tensor)]

    with torch.inference_mode(False), torch_private.without_torch_function():  # tensors of that mode count no writes
        if any(leaf.layout is not torch.strided for leaf in _tensors(args, kwargs)):
            return None
        on_meta = torch_private.map_tensors(twin, (args, kwargs))
        before = [_state(made) for made in twins.values()]
        try:
            leaves = torch_private.tensors_in(func(*on_meta[0], **on_meta[1]))
        except Exception:  # noqa: BLE001  (whatever it is: the function does not work without elements)
            return None
        if [_state(made) for made in twins.values()] != before:
            return None
        viewed = [of_storage.get(torch_private.storage_number(x)) if type(x) is Tensor else None for x in leaves]
    is_known = [view is not None or isinstance(leaf, _PLAIN) for leaf, view in zip(leaves, viewed, strict=True)]
    return viewed if all(is_known) else None


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [leaf for leaf in torch_private.tensors_in((args, kwargs)) if isinstance(leaf, Tensor)]


def _state(tensor: Tensor) -> tuple[object, ...]:
    """It differs once the tensor has been written to, or has other memory."""
    return torch_private.version(tensor), torch_private.storage_number(tensor), tensor.shape, tensor.stride()
