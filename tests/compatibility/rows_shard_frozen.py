"""Adapters on frozen parameters that lie in shards (shard_frozen=True). Stage 3 does the same without the option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rows_params
import rows_structure
import rows_tasks
import rows_unfreezing
import rows_updates
import torch
from models import GPT, Broken, Heads, frozen, mlp
from rows import Loop, Row, add, plain, sgd
from tiers import FULL
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ITEM = 14


class Adapted(nn.Module):
    """A frozen layer, and two narrow ones that train beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = self.up(self.down(x))
        return self.base(x) + low


def adapted(model: nn.Module) -> nn.Module:
    """``model``, frozen, with adapters beside its linear layers, as peft puts them there. Reentrant checkpoints want an
    input that asks for a gradient, so what comes out of an embedding does (peft's enable_input_require_grads)."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _, args, output: output.requires_grad_())
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child))
    return model


def sharded(name: str, loop: Loop = plain, make: Callable[[], nn.Module] = mlp, **given: Any) -> None:
    options = {"shard_frozen": True, **given.pop("options", {})}
    add(Row(f"shard_frozen: {name}", ITEM, loop, lambda: adapted(make()), options=options, **given))


def unsharded(name: str, loop: Loop, make: Callable[[], nn.Module], **given: Any) -> None:
    add(Row(f"shard_frozen: {name}", ITEM, loop, make, options={"shard_frozen": True}, **given))


sharded("blocks, checkpointing, non-reentrant", rows_params.language,
        lambda: GPT(16, 3 if FULL else 2, use_checkpoint=True))  # fmt: skip
sharded("blocks, checkpointing, reentrant", rows_params.language,
        lambda: GPT(16, 3, use_checkpoint=True, reentrant=True))  # fmt: skip
sharded("evaluation between a forward and its backward", rows_updates.evaluation_inside)
sharded("inference_mode between steps", rows_updates.inference)
sharded("tasks in varying order and number, a backward each", rows_tasks.varying_backwards, Heads)
sharded("a graph break, a layer used on both sides", make=Broken)
sharded("dynamic sequence lengths", rows_structure.dynamic_lengths, rows_structure.Sequences)
sharded("microbatches declared with no_sync", rows_updates.declared)
sharded("overlap_gather", options={"overlap_gather": True},
        refused={f"stage {k}": "PlanError: leave overlap_gather out" for k in (1, 2)},
        note="stage 3 gathers ahead in any case")  # fmt: skip
unsharded("a layer unfrozen, the others frozen, evaluated between", rows_unfreezing.unfrozen_alone, frozen)
unsharded("an eager layer unfrozen, then trained alone", rows_unfreezing.unfrozen_eager, rows_unfreezing.partly_frozen)


def mesh() -> DeviceMesh:
    """Called in the rank."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


def both(params: Any) -> dict[str, torch.optim.Optimizer]:
    """An optimizer for every second parameter."""
    every = list(params)
    return {"one": torch.optim.AdamW(every[::2], lr=1e-3), "other": sgd(every[1::2])}


sharded("two optimizers", optimizer=both)
sharded("a mesh of two dimensions", options={"mesh": mesh})
