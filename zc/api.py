"""`zc.compile`, `zc.recompile` and `zc.close`, and the functions for the training loop. Every rank must call those on
gradients and `zc.join`."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zc import guards, torch_private
from zc.checkpoint import plain_state, stock_state
from zc.checkpoint.saving import finish_pending
from zc.checks import (
    check_added,
    check_initialized,
    check_plan,
    check_shards_fit,
    check_shared,
    is_on_cpu,
    left_to_ranks,
    owners_of,
    trainable,
)
from zc.compiler import backend as compiler
from zc.compiler.blocks import Blocks, compile_blocks, find_again
from zc.config import OPTIONS, Config, check_count
from zc.engine.buffer_sync import BufferSync
from zc.engine.buffers import Buffers
from zc.engine.core import Updater
from zc.engine.param_checks import Unset
from zc.engine.runtime import Runtime
from zc.engine.streams import make_streams
from zc.errors import PlanError, ZcError
from zc.fill import broadcast, broadcast_rest, fill, move_from_meta, restore, snapshot
from zc.offload.disk import DiskState
from zc.offload.host_step import HostMemory, HostStep, unlock_dropped
from zc.optim.assignment import Assignment, Container, is_elementwise
from zc.optim.model import ShardedModel
from zc.optim.optimizer import ShardedOptimizer, refuse_closed, replace_methods, restore_methods
from zc.planning.blocks import find_singles, matrices_around
from zc.planning.plan import Plan
from zc.prepare import RANKS, Request, features_of, fingerprint, notes_of, plan_of, resolve
from zc.ranks.group import Group, ranks_of
from zc.registry import COMPILED, is_ours, sharded
from zc.report import diverged


def compile(  # noqa: A001  (the name users know from torch.compile)
    model: nn.Module,
    optimizer: Container,
    *,
    stage: int = 2,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    gather_dtype: torch.dtype | str | None = None,
    reduce: str = "exact",
    bucket_nbytes: int | None = None,
    num_buffers: int = 2,
    overlap: bool = True,
    overlap_gather: bool = False,
    weight_nbytes: int | None = None,
    shard_frozen: bool = False,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    backend: str = "inductor",
    offload: str | None = None,
    offload_accumulate: str = "cpu",
    offload_dir: str | Path | None = None,
    verify: bool = True,
    write_in_place: bool = False,
    broadcast_buffers: bool = True,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    dump_dir: str | Path | None = None,
) -> tuple[nn.Module, Container]:
    """ZeRO stage 1, 2 or 3 for ``model`` and ``optimizer``: the same two objects come back, the loop stays as it is.

    Gradients are the mean over the ranks of ``group`` and the sum over backward calls, as in DDP. Without an
    initialised process group it works as one rank. Parameters and buffers are first broadcast from rank 0.

    Args:
        optimizer: a torch.optim.Optimizer, or a list, tuple or dict of several, with each trainable parameter in one
            of them. Each updates, and clears, its own when its ``step()`` and ``zero_grad()`` are called.
        stage: 1 keeps full-size fp32 gradients and shards masters and optimizer state; 2 shards the gradients, too; 3
            also the weights, which are gathered bucket by bucket while the forward and the backward read them. Outside
            of them a parameter has no bytes: see `whole_parameters` and `full_state_dict`.
        param_dtype: casts the trainable parameters, after their fp32 masters were taken from the given values.
        backend: "inductor"; "aot_eager", the same schedule with its segments run op by op; "eager", hooks only.
        group: the ranks that share the model; None: the default group.
        mesh: a torch.distributed DeviceMesh in place of ``group``. Of two dimensions, (replicate, shard), of all ranks:
            state is sharded inside ``shard``, and each ``replicate`` has a copy (FSDP2's HSDP; docs/multinode.md).
        broadcast_buffers: buffers are rank 0's before a forward, as under DDP (`zc.engine.buffer_sync`). False: each
            rank keeps its own; where they never change (masks, frequencies) that is the same, and sends nothing.

    Reductions:
        reduce: "exact": all-to-all, then a sum in rank order in fp32, bitwise the same for every bucket size and
            overlap setting; "native": the backend's reduce-scatter in ``reduce_dtype``, not in float16.
        reduce_dtype: what travels between ranks; None: the parameters' dtype (stage 2), the accumulator's (stage 1).
            torch.int8: where they leave a host, 8-bit integers with a scale per 256 elements (docs/multinode.md);
            inside one of several hosts, or among CPU ranks of one, everything is exact. Biases, norms and small
            parameters stay exact everywhere.
        gather_dtype: torch.int8 or "int4": where weights leave a host, they travel as encoded differences to the
            weights that all ranks have; the rounding error stays in the fp32 masters for the next update. In stage 3
            the weights themselves are encoded, whenever a forward or backward gathers them. None: exact.
        bucket_nbytes: no bucket is larger, unless one parameter is (the ring is as large as the largest bucket). None:
            25 MiB (between hosts of CPUs 8), or more where that would make more than some 32 buckets, up to the size of
            the largest parameter. A bucket holds whole blocks of one kind (`zc.planning.blocks`), or the same part of
            each; by default a block of a quarter of that size has its own bucket.
        num_buffers: flat_grad buffers in the ring (stage 2), each as large as the largest bucket.
        write_in_place: weight gradients are computed directly in the bucket; False: in memory of their own, and then
            copied. Stage 2 has the same bits either way, on a CPU. docs/decisions.md compares the two.

    Overlap:
        overlap: False runs the reductions on the compute stream.
        overlap_gather: step() returns with the all-gathers launched. In the next compiled forward each block waits for
            its own weights (`zc.weights.overlapped`); an earlier read of a parameter waits for that parameter
            (`zc.weights.param`). While the program keeps a view, ``p.data`` or an array of one, step() waits as
            without the option. Opt-in: zc does not see reads by a C++ extension outside of blocks that takes tensors
            past torch's dispatch; call `synchronize` before one. Stage 3 gathers while forward and backward run, with
            or without it.

    Sharded weights:
        shard_frozen: stages 1 and 2 treat frozen parameters (``requires_grad=False``) as stage 3 treats all: each rank
            keeps its shard, in their own dtype, and a bucket is gathered while it is read. Trainable parameters stay
            whole on every rank. For adapters (LoRA) on a large backbone, of which a rank keeps 2 / W bytes per bf16
            parameter. Stage 3 does so in any case.
        weight_nbytes: the most bytes of gathered weights at any time, unless one operation reads more together, which a
            note says. None: room for the largest sharded bucket and for the next one. With more, buckets stay from the
            forward to the backward, and are gathered once less.
        device: stage 3: where parameters and buffers go that are on the meta device. `load_pretrained`, `load` or
            `initialize` brings their values, and no rank ever holds the whole model. Optimizers may be made before.

    Offload:
        offload: "cpu" keeps masters, optimizer state and accumulators in host memory, and the update is done there;
            "disk" (stages 1 and 2) keeps the state in files under ``offload_dir`` (see `flush_state`).
        offload_accumulate: "cpu": accumulators in host memory, which visit the device for each backward; "device": they
            stay there (stage 1: 4 bytes a parameter, stage 2: 4 / W) and are copied once an update.
        offload_dir: the folder of ``offload="disk"``.

    Compilation, as torch.compile takes it:
        mode: for Inductor, on every segment. It may not ask for CUDA graphs: a replay overwrites the gradients of the
            replay before it, which wait for their bucket.
        options: the same as a dict of Inductor's options, in place of ``mode``.
        dynamic: None makes the sizes dynamic that have changed, True all of them, False none.
        fullgraph: True compiles the model as one graph, blocks included, and raises an error at a graph break in the
            forward. False compiles each kind of repeated blocks once (`zc.planning.blocks`).

    Looking inside:
        verify: False skips the proof of each schedule; explain says so.
        dump_dir: a folder for each graph before and after every pass, the schedule as Python, and the certificate of
            its proof (docs/proof.md).

    Raises:
        PlanError (a ValueError), TypeError: an option, the model or the optimizer can't be planned; nothing has
        changed. RankMismatchError: the ranks' models or options differ, on every rank; nothing has changed.

    After any other error, such as running out of memory, model and optimizer are plain ones again. Their values are
    then rank 0's, rounded to ``param_dtype``.
    """
    config_options = {name: value for name, value in locals().items() if name in OPTIONS}
    check_initialized()
    ranks = ranks_of(mesh, group, RANKS, reads_memory=is_on_cpu(model, device))
    with contextlib.ExitStack() as undo:
        with ranks.refuse_together():
            unset_params, unset_buffers = move_from_meta(model, device, stage, undo)
            request = resolve(model, optimizer, config_options, ranks)
            undo.callback(request.discard)
            if unset_params:
                check_shards_fit(request.plan)
            stock_state.install()  # of a library that all models share: before anything of this model changes
            torch_private.let_unscale_fp16(is_ours)
        ranks.same_everywhere(
            "the model or an option",
            fingerprint(model, request.config, request.assignment),
            "Make both from the same arguments on all ranks",
        )
        with ranks.refuse_together():  # the last point at which a rank can fail without others waiting for it
            runtime = _make_runtime(request, ranks)
            call = make_call(model, runtime, _make_buffer_sync(model, runtime))
        # if anything fails from here on, such as an allocation
        dtypes = {name: param.dtype for name, param in runtime.placed.items()}
        undo.callback(snapshot([*model.modules(), *request.assignment.optimizers]))
        undo.callback(COMPILED.pop, model, None)
        undo.callback(restore, runtime, dtypes)
        broadcast_rest(model, runtime.placed, ranks)
        fill(runtime, request.plan.with_weights, unset_params)
        runtime.unset = Unset(unset_params, unset_buffers)
        compiled = ShardedModel(runtime, request.assignment, partial(_make_updater, request))
        _install(model, compiled, call)
        undo.pop_all()  # nothing failed
    return model, optimizer


def _make_runtime(request: Request, ranks: Group) -> Runtime:
    """Makes process groups, streams, and everything else that does not change the model."""
    plan, device = request.plan, request.device
    ranks.open_data(device)
    if plan.topology.has_levels:
        ranks.shard.open_levels()
    memory = HostMemory(device) if plan.offload is not None else None
    buffers, params = Buffers(plan, ranks.shard.rank, memory), dict(request.assignment.params)
    config = request.config
    runtime = Runtime(config, buffers, ranks, make_streams(device), params, features_of(plan, config))
    runtime.frozen = {n: p for n, p in request.model.named_parameters() if n not in params}
    in_buckets = plan.slot_of
    runtime.placed.update({n: p for n, p in runtime.frozen.items() if n in in_buckets})
    for note in notes_of(request, ranks):
        runtime.say_once(note)
    return runtime


def _make_updater(request: Request, one: ShardedOptimizer) -> Updater:
    if request.plan.offload is None:
        return Updater(one.runtime)
    by_bucket = is_elementwise(one.optimizer)
    file = request.state_file
    disk = None if file is None else DiskState(one.runtime, file, one.local, one.slices)
    return HostStep(one.runtime, one.number, one.local, one.slices, disk, by_bucket=by_bucket)


def _make_buffer_sync(model: nn.Module, runtime: Runtime) -> BufferSync | None:
    """Copies rank 0's buffers to the others before a forward; None if the option or the model needs no such copies."""
    own = left_to_ranks(model)
    has_buffers = any(buffer.numel() for name, buffer in model.named_buffers() if name not in own)
    is_needed = runtime.config.broadcast_buffers and has_buffers and runtime.group.world_size > 1
    return BufferSync(model, runtime, own) if is_needed else None


def make_call(module: nn.Module, runtime: Runtime, sync: BufferSync | None = None) -> Callable[..., Any] | None:
    """The function for ``module(...)`` to run: compiled, among waits for weights. None: its own forward.
    ``module`` is the model, or a part of it that the caller calls alone."""
    config, call = runtime.config, None
    if config.backend != "eager" and not (runtime.plan.sharded and runtime.plan.kinds):
        backend = compiler.make_backend(runtime)
        call = torch_private.compiled_call(module, backend, dynamic=config.dynamic, fullgraph=config.fullgraph)
    call = runtime.weights.call_of(module, call)
    if sync is not None:
        call = torch_private.call_after(sync.before_forward, call or torch_private.plain_call(module))
    return call if call is None or config.backend == "eager" else guards.naming_limits(call)


def _install(model: nn.Module, compiled: ShardedModel, call: Callable[..., Any] | None) -> None:
    """Puts hooks and methods on the caller's objects."""
    runtime = compiled.runtime
    runtime.install_hooks(runtime.plan.buckets)
    for optimizer in compiled.optimizers:
        replace_methods(model, optimizer)
    plain_state.install_marks(compiled)
    runtime.weights.install_hooks(model)
    torch_private.call_instead(model, call)
    _compile_blocks(model, runtime)
    compiled.at_close.append(guards.install(model, runtime))
    diverged.install(runtime)
    COMPILED[model] = compiled


def _compile_blocks(model: nn.Module, runtime: Runtime) -> None:
    """Compiles one block of each kind, and with sharded weights the modules outside of blocks one by one."""
    kinds, dynamic, context = runtime.plan.kinds, runtime.config.dynamic, runtime.weights.around_block
    make_backend = partial(compiler.make_backend, runtime, Blocks(weakref.proxy(runtime), kinds).find_block)
    places = compile_blocks(model, kinds, make_backend, guards.install_call, dynamic, context)
    runtime.outside_blocks = matrices_around(model, kinds)
    singles = find_singles(model, kinds) if runtime.plan.sharded else []
    make_backend = partial(compiler.make_backend, runtime)
    places += compile_blocks(model, singles, make_backend, guards.install_call, dynamic, context)
    runtime.block_places = places


def recompile(model: nn.Module) -> None:
    """Plans the parameters that became trainable after `compile` (``requires_grad_(True)``, deepspeed#5639). All ranks
    call it, between two updates. Everything else keeps its place: weights, optimizer state, and schedules. Freezing a
    parameter needs no call; it just gets no gradient.

    One optimizer must hold the new parameters: from its construction on, or by ``optimizer.add_param_group`` before
    this call.

    A parameter that has replaced another one under its name (a new layer, a resized embedding) is a new one. One that
    the model lacks now loses its place and its gradient, leaves the optimizer's groups, and is a plain tensor with its
    last values; no update reaches it, and checkpoints leave it out. The old place in a bucket is not used again;
    `close` and `compile` make a plan without it. Each rank keeps its elements of the optimizer state while the program
    has the parameter. If it comes back, this call returns it to its group, unless it has one by then, with its state,
    for which ranks exchange it whole, one parameter at a time. ``del optimizer.state[param]``, on all ranks, has it
    begin anew. Parameters that have another name now or are tied keep their place and state: checkpoints have the
    names of now.

    Raises:
        PlanError, TypeError: as `compile`; nothing has changed. RankMismatchError: ranks differ in what is trainable.
    """
    compiled = sharded(model)
    with compiled.runtime.weights.named_plainly():
        _recompile(model, compiled)


def _recompile(model: nn.Module, compiled: ShardedModel) -> None:
    runtime, config, ranks = compiled.runtime, compiled.runtime.config, compiled.runtime.group
    with contextlib.ExitStack() as undo:
        with ranks.refuse_together():
            left = _gone(model, runtime)
            trained_before = {id(param) for param in runtime.params.values()}
            new = {n: p for n, p in trainable(model).items() if id(p) not in trained_before}
            for one in compiled.optimizers:
                undo.callback(one.put_back(new.values()))
            if (new or left) and config.offload is not None:
                raise PlanError(
                    f"zc.recompile does not work with offload={config.offload!r} yet: unfreeze all parameters before "
                    "zc.compile"
                )
            optimizers = tuple(sharded_optimizer.optimizer for sharded_optimizer in compiled.optimizers)
            check_shared(model, new)
            check_added(model, new, optimizers, runtime.plan.buckets[0].device)
            planned = {id(param): name for name, param in runtime.placed.items()}  # frozen ones in shards
            staying = runtime.placed.keys() - left.keys()
            params = {planned.get(id(p)) or _free(n, staying): p for n, p in new.items()}
            rules = tuple(sharded_optimizer.rule for sharded_optimizer in compiled.optimizers)
            added = Assignment(compiled.container, optimizers, rules, params, owners_of(params, optimizers))
            plan = _longer_plan(model, runtime.plan.without(left), added, config, ranks)
        ranks.same_everywhere(
            "the set of trainable parameters",
            [*fingerprint(model, config, added), *(f"{name} was replaced" for name in left)],
            "Freeze, unfreeze and replace the same parameters on all ranks",
        )
        undo.pop_all()
    if not params and not left:
        find_again(runtime)
        guards.remember_names(model, runtime)
        return
    buckets = plan.buckets[len(runtime.plan.buckets) :]
    weights, moved = runtime.weights, params.keys() - left.keys()
    with weights.leaving(moved, left):
        if left:
            weights.synchronize()
            runtime.leave(left)
        runtime.grow(plan, params)
        fill(runtime, buckets)
    compiled.leave(left)
    compiled.adopt(buckets)
    find_again(runtime)
    weights.install_hooks(model)
    guards.pickle_without_hooks(model, weights)
    trained = {id(param) for param in runtime.params.values()}  # its first name may be another one now
    frozen = {n: p for n, p in model.named_parameters() if id(p) not in trained}
    known = {id(param) for param in runtime.frozen.values()}
    own = left_to_ranks(model)
    broadcast([p for n, p in frozen.items() if id(p) not in known and n not in own], ranks)
    runtime.frozen.clear()
    runtime.frozen.update(frozen)
    guards.remember_names(model, runtime)


def _gone(model: nn.Module, runtime: Runtime) -> dict[str, nn.Parameter]:
    """Those of the plan that the model lacks; with offload only those whose names others have, which is refused."""
    ids = {id(param) for param in model.parameters()}
    gone = {name: param for name, param in runtime.placed.items() if id(param) not in ids}
    if runtime.plan.offload is None:
        return gone
    now = dict(model.named_parameters(remove_duplicate=False))
    return {name: param for name, param in gone.items() if name in now}


def _free(name: str, names: Collection[str]) -> str:
    """A name for a new parameter, where the plan has another one under its name. It is in no block: a new layer or
    block stands in its place in the model, and is compiled with what stands around blocks."""
    while name in names:
        name = f"(new) {name}"
    return name


def _longer_plan(model: nn.Module, plan: Plan, added: Assignment, config: Config, ranks: Group) -> Plan:
    """``plan`` with buckets for the parameters of ``added`` after its own."""
    if not added.params:
        return plan
    longer = plan_of(model, added, config, ranks, plan)
    check_plan(longer)
    moved = (replace(b, index=b.index + len(plan.buckets)) for b in longer.buckets)
    shorter = plan.without(added.params)
    return replace(shorter, buckets=(*shorter.buckets, *moved))


def close(model: nn.Module) -> None:
    """Releases, on all ranks, a compiled model's process groups, threads, masters, gradients and optimizer state.

    A model that is not compiled, or already closed, is left alone. Afterwards ``model`` is a plain module, equal on
    every rank: whole parameters in their current dtype, in their own memory, without gradients. It can be evaluated,
    saved, and compiled again with a new optimizer. The old optimizer has neither parameters nor state, and its
    ``step()`` raises. Save before you close (`zc.save`; with offload="disk" `zc.flush_state`). A pending asynchronous
    save is finished first.

    A program that only drops the model need not call it. Memory and threads are released with the model. The next
    `compile` or `close` of the same ranks releases its process groups and the page-locked host memory of offload.

    Raises:
        RankMismatchError, RankLostError: not all ranks have called it. Everything on this rank is closed except the
            groups.
        CheckpointError: the pending save has failed; nothing has changed.
        ZcError: it was called inside `whole_parameters` of sharded weights, or with something that is no model;
        nothing has changed.
    """
    if not isinstance(model, nn.Module):
        raise ZcError(f"zc.close takes the compiled model, not a {type(model).__name__}: call zc.close(model)")
    unlock_dropped()
    compiled = COMPILED.get(model)
    if compiled is None:
        return
    runtime = compiled.runtime
    if runtime.plan.sharded and runtime.weights.is_unsharded:
        raise ZcError(
            "zc.close was called inside `with zc.whole_parameters(model)`, which at its end writes the shards that "
            "zc.close releases: leave it before you close the model"
        )
    finish_pending(compiled)
    try:
        with contextlib.suppress(ZcError):  # of a step that was given up
            runtime.clear(set_to_none=True)  # after a backward that raised here, others wait for the agreed reductions
            runtime.streams.synchronize()
            runtime.weights.synchronize()
            runtime.weights.unshard()
        runtime.group.close()
    finally:
        _make_plain(model, compiled)


def _make_plain(model: nn.Module, compiled: ShardedModel) -> None:
    """Removes from the model and its optimizers what `zc.compile` has put there."""
    del COMPILED[model]
    if compiled.runtime.buffer_sync is not None:
        compiled.runtime.buffer_sync.take_received()
    for take_off in compiled.at_close:
        take_off(model)
    torch_private.call_instead(model, None)
    restore(compiled.runtime, {name: param.dtype for name, param in compiled.runtime.placed.items()})
    for sharded_optimizer in compiled.optimizers:
        sharded_optimizer.let_go()
        restore_methods(sharded_optimizer)
        sharded_optimizer.optimizer.register_step_pre_hook(refuse_closed)


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Declares that the backward calls inside are not the last before an update.

    Stage 1 then skips their reduction. Stage 2 reduces every backward, since it keeps no full-size gradient, so ranks
    wait for each other inside, too. If they have different numbers of such backwards, the loop may call no collective
    of its own before the next backward outside, or RankMismatchError is raised. Forgetting no_sync changes no number,
    it only costs communication.
    """
    with sharded(model).runtime.no_sync():
        yield


def synchronize(model: nn.Module) -> None:
    """With ``overlap_gather``: makes the current stream (on CPU: this thread) wait for all gathers of new weights.

    Only needed between ``optimizer.step()`` and the next forward, before a read that torch does not see: by a C++
    extension that takes tensors past torch's dispatch, or by an address or a DLPack capsule from before the step.
    Does nothing without ``overlap_gather``. The host does not wait on CUDA.
    """
    sharded(model).runtime.weights.synchronize()


def flush_state(model: nn.Module) -> None:
    """With ``offload="disk"``: makes ``offload_dir`` complete, on all ranks, and returns when it is on the disk.

    A later `compile` with the same folder, plan and optimizer continues with the state if the model has the present
    weights (save them beside it); with other weights it raises. From the next update on the folder is not complete,
    and a run that finds it so starts with fresh state and says that. Save hyper-parameters and schedulers yourself.

    Raises:
        PlanError: the model has no state on a disk, or not all of its state is there. OSError, RankMismatchError: the
        disk refused, here or on another rank; the folder is then not complete.
    """
    sharded(model).flush_state()


def count(model: nn.Module, num_tokens: float | Tensor) -> None:
    """The loss of one backward is a sum over ``num_tokens`` tokens (or samples, or their weights): gradients become the
    mean over the tokens of all ranks and all backwards of the update, whose numbers need not be known before::

        for batch in microbatches:
            zc.count(model, batch.labels.ne(-100).sum())
            cross_entropy(model(batch.inputs), batch.labels, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()

    A mean of means, of ranks or microbatches, weighs a token by how few others its microbatch has
    (https://huggingface.co/blog/gradient_accumulation). Call it once for each backward, before or after it, after
    ``zero_grad()``; on every rank that has a backward, or on none. It exchanges nothing: the counts travel with what
    ranks tell each other before an update. Clipping, norms and ``param.grad`` see the mean over tokens.

    Args:
        num_tokens: at least 0. Of a tensor on a device, the host waits for it.

    Raises:
        ValueError: ``num_tokens`` is negative or not finite. The next read of gradients or ``step()`` raises ZcError,
        on all ranks and before anything changes, if a backward was not counted once, or if the counts add up to 0; so
        does a backward that would add to gradients that are divided already.
    """
    number = float(num_tokens) if isinstance(num_tokens, SupportsFloat) else math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"zc.count takes a finite number of tokens, at least 0, not {num_tokens!r}")
    sharded(model).runtime.count_tokens(number)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients so that their joint 2-norm is at most ``max_norm``; one collective.

    Returns the norm before, fp32, 0-d: the norm of the mean gradient over all ranks, each element counted once, as
    `torch.nn.utils.clip_grad_norm_` gives it under DDP. A NaN or infinity stays one.

    Raises:
        ValueError: ``max_norm`` is negative, NaN or no number; nothing has changed.
    """
    number = float(max_norm) if isinstance(max_norm, SupportsFloat) else math.nan
    if not number >= 0:
        raise ValueError(f"zc.clip_grad_norm_ takes a largest norm of at least 0, such as 1.0, not {max_norm!r}")
    return sharded(model).grad_shards.clip_grad_norm_(number)


def grads_are_finite(model: nn.Module) -> bool:
    """Whether all gradients of all ranks are finite: no infinity, no NaN. The same answer on every rank.

    Every rank must call it. It shares its one collective with clipping, and waits for the device.
    """
    return sharded(model).grad_shards.are_finite()


def full_grad(model: nn.Module) -> dict[str, Tensor | None]:
    """Every trainable parameter's reduced gradient, gathered on all ranks, in the parameter's shape and the
    accumulator's dtype; None where no rank has one. For inspection, not for training: it holds all gradients at
    once."""
    compiled = sharded(model)
    gathered: dict[str, Tensor | None] = {}
    for bucket in compiled.runtime.plan.buckets:
        gathered.update(compiled.grad_shards.full_grads(bucket))
    now = compiled.runtime.names_now()
    return {now.get(id(param), name): gathered[name] for name, param in compiled.runtime.params.items()}


T = TypeVar("T")


def join(model: nn.Module, batches: Iterable[T], *, microbatches: int = 1) -> Iterator[T | None]:
    """This rank's batches, then None while another rank still has some, so that all ranks make equally many updates::

        for batch in zc.join(model, loader):
            if batch is not None:
                loss_of(model, batch).backward()
            zc.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    A rank without a batch adds nothing, and gradients stay the mean over *all* ranks, as under DDP's Join with
    ``divide_by_initial_world_size=True``, its default. It must still call ``step()`` and everything else that all
    ranks call together: `clip_grad_norm_` (torch's own looks for a ``param.grad`` first, which such a rank may
    lack), `save`, a collective of the loop. Buffers stay rank 0's: those of its last forward.

    Args:
        microbatches: batches per update: call ``step()`` after so many items, None or not. Ranks ask each other once
            per update whether any has data left: an exchange of a few bytes in host memory.
    """
    check_count("microbatches", microbatches)
    return _joined(sharded(model).runtime.group, iter(batches), microbatches)


def _joined(group: Group, batches: Iterator[T], microbatches: int) -> Iterator[T | None]:
    # Ranks exchange this only between two updates, where all have made equally many announcements. Inside an update
    # they may have different numbers of backwards, and so of announcements (zc/engine/announcements.py).
    while True:
        batch = next(batches, None)
        if not group.max_on_host([int(batch is not None)])[0]:
            return
        yield batch
        for _ in range(microbatches - 1):
            yield next(batches, None)
