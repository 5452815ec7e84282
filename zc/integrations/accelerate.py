"""Accelerate: ``model, optimizer, loader = prepare(accelerator, model, optimizer, loader)``; the loop stays as it is.

Through public names of accelerate 1.15 alone: ``prepare_model(evaluation_mode=True)`` places and autocasts the model
without a DDP around it, hooks of ``save_state`` and ``load_state`` write and read zc's checkpoint beside the rest.
``accelerator.no_sync`` and ``accumulate`` ask a prepared model for its ``no_sync``, which a compiled model has.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zc.api import compile as zc_compile
from zc.checkpoint.save_load import load_state_dict
from zc.errors import CheckpointError, PlanError
from zc.integrations import StatePointer, load_beside, needed, save_beside, shards_weights
from zc.optim.assignment import Container, given_in, like_container
from zc.registry import full_state_dict, sharded

accelerate = needed("accelerate", "accelerate")
constants = needed("accelerate.utils.constants", "accelerate")

_OTHERS = {
    "FSDP": "FullyShardedDataParallel",
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "torch_xla",
    "TP": "tensor parallelism",
}


def prepare(accelerator: Any, model: nn.Module, optimizer: Container, *rest: Any, **options: Any) -> Any:
    """Returns ``(model, optimizer, *rest)`` as ``accelerator.prepare`` does, with zc instead of DDP.

    Args:
        optimizer: one made from ``model.parameters()``, or a list, tuple or dict of several. ``accelerator.prepare``
            takes its arguments in any order; here the model comes first and the optimizer second.
        rest: data loaders and schedulers, for ``accelerator.prepare``; a frozen module stays without DDP.
        options: options of `zc.compile`. ``broadcast_buffers`` defaults to DistributedDataParallelKwargs'.

    Raises:
        PlanError: zc can't be combined with a feature of the accelerator or the model; nothing has changed.
    """
    _check(accelerator, model, optimizer)
    if accelerator.ddp_handler is not None:
        options.setdefault("broadcast_buffers", accelerator.ddp_handler.broadcast_buffers)
    if accelerator.device_placement:
        model.to(accelerator.device)
    zc_compile(model, optimizer, **options)
    sharded(model).at_close.append(_unmark)
    accelerator.prepare_model(model, evaluation_mode=True)  # last: it notes and marks the model, and autocasts forward
    pointers, wrapped = [], []
    for one in given_in(optimizer):
        pointers.append(StatePointer(one))
        wrapped.append(accelerator.prepare(one, device_placement=[False]))  # zc has placed its state
        pointers[-1].take_place(wrapped[-1])
    _register_hooks(accelerator, model, optimizer, pointers)
    prepared = like_container(optimizer, wrapped)
    if not rest:
        return model, prepared
    return (model, prepared, *(_prepare_rest(accelerator, one) for one in rest))


def _unmark(model: nn.Module) -> None:
    """Accelerate marks what it has prepared, and by the mark would leave DDP out of the plain module, too."""
    vars(model).pop("_is_accelerate_prepared", None)


def _prepare_rest(accelerator: Any, one: Any) -> Any:
    """``accelerator.prepare(one)``, without DDP around a module that has no trainable parameter (a teacher)."""
    if isinstance(one, nn.Module) and not any(param.requires_grad for param in one.parameters()):
        return accelerator.prepare_model(one, evaluation_mode=True)
    return accelerator.prepare(one)


def _check(accelerator: Any, model: nn.Module, optimizer: Container) -> None:
    if not isinstance(model, nn.Module) or isinstance(optimizer, nn.Module):
        raise PlanError(
            "zc.integrations.accelerate.prepare takes (accelerator, model, optimizer, *rest) in this order, and was "
            f"given a {type(model).__name__} as model and a {type(optimizer).__name__} as optimizer"
        )
    kind = accelerator.distributed_type.value
    if kind in _OTHERS:
        raise PlanError(
            f"the Accelerator runs {_OTHERS[kind]} ({kind}), which distributes the model itself: use zc without it, or "
            "it without zc"
        )
    dims = getattr(accelerator, "parallelism_config", None)
    for name in ("tp", "cp", "sp", "dp_shard"):
        if dims is not None and getattr(dims, f"{name}_enabled", False):
            raise PlanError(f"the Accelerator has a ParallelismConfig with {name}: zc takes data parallel ranks alone")
    if accelerator.mixed_precision == "fp8":
        raise PlanError("the Accelerator has mixed_precision='fp8', which replaces layers: zc takes 'fp16' and 'bf16'")
    backend = accelerator.state.dynamo_plugin.backend.value
    if backend != "NO":
        raise PlanError(
            f"the Accelerator compiles models itself (dynamo backend {backend}): leave that out, zc compiles the model"
        )
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if hook is not None and hook.value != "no":
        raise PlanError(
            f"DistributedDataParallelKwargs has comm_hook={hook.value}, and zc reduces gradients itself: leave it out; "
            "reduce_dtype=torch.bfloat16 halves what is sent"
        )
    for one in [optimizer] if isinstance(optimizer, Optimizer) else given_in(optimizer):
        if isinstance(one, accelerate.optimizer.AcceleratedOptimizer):
            raise PlanError(
                "the optimizer was given to accelerator.prepare before: give zc.integrations.accelerate.prepare the "
                "optimizer itself, it calls accelerator.prepare"
            )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise PlanError(
            "the model was given to accelerator.prepare before, and is wrapped in DistributedDataParallel: give "
            "zc.integrations.accelerate.prepare the module itself"
        )


def _weights_in(folder: Path, number: int) -> Any:
    """What ``save_state`` of plain Accelerate has written of its model with this number."""
    suffix = f"_{number}" if number else ""
    names = (f"{constants.SAFE_MODEL_NAME}{suffix}.safetensors", f"{constants.MODEL_NAME}{suffix}.bin")
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{folder} has neither a folder that zc wrote nor {names[0]} or {names[1]}")
    return accelerate.utils.load_state_dict(str(file))


class _Loaded:
    """Stands in ``load_state`` for a model that has its weights already. (safetensors' ``load_model`` and accelerate
    call nothing else of a model.)"""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], *_: Any, **__: Any) -> tuple[list[str], list[str]]:
        return [], []


_LOADED = _Loaded()


def _register_hooks(accelerator: Any, model: nn.Module, optimizer: Container, pointers: list[StatePointer]) -> None:
    """Registers hooks for ``save_state`` and ``load_state``. The accelerator keeps them as long as it lives, and the
    model may be dropped before (``free_memory``)."""
    model_ref = weakref.ref(model)

    def name_in(models: list[Any]) -> str | None:
        own_model = model_ref()
        numbers = [k for k, one in enumerate(models) if one is own_model]
        return ("zc" if numbers[0] == 0 else f"zc_{numbers[0]}") if numbers else None

    def save_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        model, name = model_ref(), name_in(models)
        if model is not None and name is not None:
            save_beside(output_dir, name, model, optimizer)
            for pointer in pointers:
                pointer.point_to(name)

    def read_folder(models: list[Any], input_dir: str) -> None:
        model, name = model_ref(), name_in(models)
        is_loaded = model is not None and name is not None and load_beside(input_dir, name, model, optimizer)
        for pointer in pointers:
            pointer.note_load(name if is_loaded else None)

    def load_hook(models: list[Any], input_dir: str) -> None:
        # accelerate then loads equal weights in the parameters' dtype, which leaves the masters as they are
        model = model_ref()
        if model is None or name_in(models) is None or not shards_weights(model):
            return
        if not all(pointer.is_loaded for pointer in pointers):  # a program without zc wrote the folder
            load_state_dict(model, optimizer, {"model": _weights_in(Path(input_dir), models.index(model))})
        # the others keep their numbers, by which accelerate finds their files
        models[models.index(model)] = _LOADED
        while models and models[-1] is _LOADED:
            models.pop()

    plain = accelerator.get_state_dict

    def get_state_dict(module: nn.Module, unwrap: bool = True) -> Any:
        """Of stage 3 the whole weights on rank 0, and nothing on the others; all ranks call it, as under FSDP."""
        return full_state_dict(module) if shards_weights(module) else plain(module, unwrap)

    accelerator.get_state_dict = get_state_dict
    # before hooks of the program, which may take models out of their list, as those of diffusers' scripts do
    _put_first(accelerator.register_save_state_pre_hook(save_hook))
    _put_first(accelerator.register_load_state_pre_hook(read_folder))
    accelerator.register_load_state_pre_hook(load_hook)


def _put_first(handle: RemovableHandle) -> None:
    hooks = handle.hooks_dict_ref()
    assert hooks is not None  # the accelerator has it
    hooks.move_to_end(handle.id, last=False)
