"""Checks that `zc.compile` makes before it changes anything: of the model and its optimizers; then, as `zc.plan` does,
of options and plans against the ranks, the optimizers' rules and the memory of this machine. Each raises its own error.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zc import torch_private
from zc.config import DTYPES, Config
from zc.errors import PlanError, some
from zc.machine import available_nbytes, free_nbytes, has_streams, ranks_on_this_host
from zc.optim.assignment import Assignment
from zc.optim.trials import num_kept
from zc.planning.allocations import resident
from zc.planning.layout import Rule
from zc.planning.plan import Plan
from zc.registry import COMPILED

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
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel) and any(p.requires_grad for p in module.parameters()):
            raise PlanError(
                f"{name} is a DistributedDataParallel, which would average its parameters' gradients after zc has "
                f"taken them: put the module inside it in its place, {name}.module"
            )


def check_model(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trainable parameters. Raises PlanError, naming one that can't be planned."""
    params = trainable(model)
    if not params:
        raise PlanError(
            f"{type(model).__name__} has no trainable parameter (requires_grad is False for all): "
            "call requires_grad_(True) on those that shall train"
        )
    check_shared(model, params)
    _check_shards(model)
    _check_tensors(params)
    _check_sparse(model)
    _check_devices(params)
    _check_writable(model)
    _check_storages(params, _others(model, params))
    return params


def _check_shards(model: nn.Module) -> None:
    """Raises PlanError for a parameter, frozen or not, of which another model has shards."""
    for other, theirs in COMPILED.items():
        plan = theirs.runtime.plan
        in_shards = {id(theirs.runtime.placed[name]) for name in plan.sharded_names}
        for name, param in model.named_parameters():
            if id(param) in in_shards:
                raise PlanError(
                    f"parameter {name} is one of another model, {type(other).__name__}, that zc has compiled with "
                    f"{plan.why_sharded}: outside of that model's calls it has no bytes. Compile one module that holds "
                    "both, or that model with stage=1 or 2 and without shard_frozen"
                )


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


def check_added(
    model: nn.Module, params: dict[str, nn.Parameter], optimizers: Sequence[Optimizer], device: torch.device
) -> None:
    """Checks the parameters that `zc.recompile` adds to a plan on ``device``, as `check_model` does."""
    _check_tensors(params)
    with torch_private.without_torch_function():  # those of the plan may have no bytes
        _check_writable(model)
        _check_storages(params, _others(model, params))
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
        if any(torch_private.num_accumulate_hooks([param])):
            other = next((each for each in COMPILED if any(param is theirs for theirs in each.parameters())), None)
            if other is not None:
                raise PlanError(
                    f"parameter {name} is one of another model, {type(other).__name__}, that zc has compiled and whose "
                    "optimizer updates it: compile one module that holds both, with one optimizer, or freeze it here"
                )
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


def _check_storages(params: Mapping[str, nn.Parameter], others: Mapping[str, Tensor]) -> None:
    """Raises PlanError for a parameter that shares a part of a storage with another one, or with one of ``others``:
    it gets its own place in flat_param, where they would see no update. (A tied weight is one tensor under two names,
    which named_parameters lists once.)"""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, one in (*params.items(), *others.items()):
        if one.numel() == 0:
            continue
        low = int(one.storage_offset()) * one.element_size()
        extent = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
        high = low + int(extent + 1) * one.element_size()
        storage = _storage_of(one)
        for other_low, other_high, other in spans.setdefault(storage, []):
            if low < other_high and other_low < high:
                what, way = "parameters", "tie weights by assigning the same Parameter to both modules"
                if not one.requires_grad:
                    what, way = "a parameter and what takes no gradient,", f"give {name} memory of its own by .clone()"
                raise PlanError(
                    f"{what} {other} and {name} share a part of one storage (bytes {other_low}:{other_high} and "
                    f"{low}:{high}); {way}"
                )
        if name in params:
            spans[storage].append((low, high, name))


