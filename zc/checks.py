"""Checks that `zc.compile` makes before it changes anything, each with its own error."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from zc import torch_private
from zc.config import DTYPES
from zc.devices import has_streams
from zc.errors import PlanError, some

_WRAPPERS = {
    "DistributedDataParallel": "zc replaces it, so pass the module inside it, model.module",
    "FullyShardedDataParallel": "it shards the same parameters, so pass the plain module",
    "OptimizedModule": "zc compiles the module itself, so pass the one you gave to torch.compile, model._orig_mod",
    "_FabricModule": "pass the module that you gave to Fabric, model.module",
}


# the dtypes of frozen parameters in shards: every process group can gather these
_GATHERED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8)


def left_to_ranks(model: nn.Module) -> frozenset[str]:
    """The parameters and buffers that the program has told DistributedDataParallel to ignore
    (``_set_params_and_buffers_to_ignore_for_model``): each rank has its own."""
    told = torch_private.told_ddp(model)
    return frozenset(getattr(told, "names", told))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by fully qualified name, tied ones once, in order of registration."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def is_on_cpu(model: nn.Module, device: torch.device | str | None) -> bool:
    """Whether the model is on the CPU, or will be placed there by ``device``. True for objects that `check_module` will
    refuse."""
    if device is not None:
        return torch.device(device).type == "cpu"
    params = model.parameters() if isinstance(model, nn.Module) else iter(())
    return next((param.device.type == "cpu" for param in params), True)


def check_module(model: nn.Module) -> None:
    """Raises TypeError unless ``model`` is a module, PlanError if it is a wrapper that zc replaces."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for cls in type(model).__mro__:
        if cls.__name__ in _WRAPPERS:
            raise PlanError(f"model is wrapped in {type(model).__name__}: {_WRAPPERS[cls.__name__]}")


