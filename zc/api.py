"""`zc.compile` and the functions beside it: config -> checks -> plan -> buffers -> backend -> optimizer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zc import guards, kernels, torch_private
from zc.checkpoint import state_marks, stock_state
from zc.checks import check, check_initialized, check_module, check_replicas, owners
from zc.compiler import backend as compiler
from zc.config import Config
from zc.engine import param_grads
from zc.engine.buffer_sync import BufferSync, has_buffers
from zc.engine.buffers import Buffers
from zc.engine.runtime import Runtime
from zc.engine.streams import Streams, make_streams
from zc.errors import PlanError, ZcError
from zc.optim.given import Given, listed
from zc.optim.kinds import note_of, rule_of, try_out
from zc.optim.model import ShardedModel
from zc.optim.optimizer import ShardedOptimizer
from zc.optim.param_writes import note_of_shared
from zc.planning.layout import Rule
from zc.planning.plan import Plan
from zc.prepare import broadcast_rest, check_host, check_wire, fill, fingerprint, open_state_file, plan_of
from zc.ranks.comm import Group
from zc.ranks.mesh import ranks_of
from zc.registry import COMPILED, sharded


def compile(  # noqa: A001  (the name users know from torch.compile)
    model: nn.Module,
    optimizer: Given,
    *,
    stage: int = 2,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reduce: str = "exact",
    bucket_nbytes: int | None = None,
    num_buffers: int = 2,
    overlap: bool = True,
    overlap_gather: bool = False,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    backend: str = "inductor",
    offload: str | None = None,
    offload_accumulate: str = "cpu",
    offload_dir: str | Path | None = None,
    verify: bool = True,
    write_in_place: bool = False,
    broadcast_buffers: bool = True,
    dump_dir: str | Path | None = None,
) -> tuple[nn.Module, Given]:
    """ZeRO stage 1 or 2 for ``model`` and ``optimizer``: the same two objects come back, and the loop stays as it is.

    Gradients are the mean over the ranks of ``group`` and the sum over backward calls, as in DDP. Without an
    initialised process group it works as one rank. Parameters and buffers are first broadcast from rank 0.

    Args:
        optimizer: a torch.optim.Optimizer, or a list, tuple or dict of several, with each trainable parameter in one
            of them. Each updates, and clears, its own when its ``step()`` and ``zero_grad()`` are called.
        stage: 1 keeps full-size fp32 gradients and shards masters and optimizer state; 2 shards the gradients, too.
        param_dtype: casts the trainable parameters, after their fp32 masters were taken from the given values.
        backend: "inductor"; "aot_eager", the same schedule with its segments run op by op; "eager", hooks only.
        group: the ranks that share the model; None: the default group.
        mesh: a torch.distributed DeviceMesh in place of ``group``. Of two dimensions, (replicate, shard), of all ranks:
            state is sharded inside ``shard``, and each ``replicate`` has a copy (FSDP2's HSDP; docs/multinode.md).
        broadcast_buffers: buffers are rank 0's before a forward, as under DDP (`zc.engine.buffer_sync`). False: each
            rank keeps its own; where they never change (masks, frequencies) that is the same, and sends nothing.

    Reductions:
        reduce: "exact": all-to-all, then a sum in rank order in fp32, bitwise the same for every bucket size and
            overlap setting; "native": the backend's reduce-scatter in ``reduce_dtype``.
        reduce_dtype: what travels between ranks; None: the parameters' dtype (stage 2), the accumulator's (stage 1).
        bucket_nbytes: no bucket is larger, unless one parameter is (the ring is as large as the largest bucket). None:
            25 MiB (between hosts of CPUs 8), or more where that would make more than some 32 buckets, up to the size of
            the largest parameter.
        num_buffers: flat_grad buffers in the ring (stage 2), each as large as the largest bucket.
        write_in_place: weight gradients are made in their place in the bucket; False: made apart, then copied there.
            Stage 2 has the same bits either way, on a CPU. docs/decisions.md has what it costs and gains.

    Overlap:
        overlap: False runs the reductions on the compute stream.
        overlap_gather: step() returns with the all-gathers launched, and the next compiled forward waits for each
            bucket where it first reads it; whoever reads a parameter before that waits for all (`zc.engine.pending`).
            While a view, ``p.data`` or array of one is kept, step() waits as without. Opt-in: a C++ extension that
            takes tensors past torch's dispatch is not seen; call `synchronize` before such a read.

    Offload:
        offload: "cpu" keeps masters, optimizer state and accumulators in host memory, and the update is done there;
            "disk" keeps the state in files under ``offload_dir`` (see `flush_state`).
        offload_accumulate: "cpu": accumulators in host memory, which visit the device for each backward; "device": they
            stay there (stage 1: 4 bytes a parameter, stage 2: 4 / W) and are copied once an update.
        offload_dir: the folder of ``offload="disk"``.

    Looking inside:
        verify: False skips the proof of each schedule; explain says so.
        dump_dir: a folder for each graph before and after every pass, and the schedule as Python.

    Raises:
        PlanError (a ValueError), TypeError: an option, the model or the optimizer can't be planned; nothing has
        changed. RankMismatchError: the ranks' models or options differ, on every rank; nothing has changed.
    """
    check_initialized()
    ranks = ranks_of(mesh, group)
    checked, file, failure = None, None, None
    optimizers: list[Optimizer] = []
    try:
        config = Config(
            stage=stage,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            reduce=reduce,
            bucket_nbytes=bucket_nbytes,
            num_buffers=num_buffers,
            overlap=overlap,
            overlap_gather=overlap_gather,
            backend=backend,
            offload=offload,
            offload_accumulate=offload_accumulate,
            offload_dir=offload_dir,
            verify=verify,
            write_in_place=write_in_place,
            broadcast_buffers=broadcast_buffers,
            dump_dir=dump_dir,
        )
        check_module(model)
        optimizers = listed(optimizer)
        checked = _check(model, optimizers, config, ranks)
        file = open_state_file(config, ranks.rank, checked[1], optimizers, checked[0])
    except (ZcError, TypeError) as error:
        failure = error
    try:
        ranks.agree_on(failure)  # before the first exchange: nobody waits for a rank that was refused
        assert checked is not None
        params, plan, rules = checked
        lines = fingerprint(model, config, optimizers, owners(params, optimizers))
        ranks.same_everywhere("the model or an option", lines, "Make both from the same arguments on all ranks")
    except BaseException:
        if file is not None:
            file.discard()
        raise

    device, shared = plan.buckets[0].device, note_of_shared(params)
    ranks.open_data(device)
    buffers = Buffers(plan, ranks.shard.rank)
    streams = make_streams(device)
    runtime = Runtime(config, plan, buffers, ranks, streams, params)
    layouts = map(note_of, optimizers) if ranks.world_size > 1 else ()
    for note in filter(None, (*layouts, ranks.shard.note, kernels.note_of(device), shared)):
        runtime.say_once(note)
    if not verify:
        runtime.say_once("verify=False: schedules run without their proof")
    broadcast_rest(model, params, ranks)
    fill(runtime, plan.buckets)
    sharded = ShardedModel(runtime, optimizer, optimizers, rules, file)
    runtime.install_hooks()
    COMPILED[model] = sharded
    for each in sharded.optimizers:
        _own_methods(model, each)
    state_marks.install(sharded)
    stock_state.install()
    runtime.frozen = {n: p for n, p in model.named_parameters() if n not in params}
    if plan.overlap_gather:
        runtime.weights.install_hooks(model)
        runtime.weights.count_sharing()
    if config.backend != "eager":
        torch_private.raise_recompile_limit(model)
        before = runtime.weights.let_read if config.overlap_gather else None
        torch_private.compile_in_place(model, compiler.make_backend(runtime), before)
    if broadcast_buffers and has_buffers(model) and ranks.world_size > 1:
        torch_private.call_first(model, BufferSync(model, runtime).before_forward)
    guards.install(model, runtime)
    return model, optimizer


def _check(
    model: nn.Module, optimizers: Sequence[Optimizer], config: Config, ranks: Group
) -> tuple[dict[str, nn.Parameter], Plan, list[Rule]]:
    """Everything that this rank can refuse by itself; changes nothing."""
    if model in COMPILED:
        raise PlanError(f"this {type(model).__name__} is compiled already: call zc.compile once, before the loop")
    params = check(model, optimizers)
    rules = [rule_of(optimizer) for optimizer in optimizers]
    param_grads.refuse_compiled_autograd()
    device = next(iter(params.values())).device
    for optimizer in optimizers:
        try_out(optimizer, ranks.shard.world_size, device if config.offload is None else torch.device("cpu"))
    num_replicas = 1 if ranks.replicas is None else ranks.replicas.world_size
    check_replicas(config, num_replicas)
    plan = plan_of(
        params, config, ranks.shard.world_size, owners(params, optimizers), rules,
        topology=ranks.shard.topology, num_replicas=num_replicas,
    )  # fmt: skip
    check_wire(plan)
    if plan.offload is not None:
        check_host(plan, optimizers)
    return params, plan, rules


def _own_methods(model: nn.Module, sharded: ShardedOptimizer) -> None:
    """What an optimizer's methods must do beside what its class says. Instance attributes: the class stays the
    caller's. (model.zero_grad stays its own: a parameter whose ``.grad`` was set to None is noticed.)"""
    optimizer = sharded.optimizer
    owner, of_model = weakref.proxy(sharded), weakref.ref(model)
    add = type(optimizer).add_param_group

    def zero_grad(set_to_none: bool = True) -> None:
        owner.zero_grad(set_to_none=set_to_none)

    def add_param_group(param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        found = of_model()
        names = {id(p): name for name, p in found.named_parameters()} if found is not None else {}
        for param in given:
            name = names.get(id(param))
            if name is None or name in owner.runtime.params:
                shown = (
                    f"parameter {name}, which has its place: set its options in optimizer.param_groups"
                    if name
                    else f"a tensor {tuple(param.shape)} that the model lacks: register it there first, and call "
                    "zc.recompile(model) behind this"
                )
                raise PlanError(f"add_param_group was given {shown}")
        add(optimizer, {**param_group, "params": given})
        owner.runtime.frozen.update({names[id(param)]: param for param in given})

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Declares that the backward calls inside are not the last before an update.

    Stage 1 then skips their reduction. Stage 2 reduces every backward, since it keeps no full-size gradient, so ranks
    wait for each other inside too: where they have different numbers of such backwards, a collective of the loop's own
    must not stand before the next one outside, or RankMismatchError. Forgetting no_sync changes no number, it only
    costs communication.
    """
    with sharded(model).runtime.no_sync():
        yield


def synchronize(model: nn.Module) -> None:
    """With ``overlap_gather``: whatever comes next on the current stream (on CPU: in this thread) may read parameters.

    Only needed between ``optimizer.step()`` and the next forward, before a read that torch does not see: by a C++
    extension that takes tensors past torch's dispatch, by an address or a DLPack capsule that was kept.
    Does nothing without ``overlap_gather``. The host does not wait on CUDA.
    """
    sharded(model).runtime.weights.synchronize()


def flush_state(model: nn.Module) -> None:
    """With ``offload="disk"``: makes ``offload_dir`` complete, on all ranks, and returns when it is on the disk.

    A later `compile` with the same folder, plan and optimizer takes the state up if it is given the weights of now
    (save them beside it); with other weights it raises. From the next update on the folder is not complete, and a run
    that finds it so starts with fresh state and says that. Hyper-parameters and schedulers are the caller's to save.

    Raises:
        PlanError: the model has no state on a disk, or not all of its state is there. OSError, RankMismatchError: the
        disk refused, here or on another rank; the folder is then not complete.
    """
    sharded(model).flush_state()


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients so that their joint 2-norm is at most ``max_norm``; one collective.

    Returns the norm before, fp32, 0-d: the norm of the mean gradient over all ranks, each element counted once, as
    `torch.nn.utils.clip_grad_norm_` gives it under DDP. A NaN or infinity stays one.
    """
    return sharded(model).grad_shards.clip_grad_norm_(float(max_norm))


def full_grad(model: nn.Module) -> dict[str, Tensor | None]:
    """Every trainable parameter's reduced gradient, gathered on all ranks, in the parameter's shape and the
    accumulator's dtype; None where no rank has one. For looking at, not for training: it holds all gradients at
    once."""
    runtime = sharded(model).runtime
    gathered: dict[str, Tensor | None] = {}
    for bucket in runtime.plan.buckets:
        gathered.update(runtime.full_grad(bucket.index))
    return {name: gathered[name] for name in runtime.params}


__all__ = ["Streams", "clip_grad_norm_", "compile", "flush_state", "full_grad", "no_sync", "synchronize"]