def _others(model: nn.Module, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The buffers and other parameters that lie in one storage, and wrap no other tensors."""
    every = (*model.named_parameters(), *model.named_buffers())
    return {n: t for n, t in every if n not in params and type(t.data) is Tensor and t.layout == torch.strided}


def _check_writable(model: nn.Module) -> None:
    """Raises PlanError for a buffer or parameter into which no rank can copy rank 0's values."""
    own = left_to_ranks(model)
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if name in own or one.is_meta:
            continue
        kind = "parameter" if isinstance(one, nn.Parameter) else "buffer"
        if one.is_inference():
            raise PlanError(
                f"{kind} {name} was made under torch.inference_mode(), and can't be written or trained outside of it: "
                "make it under torch.no_grad(), or give the module a .clone() of it, made outside, in its place"
            )
        if one.is_nested or one.layout != torch.strided:
            raise PlanError(
                f"{kind} {name} {'is nested' if one.is_nested else f'has layout {one.layout}'}: zc can't copy rank 0's "
                "values into it. Put a dense tensor in its place, or keep it as an attribute of its module that is "
                "no buffer and no parameter"
            )
        if one.numel() and any(n > 1 and s == 0 for n, s in zip(one.shape, one.stride(), strict=True)):
            raise PlanError(
                f"{kind} {name} {tuple(one.shape)} was made by expand: its strides are {one.stride()}, so several "
                "elements are one place in memory, which can't be written. Give it its own memory by .clone()"
            )


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


def _storage_of(tensor: Tensor) -> int:
    # one without bytes has no address
    return tensor.untyped_storage().data_ptr() or torch_private.storage_number(tensor)


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
        name, keys = type(optimizer).__name__, [*{str(key): None for state in by_param for key in state}]
        fresh = "" if "step" in keys else f". If a fresh {name} has its {some(keys)} already, zc can't train with it"
        raise PlanError(
            f"the {name} has state for {len(by_param)} parameters already, of steps without "
            "zc (DDP's, say): give zc.compile a fresh optimizer, then load the state of the old one by "
            'zc.load_state_dict(model, optimizer, {"model": model.state_dict(), "optimizer": old.state_dict()})' + fresh
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
        who, what = "the optimizer lacks", "add them"
        rest = "A second optimizer for them goes along as zc.compile(model, [first, second])"
        if len(optimizers) > 1:
            who, what = f"none of the {len(optimizers)} optimizers has", "add them to one of them"
            rest = "Where each rank picks its own (by RANK, for Muon), give all to each rank: zc shares them out"
        raise PlanError(
            f"{who} {len(lacking)} trainable parameter(s) of the model: {some(lacking)}; {what}, or freeze them with "
            f"requires_grad_(False). {rest}"
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


def check_replicas(config: Config, num_replicas: int) -> None:
    """Raises PlanError for options that a mesh of two dimensions excludes."""
    if num_replicas == 1:
        return
    shape = f"a mesh of two dimensions with {num_replicas} replicas"
    for option, name in config.encodings:
        raise PlanError(
            f"{option} and {shape}: these send sums back to each other in fp32. Leave {name} out, or give a mesh of "
            "one dimension, where each rank has a shard of its own"
        )
    if config.reduce != "exact":
        raise PlanError(
            f"reduce={config.reduce!r} and {shape}: replicas stay equal because their sums are made in one order; "
            "leave reduce at 'exact', or give a mesh of one dimension"
        )
    if config.offload is not None:
        raise PlanError(
            f"offload={config.offload!r} and {shape}: what is sharded inside `shard` alone is not offloaded yet; leave "
            "offload out, or give a mesh of one dimension, which shards over all ranks"
        )


def check_encodings(config: Config, dtypes: Mapping[str, torch.dtype], rules: Sequence[Rule]) -> None:
    """Raises PlanError for parameters, by name, and optimizers of which nothing can travel encoded
    (`zc.planning.wire`)."""
    wide = next((name for name, dtype in dtypes.items() if dtype == torch.float64), None)
    for option, name in config.encodings:
        if wide is not None:
            raise PlanError(f"{wide} is torch.float64, of which {option} would keep 8 bits: leave {name} out")
        if name == "gather_dtype" and any(rule.whole for rule in rules):
            raise PlanError(
                f"{option} and an optimizer that reads whole parameters: what a rank updates is then no shard, and "
                "goes to the shards as it is; leave gather_dtype out. reduce_dtype=torch.int8 works"
            )


def check_plan(plan: Plan) -> None:
    """Raises PlanError if a reduction would round or overflow sums, or gathered weights have too little room."""
    for bucket in plan.buckets:
        if bucket.acc_dtype == torch.float64 and bucket.grad_dtype != torch.float64:
            raise PlanError(
                f"{bucket.slots[0].name} is {bucket.param_dtype} and its gradients are summed in float64, which "
                f"reduce_dtype={bucket.grad_dtype} would round: leave reduce_dtype at None"
            )
        if plan.reduce == "native" and bucket.grad_dtype == torch.float16 and plan.num_ranks > 1:
            raise PlanError(
                f"reduce='native' lets the backend sum the gradients of {bucket.slots[0].name} in float16, and a sum "
                f"over {plan.num_ranks} ranks may pass its largest number, 65504, where the mean does not: leave out "
                "reduce='native', for sums in float32, or give reduce_dtype=torch.float32"
            )
        if not plan.placement.shards_gradients and bucket.grad_dtype != bucket.acc_dtype:
            raise PlanError(
                f"stage 1 reduces sums in {bucket.acc_dtype}; reduce_dtype={bucket.grad_dtype} would round them: "
                "leave reduce_dtype at None, or use stage 2"
            )
    if not plan.sharded:
        return
    if plan.placement.shards_weights and plan.offload is not None and plan.offload.state_on_disk:
        raise PlanError(
            "stage=3 and offload='disk': zc.flush_state compares checksums of whole weights, which no rank has; use "
            "offload='cpu', or stage=2"
        )
    largest = max(plan.sharded, key=lambda b: b.nbytes)
    if plan.weight_cap < (least := largest.nbytes_gathered):
        raise PlanError(
            f"weight_nbytes={plan.weight_cap} is too small: the largest bucket ({largest.slots[0].name}, ...) has "
            f"{largest.nbytes} bytes of weights, so at least weight_nbytes={least} is needed; bucket_nbytes makes "
            "buckets smaller, down to the largest parameter"
        )


def check_scripts(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError for a module of TorchScript with parameters whose bytes come when Python code reads them."""
    names = {param: name for name, param in model.named_parameters()}
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        own = {names[param] for param in module.parameters()}
        why = plan.why_sharded if own & plan.sharded_names else "overlap_gather=True" if plan.overlap_gather else None
        if own and why is not None:
            raise PlanError(
                f"{name or 'the model'} was made by torch.jit.script or torch.jit.trace, so its code in C++ reads "
                f"parameters before zc can bring them, as {why} must: leave the option out, or take the module as it "
                "was before torch.jit"
            )


def check_shards_fit(plan: Plan) -> None:
    """For a model on meta. Raises PlanError unless this rank's shards fit, with the gathered weights of one unit."""
    device = plan.buckets[0].device
    kinds, _, _ = resident(plan, [0] * plan.num_optimizers)
    counted = ("weight", "frozen", "master_shard", "arena")
    needed = {kind: kinds[kind] for kind in counted if kind in kinds}
    advice = "use more ranks, a smaller bucket_nbytes or weight_nbytes, or offload='cpu'"
    if device.type == "cpu":
        check_room("stage=3", needed, ranks_on_this_host(plan.world_size), available_nbytes(), advice)
    else:
        check_room("stage=3", needed, 1, free_nbytes(device), advice)


def check_host(plan: Plan, assignment: Assignment) -> None:
    """For offload, whose update runs on the processor. Raises PlanError unless its memory fits into the host's."""
    states = []
    for optimizer in assignment.optimizers:
        name = type(optimizer).__name__
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise PlanError(
                f"offload: {name} was made with capturable=True, which keeps its state on the device; make it without"
            )
        for name_of, value in (item for group in optimizer.param_groups for item in group.items()):
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                raise PlanError(
                    f"offload: the {name_of!r} of {name} is a tensor on {value.device}, and its update in host memory "
                    "would copy it without waiting and read the copy at once: give a number, or a tensor in host memory"
                )
        states.append(num_kept(optimizer))
    _, needed, _ = resident(plan, states)
    advice = "use more machines, or a smaller part (offload_accumulate='device')"
    check_room("offload", needed, ranks_on_this_host(plan.world_size), available_nbytes(), advice)


def check_room(option: str, needed: Mapping[str, int], num_ranks: int, available: int | None, advice: str) -> None:
    """Raises PlanError, with both figures, unless ``num_ranks`` times the bytes ``needed`` by kind fit; ``available``
    None: nobody knows."""
    total = num_ranks * sum(needed.values())
    if available is not None and total > available:
        kinds = ", ".join(f"{name} {nbytes:,}" for name, nbytes in needed.items() if nbytes)
        raise PlanError(
            f"{option} needs {total:,} bytes of memory for {num_ranks} rank(s) here ({kinds} for each), and "
            f"{available:,} are available: {advice}"
        )
