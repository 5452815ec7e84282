"""Exports for programs without zc: safetensors, and a plain optimizer state.

zc.export("out/model", "out/checkpoints/step_1000", dtype=torch.bfloat16)       # or a compiled model
torch.optim.AdamW(model.parameters()).load_state_dict(zc.full_optimizer_state(model, optimizer))
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import Optimizer

from zc.checkpoint.files import Reader
from zc.checkpoint.other_state import state_by_string, states_of_frozen
from zc.checkpoint.save_load import host_copy, synchronized
from zc.checkpoint.saving import channel_of, checkpoint_errors
from zc.checkpoint.shards import ShardOf
from zc.checkpoint.state import groups_of, owned, state_of
from zc.checkpoint.together import refuse_together
from zc.durable import write_synced
from zc.engine.memory_order import in_shape
from zc.errors import CheckpointError
from zc.optim.assignment import Optimizers, innermost, like_container
from zc.registry import sharded
from zc.whole import whole_values

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel
    from zc.optim.optimizer import ShardedOptimizer

_T = TypeVar("_T")
SHARD_NBYTES = 5 * 10**9  # the Hub's usual file size
INDEX = "model.safetensors.index.json"


def export(
    path: str | Path,
    source: str | Path | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    shard_nbytes: int = SHARD_NBYTES,
) -> list[Path]:
    """Writes weights as safetensors under the module's names, in the layout of the Hugging Face Hub: those of a
    checkpoint, or of a compiled model.

    For a checkpoint one process calls it, without a model or a process group. For a model all ranks call it, between
    two updates; rank 0 writes, and in stage 3 weights come to it as in `iter_weights`. Who writes holds at most one
    file's tensors in memory. A tied weight is written under its first name (transformers ties it again). Extra states
    of modules, which are not tensors, are left out.

    Args:
        path: a folder, created if missing. It gets ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and
            ``model.safetensors.index.json``. It must have no files of these names.
        source: a folder that `save` wrote, or a model that `compile` returned.
        dtype: the dtype of floating-point tensors. None keeps theirs: fp32 for the masters of a checkpoint, and for a
            model the dtype of its parameters.
        shard_nbytes: the size limit of a file, unless one tensor is larger.

    Returns:
        The files that contain tensors.

    Raises:
        CheckpointError, of a model on every rank: the folder has such files, or can't be written; or the checkpoint has
            no weights. The folder then has none of them.
    """
    if isinstance(source, nn.Module):
        return _export_model(Path(path), source, dtype, shard_nbytes)
    return _export_checkpoint(Path(path), Path(source), dtype, shard_nbytes)


def _export_checkpoint(path: Path, checkpoint: Path, dtype: torch.dtype | None, shard_nbytes: int) -> list[Path]:
    metadata = Reader(checkpoint).read_metadata()
    weights = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    if not weights:
        raise CheckpointError(f"{checkpoint} has no weights: no key begins with model.")
    with _Folder(path) as folder:
        for entries in _in_files(((key, _nbytes(weights[key], dtype), weights[key]) for key in weights), shard_nbytes):
            items: dict[str, Any] = {k: torch.empty(e.size, dtype=e.properties.dtype) for k, e in entries.items()}
            with checkpoint_errors(f"exporting {checkpoint}"):
                dcp_load(items, storage_reader=Reader(checkpoint), no_dist=True)
            folder.write({key.removeprefix("model."): _cast(value, dtype) for key, value in items.items()})
        return folder.finish()


def _export_model(path: Path, model: nn.Module, dtype: torch.dtype | None, shard_nbytes: int) -> list[Path]:
    sharded_model = sharded(model)
    channel, what = channel_of(sharded_model), f"exporting {type(model).__name__} to {path}"
    is_writer, files = sharded_model.runtime.group.rank == 0, list[Path]()
    with channel.together(what):
        folder = _Folder(path) if is_writer else None
    with channel.together(what), contextlib.ExitStack() as stack:
        values = stack.enter_context(contextlib.closing(whole_values(model, is_wanted=is_writer)))
        if folder is None:
            for _ in values:
                pass
        else:
            stack.enter_context(folder)
            copies = ((keys[0], _cast(value.to("cpu", copy=True), dtype)) for keys, value in values)
            for tensors in _in_files(((name, tensor.nbytes, tensor) for name, tensor in copies), shard_nbytes):
                folder.write(tensors)
            files = folder.finish()
    written: list[Path] = channel.group.gather_objects(files, what)[0]
    return written


class _Folder:
    """A folder that gets files of safetensors. They have their names when all are there; after an error none stays."""

    def __init__(self, path: Path) -> None:
        known = ("model.safetensors", "model-*-of-*.safetensors", INDEX)
        for file in sorted(file for pattern in known for file in path.glob(pattern)):
            raise CheckpointError(f"{file} exists already: nothing is overwritten")
        path.mkdir(parents=True, exist_ok=True)
        self.path, self._nbytes = path, 0
        self._unfinished: list[tuple[Path, list[str]]] = []  # and the names of its tensors

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *error: object) -> None:
        for file, _ in self._unfinished:
            file.unlink(missing_ok=True)

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Writes the next file."""
        from safetensors.torch import save_file

        file = self.path / f".model-{len(self._unfinished) + 1:05d}.partial"
        self._unfinished.append((file, list(tensors)))
        save_file(tensors, str(file), metadata={"format": "pt"})
        self._nbytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self) -> list[Path]:
        num, where, files = len(self._unfinished), dict[str, str](), list[Path]()
        for k, (file, names) in enumerate(self._unfinished, start=1):
            files.append(self.path / (f"model-{k:05d}-of-{num:05d}.safetensors" if num > 1 else "model.safetensors"))
            os.rename(file, files[-1])
            where.update(dict.fromkeys(names, files[-1].name))
        if num > 1:
            content = {"metadata": {"total_size": self._nbytes}, "weight_map": dict(sorted(where.items()))}
            write_synced(self.path / INDEX, json.dumps(content, indent=2).encode())
        return files