def check_model(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trainable parameters. Raises PlanError, naming one that can't be planned."""
    params = trainable(model)
    if not params:
        raise PlanError(
            f"{type(model).__name__} has no trainable parameter (requires_grad is False for all): "
            "call requires_grad_(True) on those that shall train"
        )
    check_shared(model, params)
    _check_tensors(params)
    _check_sparse(model)
    _check_devices(params)
    _check_storages(params)
    return params


def check_shared(model: nn.Module, params: Iterable[str]) -> None:
    """Raises PlanError for a parameter that trains on each rank by itself."""
    for name in sorted(left_to_ranks(model).intersection(params)):
        raise PlanError(
            f"parameter {name} is one that DistributedDataParallel was told to ignore "
            "(_ddp_params_and_buffers_to_ignore), so it would train on each rank by itself, and zc averages the "
            "gradients of all that train: take it out of that list, or freeze it and update it by hand. Frozen ones "
            "and buffers in that list stay each rank's own"
        )


def check_optimizers(model: nn.Module, params: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Raises PlanError unless each parameter is in exactly one optimizer, and the optimizers have no state yet."""
    for optimizer in optimizers:
        _check_optimizer(model, optimizer)
    _check_owners(params, optimizers)


def check_added(params: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Checks the parameters that `zc.recompile` adds to a plan on ``device``, as `check_model` does."""
    _check_tensors(params)
    _check_storages(params)
    _check_owners(params, optimizers)
    for name, param in params.items():
        if param.device != device:
            raise PlanError(
                f"parameters are on several devices: the plan's on {device}, {name} on {param.device}: move it"
            )


def _check_tensors(params: dict[str, nn.Parameter]) -> None:
    for name, param in params.items():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise PlanError(f"parameter {name} is not initialised yet: run one forward pass before zc.compile")
        if param.layout != torch.strided:
            raise PlanError(f"parameter {name} has layout {param.layout}, zc takes torch.strided: make it dense")
        if param.is_complex() or param.dtype not in DTYPES:
            valid = ", ".join(str(d) for d in DTYPES)
            so = "keep it as a real one of two columns, and torch.view_as_complex it in the forward"
            raise PlanError(
                f"parameter {name} has dtype {param.dtype}, zc takes {valid}: "
                f"{so if param.is_complex() else 'cast it to one of these, or freeze it with requires_grad_(False)'}"
            )
        if type(param.data) is not torch.Tensor:
            raise PlanError(
                f"parameter {name} is a {type(param.data).__name__}, zc takes plain tensors: give it one, or freeze it"
            )
        if torch_private.num_accumulate_hooks(param):
            raise PlanError(
                f"parameter {name} has a post-accumulate-grad hook, which would find no gradient: zc takes it to its "
                "bucket. Use register_hook for this rank's gradient, or read param.grad after the backward"
            )
        if param.grad is not None:
            raise PlanError(f"parameter {name} has a gradient already: call model.zero_grad() before zc.compile")


def _check_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise PlanError(
                f"{name + '.' if name else ''}weight gets sparse gradients, as its {type(module).__name__} was made "
                "with sparse=True, and zc reduces dense ones: make it with sparse=False"
            )


def _check_devices(params: dict[str, nn.Parameter]) -> None:
    first, device = next((name, p.device) for name, p in params.items())
    for name, param in params.items():
        if param.device.type == "meta":
            raise PlanError(f"parameter {name} is on the meta device: materialise the model before zc.compile")
        if param.device != device:
            raise PlanError(
                f"parameters are on several devices: {first} on {device}, {name} on {param.device}: move all to one"
            )
    if device.type != "cpu" and not has_streams(device):
        raise PlanError(
            f"parameters are on {device}, and torch has no streams of {device.type} that run beside each other: train "
            "on a CPU, or on a device that torch.accelerator lists and whose streams and process group it has"
        )


def _check_storages(params: dict[str, nn.Parameter]) -> None:
    """Raises PlanError for two parameters that share a part of a storage, because they get different places in
    flat_param. (A tied weight is one tensor under two names, which named_parameters lists once.)"""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, param in params.items():
        if param.numel() == 0:
            continue
        low = int(param.storage_offset()) * param.element_size()
        extent = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
        high = low + int(extent + 1) * param.element_size()
        storage = _storage_of(param)
        for other_low, other_high, other in spans.setdefault(storage, []):
            if low < other_high and other_low < high:
                raise PlanError(
                    f"parameters {other} and {name} share a part of one storage (bytes {other_low}:{other_high} and "
                    f"{low}:{high}); tie weights by assigning the same Parameter to both modules"
                )
        spans[storage].append((low, high, name))


def shardable(model: nn.Module, params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The frozen parameters of ``model`` that can lie in shards: plain dense ones on the device of ``params``, the
    trainable ones, that share their storage with no other parameter. The rest stays whole on every rank."""
    device, own = next(iter(params.values())).device, left_to_ranks(model)
    plain = {
        name: param
        for name, param in model.named_parameters()
        if name not in own and type(param.data) is torch.Tensor and param.layout == torch.strided
    }
    num_owners = Counter(_storage_of(param) for param in plain.values())
    return {
        name: param
        for name, param in plain.items()
        if name not in params and not param.requires_grad and type(param) is nn.Parameter
        if param.dtype in _GATHERED and param.numel() and param.device == device and num_owners[_storage_of(param)] == 1
    }


def _storage_of(param: nn.Parameter) -> int:
    return param.untyped_storage().data_ptr() or torch_private.storage_number(param)  # one without bytes has no address


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    of_model = {id(p) for p in model.parameters()}
    for k, param in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if id(param) not in of_model and param.requires_grad:
            raise PlanError(
                f"the optimizer holds a parameter of shape {tuple(param.shape)} (its number {k}) that the model lacks: "
                "make the optimizer from model.parameters(), after the model has been moved and cast"
            )
    by_param = [state for key, state in optimizer.state.items() if not isinstance(key, str)]
    if not all(map(_is_fresh, by_param)):
        raise PlanError(
            f"the {type(optimizer).__name__} has state for {len(by_param)} parameters already, of steps without "
            "zc (DDP's, say): give zc.compile a fresh optimizer, then load the state of the old one by "
            'zc.load_state_dict(model, optimizer, {"model": model.state_dict(), "optimizer": old.state_dict()})'
        )


def owners_of(params: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """By parameter name, the number of the first optimizer that has it."""
    numbers: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for param in group["params"]:
                numbers.setdefault(id(param), number)
    return {name: numbers[id(p)] for name, p in params.items() if id(p) in numbers}


def _check_owners(params: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    first, last = owners_of(params, optimizers), owners_of(params, optimizers[::-1])
    lacking = [name for name in params if name not in first]
    if lacking:
        who = "the optimizer lacks" if len(optimizers) == 1 else f"none of the {len(optimizers)} optimizers has"
        raise PlanError(
            f"{who} {len(lacking)} trainable parameter(s) of the model: {some(lacking)}; add them"
            f"{' to one of them' if len(optimizers) > 1 else ''}, or freeze them with requires_grad_(False). A second "
            "optimizer for them goes along as zc.compile(model, [first, second])"
        )
    for name in params:
        one, other = first[name], len(optimizers) - 1 - last[name]
        if one != other:
            kinds = [type(optimizers[k]).__name__ for k in (one, other)]
            raise PlanError(
                f"parameter {name} is in two optimizers, number {one} ({kinds[0]}) and number {other} ({kinds[1]}): "
                "both would update it. Leave it out of one of them"
            )


def _is_fresh(state: dict[str, Any]) -> bool:
    """Whether the state is empty, or as an optimizer's __init__ creates it (Adagrad's sums), with a step of 0."""
    return not state or ("step" in state and float(state["step"]) == 0.0)


def check_initialized() -> None:
    """Raises PlanError if torchrun started several ranks and there is no process group: each would train alone."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1 and not (dist.is_available() and dist.is_initialized()):
        raise PlanError(
            f"WORLD_SIZE is {world_size} (torchrun), but no process group is initialised: call "
            "torch.distributed.init_process_group() before zc.compile"
        )
