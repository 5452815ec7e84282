"""transformers' Trainer with zc instead of DDP: `ZcTrainer`, or `ZcMixin` before your own subclass of Trainer::

    class Mine(ZcMixin, SFTTrainer): ...

    trainer = Mine(model=..., args=..., train_dataset=..., zc_options={"stage": 2})

`Trainer.create_optimizer`, which subclasses may override, is where model and optimizer first meet: zc takes them
there, through `zc.integrations.accelerate`, and ``accelerator.prepare`` then finds them prepared.

Private names, of transformers 5.23: ``_save_optimizer_and_scheduler`` and ``_load_optimizer_and_scheduler``, since
rank 0 alone asks the optimizer for its state there; with stage=3 ``_save``, since rank 0 alone asks the model for its
weights, and ``_load_best_model`` and ``_load_from_checkpoint``, where peft asks it for the names in its state.
A checkpoint has zc's own in its folder ``zc``; one that a plain Trainer wrote can be resumed, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from zc.api import close
from zc.errors import PlanError
from zc.integrations import load_beside, names_in_state, needed, save_beside, seam, shards_weights
from zc.registry import COMPILED, full_state_dict

_Trainer: Any = needed("transformers", "transformers").Trainer
_prepare = needed("zc.integrations.accelerate", "transformers").prepare

_SEEN = "5.23"
_SEAMS = {
    "_save_optimizer_and_scheduler": "saves the optimizer's state from all ranks",
    "_load_optimizer_and_scheduler": "loads it on all ranks",
    "_save": "gathers the weights of stage 3 on rank 0",
    "_load_best_model": "loads weights into the shards of stage 3",
    "_load_from_checkpoint": "loads weights into the shards of stage 3",
}

_TRAINED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # what some Trainer of this process has compiled


class ZcMixin:
    """A base class to put before Trainer, or a subclass of it. ``zc_options``: options of `zc.compile`."""

    zc_options: Mapping[str, Any] = {}

    def __init__(self, *args: Any, zc_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if not isinstance(self, _Trainer):
            raise TypeError(f"{type(self).__name__} needs transformers.Trainer among its bases, after ZcMixin")
        seam(_Trainer, "transformers", _SEEN, _SEAMS)
        if zc_options is not None:
            self.zc_options = dict(zc_options)
        self._zc_model: nn.Module | None = None
        self._zc_optimizer: Any = None  # in Accelerate's wrapper, as the Trainer keeps it
        model = kwargs.get("model", args[0] if args else None)
        if isinstance(model, nn.Module) and any(param.is_meta for param in model.parameters()):
            raise PlanError(
                "the model is on the meta device, and Trainer moves it before zc can place it: load it whole in host "
                "memory, or write a loop of your own with zc.compile(..., stage=3, device=...) and zc.load_pretrained"
            )
        super().__init__(*args, **kwargs)
        _check(self)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Creates the Trainer's optimizer, or uses the caller's, and compiles the model with it."""
        trainer: Any = self
        if trainer.optimizer is not None and trainer.optimizer is self._zc_optimizer:
            own, sharded_model = trainer.optimizer.optimizer, COMPILED.get(trainer.model)
            if sharded_model is not None and any(one.optimizer is own for one in sharded_model.optimizers):
                return trainer.optimizer  # train() was called before: both go on
            raise PlanError(
                f"the Trainer's {type(own).__name__} is not the optimizer that the {type(trainer.model).__name__} is "
                "compiled with: it was closed, or another Trainer has trained the model since. To begin with a new "
                "one, set trainer.optimizer = trainer.lr_scheduler = None"
            )
        _check(trainer)
        super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if self._zc_model is not None:
            close(self._zc_model)  # of a trial before this one (model_init), or with another optimizer
        if trainer.model in _TRAINED:
            close(trainer.model)  # by another Trainer before this one
        plain = trainer.optimizer
        _, trainer.optimizer = _prepare(trainer.accelerator, trainer.model, plain, **self.zc_options)
        self._zc_model, self._zc_optimizer = trainer.model, trainer.optimizer
        _TRAINED.add(trainer.model)
        return trainer.optimizer

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        return super().evaluate(*args, **self._generates_together(), **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        return super().predict(*args, **self._generates_together(), **kwargs)  # type: ignore[misc]

    def _generates_together(self) -> dict[str, bool]:
        """An option of ``generate``: in stage 3 each forward gathers weights, so all ranks run equally many."""
        trainer: Any = self
        is_asked = getattr(trainer.args, "predict_with_generate", False)
        return {"synced_gpus": True} if is_asked and shards_weights(trainer.model) else {}

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        trainer: Any = self
        if state_dict is None and shards_weights(trainer.model):
            state_dict = full_state_dict(trainer.model)
        with names_in_state(trainer.model):  # peft asks its ``modules_to_save`` for theirs
            super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with names_in_state(cast(Any, self).model):
            super()._load_best_model()  # type: ignore[misc]

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with names_in_state(cast(Any, self).model):
            super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trainer: Any = self
        save_beside(output_dir, "zc", trainer.model, trainer.optimizer.optimizer)
        trainer.optimizer.pointer.point_to("zc")
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        trainer.optimizer.pointer.point_to(None)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer: Any = self
        if checkpoint is not None:
            is_loaded = load_beside(checkpoint, "zc", trainer.model, trainer.optimizer.optimizer)
            trainer.optimizer.pointer.note_load("zc" if is_loaded else None)
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]


class ZcTrainer(ZcMixin, _Trainer):
    """transformers.Trainer with ``zc_options=``, the options of `zc.compile`."""


def _check(trainer: Any) -> None:
    """Refuses, by name, options that would silently change results or lose state."""
    args = trainer.args
    if args.n_gpu > 1:
        raise PlanError(f"one process has {args.n_gpu} GPUs (nn.DataParallel): start one per GPU, with torchrun")
    refused = {
        "fsdp": "it shards the same parameters",
        "deepspeed": "it shards the same parameters",
        "torch_compile": "zc compiles the model itself",
        "auto_find_batch_size": "a rank that is out of memory tries again alone, and the others wait for it",
        "fp16_full_eval": "it casts the model behind zc's back; fp16=True evaluates in fp16 as well",
        "bf16_full_eval": "it casts the model behind zc's back; bf16=True evaluates in bf16 as well",
    }
    for name, why in refused.items():
        if getattr(args, name, None):
            option = f"{name}={getattr(args, name)!r}"
            raise PlanError(f"TrainingArguments({option}) does not go with zc: {why}. Leave it out")
    if args.optim in ("lomo", "adalomo"):
        raise PlanError(
            f"TrainingArguments(optim={args.optim.value!r}) does not go with zc: it steps inside the backward, before "
            "gradients are averaged. Take another one, such as 'adafactor'"
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise PlanError("the model was sharded when it was loaded (distributed_config): load it whole")
