"""Lightning: ``Trainer(strategy=ZcStrategy(stage=2))`` and ``Fabric(strategy=ZcFabricStrategy(stage=2))``.

Checkpoints are single files with whole tensors, as DDP's: either strategy takes up the other's, with any number of
ranks. Both strategies are DDPStrategy without the wrapper: launching, process groups and reductions are its own.

Private names of lightning 2.6: ``_backward_sync_control`` of Fabric's strategies, which has no public way in, and
``_store`` of BaseFinetuning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc import torch_private
from zc.api import close, make_call, recompile
from zc.api import compile as zc_compile
from zc.checkpoint.stock_state import full_optimizer_state
from zc.errors import PlanError
from zc.guards import NotForDDP
from zc.integrations import load_masters, needed, seam, shards_weights, whole_weights
from zc.registry import COMPILED, no_sync, sharded

_Module: Any = needed("lightning", "lightning").LightningModule
_FabricDDP: Any = needed("lightning.fabric.strategies", "lightning").DDPStrategy
_TrainerDDP: Any = needed("lightning.pytorch.strategies", "lightning").DDPStrategy
_Finetuning: Any = needed("lightning.pytorch.callbacks", "lightning").BaseFinetuning
_STORE = "_store"  # of BaseFinetuning; torch has a private name like it

# options of DDPStrategy that zc supports; a strategy passes all other options to zc.compile
_OF_DDP = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "precision",
    "process_group_backend",
    "timeout",
    "start_method",
)
_OF_WRAPPER = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb", "ddp_comm_hook")


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits options into DDPStrategy's and `zc.compile`'s."""
    for name in _OF_WRAPPER:
        if name in options:
            raise PlanError(f"{name} is an option of DistributedDataParallel, which zc replaces: leave it out")
    own = {name: options[name] for name in _OF_DDP if name in options}
    return own, {name: value for name, value in options.items() if name not in own}