def _in_files(items: Iterable[tuple[str, int, _T]], largest: int) -> Iterator[dict[str, _T]]:
    """What each file has of ``items``, (name, bytes, value), as they come."""
    found: dict[str, _T] = {}
    filled = 0
    for name, nbytes, value in items:
        if found and filled + nbytes > largest:
            yield found
            found, filled = {}, 0
        found[name] = value
        filled += nbytes
    if found:
        yield found


def _nbytes(entry: TensorStorageMetadata, dtype: torch.dtype | None) -> int:
    own = entry.properties.dtype
    return int(entry.size.numel()) * (dtype if dtype is not None and own.is_floating_point else own).itemsize


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def full_optimizer_state(model: nn.Module, optimizer: Optimizers) -> Any:
    """Returns, on rank 0 in host memory, the ``state_dict()`` that the optimizer would have without zc; None on others.

    With several optimizers it returns a list or a dict of states, like the container that `compile` got. With one of
    several, it returns the state of that one.

    ``type(optimizer)(model.parameters(), ...).load_state_dict(...)`` loads the state, if the parameters come in the
    optimizer's original order. Every rank calls it. Rank 0 needs memory for the whole state, which it receives one
    tensor at a time.
    """
    sharded_model = sharded(model)
    inside = innermost(optimizer) if isinstance(optimizer, Optimizer) else None
    alone = [each for each in sharded_model.optimizers if each.optimizer is inside]
    synchronized(model, sharded_model.container if alone else optimizer)
    refuse_together(sharded_model, alone or sharded_model.optimizers, "zc.full_optimizer_state")
    state: dict[str, dict[str, Any]] = state_of(model, sharded_model)["optimizer"]["state"]
    parts = []
    for one in alone or sharded_model.optimizers:
        numbers, groups = _numbered(one)
        whole = whole_states(sharded_model, one, state)
        by_number = {numbers[name]: values for name, values in whole.items()}
        parts.append({"state": {**by_number, **host_copy(state_by_string(one))}, "param_groups": groups})
    return like_container(optimizer, parts) if sharded_model.runtime.group.rank == 0 else None


def whole_states(
    sharded_model: ShardedModel, one: ShardedOptimizer, states: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The whole states of ``one`` by parameter name, in host memory, frozen parameters included. Those that train are
    on rank 0 alone. ``states``: this rank's parts. All ranks call it."""
    whole = gather_parts(sharded_model, one, states, "the whole optimizer state")
    whole.update(host_copy(states_of_frozen(one)))
    return whole


def gather_parts(
    sharded_model: ShardedModel, one: ShardedOptimizer, parts: Mapping[str, Mapping[str, Any]], what: str
) -> dict[str, dict[str, Any]]:
    """Gathers ``parts``, by parameter name, on rank 0 as whole tensors; an empty dict elsewhere. All ranks call it.
    ``what`` names them in errors."""
    runtime, gather = sharded_model.runtime, partial(_gather, sharded_model, one, parts)
    device = runtime.plan.buckets[0].device
    whole: dict[str, dict[str, Any]] = runtime.group.call(f"gathering {what}", gather, device)
    return whole


def _gather(
    sharded_model: ShardedModel, one: ShardedOptimizer, parts_by_name: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Only the first replica takes part: the others have the same state."""
    ranks = sharded_model.runtime.group
    group, rank, replicas = ranks.shard, ranks.shard.rank, ranks.replicas
    whole: dict[str, dict[str, Any]] = {}
    if replicas is not None and replicas.rank > 0:
        return whole
    for name, own in owned(sharded_model).items():
        if own.optimizer is not one:
            continue
        mine = parts_by_name.get(name, {})
        shapes = {key: isinstance(value, ShardOf) for key, value in mine.items()}
        everyone: list[Any] = [(own.start, own.numel, shapes)]
        if group.world_size > 1:
            everyone = everyone * group.world_size
            dist.all_gather_object(everyone, (own.start, own.numel, shapes), group=group.control)
        keys: dict[str, bool] = next((keys for _, numel, keys in everyone if numel and keys), {})
        for key, is_sharded in keys.items():
            value = mine.get(key)
            local = value.local.detach().cpu() if isinstance(value, ShardOf) else value
            parts: list[Any] | None = [local] if group.world_size == 1 else None
            if group.world_size > 1:
                parts = [None] * group.world_size if rank == 0 else None
                dist.gather_object(local, parts, group_dst=0, group=group.control)
            if parts is None:
                continue
            have = [(start, part) for (start, numel, _), part in zip(everyone, parts, strict=True) if numel]
            if is_sharded:
                joined = torch.cat([part for _, part in sorted(have, key=lambda item: item[0])])
                gathered_value: Any = in_shape(joined, own.slot)
            else:
                gathered_value = have[0][1]
            whole.setdefault(name, {})[key] = gathered_value
    return whole


def _numbered(sharded_optimizer: ShardedOptimizer) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Numbers the parameters across all groups, as a plain optimizer's state_dict does."""
    numbers: dict[str, int] = {}
    groups: list[dict[str, Any]] = []
    count = 0
    for group in groups_of([sharded_optimizer]):
        names = group["params"]
        numbers.update({name: count + k for k, name in enumerate(names)})
        groups.append({**group, "params": list(range(count, count + len(names)))})
        count += len(names)
    return numbers, groups
