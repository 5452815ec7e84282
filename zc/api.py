"""`zc.compile`, `zc.recompile` and `zc.close`: the weights of a model move to their places in the plan, and back.

Models on the meta device (stage 3) get a device, without bytes, and their values unit by unit. `compile` gives each
parameter its place in a shard. A value then comes from a checkpoint (`zc.load`), from a folder of safetensors
(`zc.load_pretrained`), or from the modules themselves (`zc.initialize`). No rank ever holds more than its shards and
one module.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

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
from zc.compiler.graphs import naming_limits
from zc.config import OPTIONS, Config
from zc.engine.buffer_sync import BufferSync
from zc.engine.buffers import Buffers
from zc.engine.core import Updater
from zc.engine.memory_order import flattened, in_shape
from zc.engine.param_checks import Unset, poison
from zc.engine.runtime import Runtime
from zc.engine.streams import make_streams
from zc.errors import PlanError, ZcError
from zc.offload.disk import DiskState
from zc.offload.host_step import HostMemory, HostStep, unlock_dropped
from zc.optim.assignment import Assignment, Container, is_elementwise
from zc.optim.model import ShardedModel
from zc.optim.optimizer import ShardedOptimizer, refuse_closed, replace_methods, restore_methods
from zc.planning.blocks import find_singles, matrices_around
from zc.planning.plan import Bucket, Plan
from zc.prepare import RANKS, Request, features_of, fingerprint, notes_of, plan_of, resolve
from zc.ranks.group import Group
from zc.ranks.meshes import ranks_of
from zc.registry import COMPILED, is_ours, sharded
from zc.report import diverged
from zc.weights.param import without_bytes


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
            inside one of several hosts, among CPU ranks of one that read each other's memory, and between replicas,
            everything is exact. Biases, norms and small parameters stay exact everywhere.
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
    with torch.inference_mode(False), contextlib.ExitStack() as undo:
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
    config = runtime.config
    call: Callable[..., Any] | None = None
    if config.backend != "eager" and not (runtime.plan.sharded and runtime.plan.kinds):
        backend = compiler.make_backend(runtime)
        compiled = torch_private.compiled_call(
            torch_private.object_call, backend, dynamic=config.dynamic, fullgraph=config.fullgraph
        )
        call = partial(compiled, module)
    call = runtime.weights.call_of(module, call)
    if sync is not None:
        call = _call_after(sync.before_forward, call or partial(torch_private.object_call, module))
    return call if call is None or config.backend == "eager" else naming_limits(call)


def _call_after(before: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``before``, which is not compiled, and then ``call``."""
    ahead = torch.compiler.disable(before)  # type: ignore[no-untyped-call]

    def start(*args: Any, **kwargs: Any) -> Any:
        ahead()
        return call(*args, **kwargs)

    return start


def _install(model: nn.Module, compiled: ShardedModel, call: Callable[..., Any] | None) -> None:
    """Puts hooks and methods on the caller's objects."""
    runtime = compiled.runtime
    runtime.install_hooks(runtime.plan.buckets)
    for optimizer in compiled.optimizers:
        replace_methods(model, optimizer)
        plain_state.install_marks(compiled, optimizer)
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
    places = compile_blocks(model, kinds, make_backend, dynamic, context)
    runtime.outside_blocks = matrices_around(model, kinds)
    singles = find_singles(model, kinds) if runtime.plan.sharded else []
    make_backend = partial(compiler.make_backend, runtime)
    places += compile_blocks(model, singles, make_backend, dynamic, context)
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
    with torch.inference_mode(False), compiled.runtime.weights.named_plainly():
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


@torch.inference_mode(False)
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


# --- how weights move to their places, and back ---


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], ranks: Group) -> None:
    """Gives all ranks rank 0's values of these tensors."""
    for tensor in tensors:
        # what travels are bytes, and those of a conjugate or negative view are others
        values = tensor.detach().resolve_conj().resolve_neg().contiguous()
        ranks.broadcast_(values)
        tensor.copy_(values)


def broadcast_rest(model: nn.Module, params: Mapping[str, nn.Parameter], ranks: Group) -> None:
    """Gives all ranks rank 0's buffers, and its parameters that are not among ``params``, which have buckets; not
    those that the program leaves to each rank."""
    in_buckets, own = {id(p) for p in params.values()}, left_to_ranks(model)
    rest = {n: p for n, p in model.named_parameters() if id(p) not in in_buckets}
    broadcast([tensor for n, tensor in (*rest.items(), *model.named_buffers()) if n not in own], ranks)


@torch.no_grad()
def fill(runtime: Runtime, buckets: Sequence[Bucket], unset: Collection[str] = ()) -> None:
    """Broadcasts the weights from rank 0, copies them to the masters, and makes flat_param the parameters' memory. It
    frees the old memory of a bucket's parameters before it allocates the next bucket. ``unset``: names of parameters
    that have no bytes, and no value."""
    ranks, buffers = runtime.group, runtime.buffers
    for bucket in buckets:
        buffers.add(bucket)
        is_sharded = runtime.plan.is_sharded(bucket)
        for slot in bucket.slots:
            shards = [buffers.weight_part(bucket, slot)] if is_sharded else []
            shards += filter(None, [buffers.master_part(bucket, slot)])
            if slot.name in unset:
                for shard, _ in shards:
                    poison(shard)
                continue
            param = runtime.placed[slot.name]
            values = flattened(param.detach(), slot)
            ranks.broadcast_(values)
            for shard, elements in shards:
                shard.copy_(values[elements])
            if is_sharded:
                del values
                param.data = without_bytes(param, bucket.param_dtype)
                continue
            place = buffers.flat_param[bucket.index][slot.offset : slot.stop]
            place.copy_(values)
            del values
            param.data = in_shape(torch_private.own_storage(place), slot)
        buffers.remember_shard(bucket)
    buffers.add_staging()
    runtime.accumulators.open_shards()
    if buffers.note is not None:
        runtime.say_once(buffers.note)


def snapshot(objects: Sequence[Any]) -> Callable[[], None]:
    """Returns a function that gives modules and optimizers the attributes, hooks and groups back that they have now. It
    refills their dicts in place, because handles of hooks refer to those."""
    dicts: list[dict[Any, Any]] = []
    for owner in objects:
        dicts += [vars(owner), *(value for value in vars(owner).values() if isinstance(value, dict))]
        dicts += getattr(owner, "param_groups", ())
    copies = [dict(items) for items in dicts]

    def put_back() -> None:
        for items, copy in zip(dicts, copies, strict=True):
            items.clear()
            items.update(copy)

    return put_back


@torch.no_grad()
def restore(runtime: Runtime, dtypes: Mapping[str, torch.dtype]) -> None:
    """The reverse of `fill`, also of one that has not come to its end: parameters are plain ones in these dtypes, with
    memory of their own and without gradients."""
    for handle in (*runtime.hooks, *runtime.weights.hooks):
        handle.remove()
    runtime.weights.let_go()
    runtime.buffers.close()  # Dynamo keeps compiled code, which refers to the runtime
    for name, param in runtime.placed.items():
        param.grad = None
        param.data = param.data.to(dtypes[name], copy=True, memory_format=torch.preserve_format)
    runtime.streams.close()


def move_from_meta(
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
        whole = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=where)
        bare = without_bytes(nn.Parameter(whole, requires_grad=False), param.dtype)
        empty = nn.Parameter(bare, requires_grad=param.requires_grad)
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