def _params_of(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """The model's parameters that ``optimizer`` updates."""
    sharded_model = sharded(model)
    number = next(one.number for one in sharded_model.optimizers if one.optimizer is optimizer)
    slots = [slot.name for bucket in sharded_model.runtime.plan.of_optimizer(number) for slot in bucket.slots]
    names = set(slots)
    return [param for name, param in sharded_model.runtime.params.items() if name in names]


class ZcStrategy(_TrainerDDP):
    """For lightning.pytorch.Trainer. Takes the options of `zc.compile`, and DDPStrategy's options for processes.

    ``training_step`` runs as it is, and what it calls of the model is compiled: ``self(...)`` where the LightningModule
    has a ``forward``, else each module that is an attribute of it.
    """

    def __init__(self, **options: Any) -> None:
        own, self._options = _split(options)
        super().__init__(**own)
        self._masters: Mapping[str, Tensor] = {}  # of a checkpoint, until the model is compiled

    def setup(self, trainer: Any) -> None:
        with contextlib.nullcontext() if trainer.state.fn == "fit" else self._equalizing():
            super().setup(trainer)

    @contextlib.contextmanager
    def _equalizing(self) -> Iterator[None]:
        """Before a validation, DDPStrategy equalizes the module over ranks by a call that a compiled module refuses.
        Inside, that call leaves out the parameters that have no bytes."""
        own: dict[str, Any] = self.lightning_module.__dict__
        guards = {name: value for name, value in own.items() if isinstance(value, NotForDDP)}
        shards = sharded(self.lightning_module).runtime.placed if shards_weights(self.lightning_module) else {}
        own.update({name: set(shards) for name in guards})
        try:
            yield
        finally:
            own.update(guards)

    def configure_ddp(self) -> None:
        """Nothing is wrapped."""

    def setup_optimizers(self, trainer: Any) -> None:
        module = self.lightning_module
        if module in COMPILED:  # from an earlier fit
            close(module)
            for child in _called_children(module):
                torch_private.call_instead(child, None)
        super().setup_optimizers(trainer)
        finetuning = [callback for callback in trainer.callbacks if isinstance(callback, _Finetuning)]
        for callback in finetuning:
            callback.on_fit_start(trainer, module)  # before zc.compile: in a resumed run it sets parameter groups
        zc_compile(module, list(self.optimizers), **self._options)
        for callback in finetuning:
            seam(_Finetuning, "lightning", "2.6", {_STORE: "plans the layers that a callback has unfrozen"})
            setattr(callback, _STORE, partial(_store_groups, callback))
        if type(module).forward is _Module.forward:
            for child in _called_children(module):
                torch_private.call_instead(child, make_call(child, sharded(module).runtime))
        if any(param.dtype != self._masters.get(name, param).dtype for name, param in module.named_parameters()):
            load_masters(module, self._masters)
        self._masters = {}
        self.precision_plugin.main_params = lambda optimizer: iter(_params_of(module, _unwrap(optimizer)))

    def teardown(self) -> None:
        """In stage 3 the module stays on its device, as under FSDP: the base class would move whole parameters."""
        module: Any = self.lightning_module
        if module is None or not shards_weights(module):
            super().teardown()
            return
        module.cpu = lambda: module
        try:
            super().teardown()
        finally:
            del module.cpu

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with no_sync(self.lightning_module):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return whole_weights(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return full_optimizer_state(self.lightning_module, _unwrap(optimizer)) or {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict=strict)
        self._masters = checkpoint["state_dict"] if self.lightning_module not in COMPILED else {}


class ZcFabricStrategy(_FabricDDP):
    """For lightning.fabric.Fabric: ``model, optimizer = fabric.setup(model, optimizer)``, both in one call. Takes the
    options of `zc.compile`, and DDPStrategy's options for processes."""

    def __init__(self, **options: Any) -> None:
        own, self._options = _split(options)
        super().__init__(**own)
        self._backward_sync_control = self

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        zc_compile(module, list(optimizers), **self._options)
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        if any(param.requires_grad for param in module.parameters()):
            raise PlanError(
                f"{type(module).__name__} was given to Fabric without its optimizer, and zc plans both together: "
                "model, optimizer = fabric.setup(model, optimizer). To evaluate only, freeze it (requires_grad_(False))"
            )
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise PlanError(
            f"{type(optimizer).__name__} was given to Fabric without its model, and zc plans both together: "
            "model, optimizer = fabric.setup(model, optimizer)"
        )

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """For ``fabric.no_backward_sync``, as its own ``_backward_sync_control``."""
        return no_sync(module) if enabled else contextlib.nullcontext()

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return whole_weights(module)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return full_optimizer_state(_model_of(optimizer), optimizer) or {}

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(module, dict(state_dict), strict=strict)
        load_masters(module, state_dict)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.precision.unscale_gradients(optimizer)
        params = _params_of(_model_of(optimizer), optimizer)
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.precision.unscale_gradients(optimizer)
        torch.nn.utils.clip_grad_value_(_params_of(_model_of(optimizer), optimizer), clip_val)


def _store_groups(callback: Any, module: nn.Module, number: int, num_groups: int, groups: list[dict[str, Any]]) -> None:
    """Replaces ``callback._store``, which BaseFinetuning calls at the start of each epoch, after it has unfrozen
    layers."""
    planned = sharded(module).runtime.params
    if any(param.requires_grad and planned.get(name) is not param for name, param in module.named_parameters()):
        recompile(module)
    getattr(type(callback), _STORE)(callback, module, number, num_groups, groups)


def _model_of(optimizer: Optimizer) -> nn.Module:
    for model, sharded_model in COMPILED.items():
        if any(one.optimizer is optimizer for one in sharded_model.optimizers):
            return model
    raise PlanError(f"this {type(optimizer).__name__} was not set up: call fabric.setup(model, optimizer) first")


def _unwrap(optimizer: Any) -> Optimizer:
    own: Optimizer = getattr(optimizer, "optimizer", optimizer)  # of a LightningOptimizer
    return own


def _called_children(module: nn.Module) -> Iterator[nn.Module]:
    """The submodules that ``training_step`` calls, of a module without a ``forward``."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_children(child)
        elif any(param.requires_grad for param in child.parameters()):
            yield child
