"""Moves the weights of a model to their places in the plan, and back.

Models on the meta device (stage 3) get a device, without bytes, and their values unit by unit. `compile` gives each
parameter its place in a shard. A value then comes from a checkpoint (`zc.load`), from a folder of safetensors
(`zc.load_pretrained`), or from the modules themselves (`zc.initialize`). No rank ever holds more than its shards and
one module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.checks import left_to_ranks
from zc.engine.memory_order import flattened, in_shape
from zc.engine.param_checks import poison
from zc.errors import PlanError
from zc.planning.plan import Bucket
from zc.ranks.group import Group
from zc.weights.param import without_bytes

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime


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
