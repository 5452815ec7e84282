"""Models on the meta device (stage 3): they get a device, without bytes, and their values unit by unit.

`compile` gives each parameter its place in a shard. A value then comes from a checkpoint (`zc.load`), from a folder of
safetensors (`zc.load_pretrained`), or from the modules themselves (`zc.initialize`). No rank ever holds more than its
shards and one module.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from zc.engine.param_checks import poison
from zc.errors import PlanError
from zc.weights.param import without_bytes


def place(
    model: object, device: torch.device | str | None, stage: int, undo: contextlib.ExitStack
) -> tuple[list[str], list[tuple[str, nn.Module, str]]]:
    """Moves what ``model`` has on meta to ``device``: parameters without bytes, whole buffers without values.

    Each parameter stays the object that optimizers hold. Returns the parameters and buffers that have no value, as
    `zc.engine.param_checks.Unset` takes them. Raises PlanError if ``device`` is missing, or the stage keeps whole
    weights; nothing has changed then.
    """
    unset_params: list[str] = []
    unset_buffers: list[tuple[str, nn.Module, str]] = []
    if not isinstance(model, nn.Module):
        return unset_params, unset_buffers
    params = {name: param for name, param in model.named_parameters() if param.is_meta}
    where = _device(device) if device is not None else None
    for name, param in model.named_parameters() if where is not None else ():
        if not param.is_meta and param.device != where:
            raise PlanError(
                f"device={device!r} is for parameters on meta, and {name} is on {param.device}: leave device out, or "
                "make the whole model on meta"
            )
    if params and (where is None or stage != 3):
        first = next(iter(params))
        raise PlanError(
            f"parameter {first} is on the meta device: materialise the model before zc.compile, or give stage=3 and "
            f"device= (here stage={stage}, device={device!r}), and load or initialise the values afterwards"
        )
    if where is None:
        return unset_params, unset_buffers
    for name, param in params.items():
        empty = nn.Parameter(_empty(param, where), requires_grad=param.requires_grad)
        vars(empty).update(vars(param))
        torch.utils.swap_tensors(param, empty)  # type: ignore[no-untyped-call]
        undo.callback(torch.utils.swap_tensors, param, empty)
        unset_params.append(name)
    for prefix, module in model.named_modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                on_device = torch.empty_like(buffer, device=where)
                poison(on_device)
                setattr(module, key, on_device)
                undo.callback(setattr, module, key, buffer)
                unset_buffers.append((f"{prefix}.{key}".lstrip("."), module, key))
    return unset_params, unset_buffers


def _device(device: torch.device | str) -> torch.device:
    where = torch.device(device)
    if where.type not in ("cpu", "meta") and where.index is None:
        return torch.device(where.type, torch.accelerator.current_device_index())
    return where


def _empty(param: nn.Parameter, device: torch.device) -> torch.Tensor:
    whole = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device)
    return without_bytes(nn.Parameter(whole, requires_grad=False), param.dtype)
