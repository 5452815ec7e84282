"""What else users train with, each tuned as its own documentation advises (docs/benchmarks.md has the flags): DDP with
ZeroRedundancyOptimizer, FSDP2, DeepSpeed. Extras of the benchmark, never dependencies: imported where they are used."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import systems
from bench.systems import AdamW, Options, System


def _nbytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors)


def _state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of moments that this rank holds; a DTensor counts with its shard."""
    values = (v for state in optimizer.state.values() for v in state.values())
    local = (v.to_local() if hasattr(v, "to_local") else v for v in values if isinstance(v, Tensor))
    return _nbytes(v for v in local if v.dim() > 0)


def zero_redundancy(model: nn.Module, adamw: AdamW, options: Options) -> System:
    """torch's own ZeRO-1: DDP, and moments on one rank a parameter. ``parameters_as_bucket_view`` sends updated weights
    bucket by bucket instead of one by one."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from bench.cases.models import param_groups

    wrapped = systems.wrap_in_ddp(model, options, view=True)
    optimizer = ZeroRedundancyOptimizer(
        param_groups(model, adamw.weight_decay), torch.optim.AdamW, parameters_as_bucket_view=True, **adamw.options()
    )
    nbytes = _nbytes(model.parameters())
    made = systems.stock(wrapped, model, optimizer, options)
    held = lambda: {"params": nbytes, "gradients": nbytes, "optimizer_state": _state_nbytes(optimizer.optim)}  # noqa: E731
    return System(
        made.model,
        optimizer,
        clip=made.clip,
        persistent_nbytes=held,
        no_sync=made.no_sync,
        precision=made.precision,
    )


def fsdp2(model: nn.Module, adamw: AdamW, options: Options) -> System:
    """``fully_shard`` of every block and of the model. ZeRO-2 keeps weights between forward and backward; with stage 3
    blocks free theirs after the forward (``reshard_after_forward``; the root's stay, as torch's default has it).

    bf16 by its own policy (weights gathered in bf16, gradients reduced in fp32). A step's backwards but the last
    neither reduce nor free the gathered weights. Compiled: each block and the loss's head by itself, as torchtitan
    does it.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    dtype = options.compute_dtype
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    device = next(model.parameters()).device.type
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        if options.backend != "eager":
            block.compile(backend=options.backend)
        fully_shard(block, mesh=mesh, reshard_after_forward=options.stage == 3, mp_policy=policy)
    if options.backend != "eager":
        model.head_loss = torch.compile(model.head_loss, backend=options.backend)  # type: ignore
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = adamw.make(model)

    def backward(loss: Tensor, is_last: bool) -> None:
        if options.accum > 1:
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
        loss.backward()

    def held() -> dict[str, int]:
        shards = _nbytes(p.to_local() for p in model.parameters())  # type: ignore[attr-defined]
        return {"params": shards, "gradients": shards, "optimizer_state": _state_nbytes(optimizer)}

    def clip(max_norm: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).full_tensor()  # type: ignore

    return System(model, optimizer, clip=clip, persistent_nbytes=held, backward=backward)


_OFFLOAD_OPTIMIZER = {"device": "cpu", "pin_memory": True}


def cpu_adam(model: nn.Module, adamw: AdamW) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW for host memory, which its documentation asks for with offload; built when first used."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    from bench.cases.models import param_groups

    groups = param_groups(model, adamw.weight_decay)
    made: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, lr=adamw.lr, betas=adamw.betas, adamw_mode=True)
    return made


def deepspeed_config(model: nn.Module, options: Options, lr: float) -> dict[str, Any]:
    """ZeRO with what DeepSpeed's documentation names for speed: overlap, contiguous gradients, reduce-scatter; buckets
    as large as everybody's, since its default of 500 M elements would put these models into one."""
    itemsize = 2 if options.compute_dtype else 4
    numel = systems.bucket_limit(model, options, itemsize) // itemsize
    return {
        "train_micro_batch_size_per_gpu": 1,  # of the engine's dataloader, which nobody uses
        "gradient_accumulation_steps": options.accum,
        "gradient_clipping": options.clip,
        "bf16": {"enabled": options.compute_dtype is torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": options.stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": numel,
            "allgather_bucket_size": numel,
            **({} if options.offload is None else {"offload_optimizer": _OFFLOAD_OPTIMIZER}),
        },
        "zero_allow_untested_optimizer": True,  # AdamW(fused=True)
        "steps_per_print": 1 << 30,
    }


def deepspeed(model: nn.Module, adamw: AdamW, options: Options, *, deep: bool = False) -> System:
    """DeepSpeed's engine with the client's AdamW; compiled by ``engine.compile``; ``deep``: its own graph passes."""
    device = next(model.parameters()).device.type
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds

    config = deepspeed_config(model, options, adamw.lr)
    if deep:
        config["compile"] = {"deepcompile": True}
    optimizer = adamw.make(model) if options.offload is None else cpu_adam(model, adamw)
    if not ds.comm.is_initialized():
        ds.init_distributed(dist_backend="gloo" if device == "cpu" else "nccl")
    engine, _, _, _ = ds.initialize(model=model, optimizer=optimizer, config=config)
    if options.backend != "eager":
        engine.compile(backend=options.backend)

    def backward(loss: Tensor, is_last: bool) -> None:
        engine.backward(loss, scale_wrt_gas=False)  # the loop has divided the loss already
        if not is_last:
            engine.step()  # counts the microbatch

    def clip(max_norm: float) -> Tensor:
        return torch.tensor(float("nan"))  # the engine clips in its step

    def held() -> dict[str, int]:
        return {"params": _nbytes(model.parameters()), "optimizer_state": _state_nbytes(optimizer)}

    return System(engine, optimizer, clip=clip, persistent_nbytes=held, backward=backward, step=engine.step)


def deepcompile(model: nn.Module, adamw: AdamW, options: Options) -> System:
    return deepspeed(model, adamw, options, deep=True)


SYSTEMS: dict[str, Callable[[nn.Module, AdamW, Options], System]] = {
    "zc": systems.zc,
    "ddp": systems.ddp,
    "ddp-view": systems.ddp_view,
    "local": systems.local,
    "zero-redundancy": zero_redundancy,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "deepcompile": deepcompile,
}
TAKE_SEVERAL = ("zc", "ddp", "ddp-view", "local")  # optimizers
