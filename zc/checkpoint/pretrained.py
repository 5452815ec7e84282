"""Weights from a folder of safetensors, as transformers writes it: each rank reads its own elements of each tensor.

    model.safetensors                                             one file
    model.safetensors.index.json, model-00001-of-00002....        {"weight_map": {name: file}}

A file begins with 8 bytes, the length of a header of JSON; the header gives each tensor's dtype, shape and bytes
(https://github.com/huggingface/safetensors). Files are read, not mapped: what is mapped counts as the process's memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zc.checkpoint.export import INDEX
from zc.checkpoint.first_values import fill_modules
from zc.checkpoint.save_load import synchronized
from zc.checkpoint.saving import channel_of, checkpoint_errors
from zc.checkpoint.state import Owned, owned
from zc.checkpoint.target import Stored, check_tensor, refuse_other_model
from zc.engine.memory_order import flattened
from zc.errors import CheckpointError, some
from zc.registry import sharded

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_CHUNK_NBYTES = 1 << 24  # read at one time


@dataclass(frozen=True)
class StoredTensor(Stored):
    """One tensor of a file of safetensors, row-major from byte ``start`` on."""

    path: Path
    name: str
    start: int

    def read(self, first: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """(k, elements from ``first`` + k on), piece by piece."""
        step = max(1, _CHUNK_NBYTES // self.dtype.itemsize)
        with self.path.open("rb", buffering=0) as file:
            for at in range(first, stop, step):
                size = self.dtype.itemsize * (min(stop, at + step) - at)
                file.seek(self.start + at * self.dtype.itemsize)
                piece = bytearray(size)
                if file.readinto(piece) != size:
                    raise CheckpointError(f"{self.path} ended while {self.name} was read")
                yield at - first, torch.frombuffer(piece, dtype=self.dtype)


def load_pretrained(
    model: nn.Module, folder: str | Path, *, rename: Callable[[str], str | None] | None = None
) -> None:
    """Loads the weights of a folder of safetensors into a compiled model, whatever its stage. All ranks call it.

    ``folder`` has ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it names, with the
    names of ``model.state_dict()``; or is one file. Each rank reads its own elements alone, some megabytes at a time.
    Tied weights may be there under one name. Values are cast to the masters' dtype; the optimizer's state stays as it
    is. Buffers that are in no ``state_dict`` and were on meta are made by their modules, as by `initialize`.

    Args:
        rename: the folder's name for each name of the model; None: it is not there, and stays as it is. With peft the
            model's names have ``base_model.model.`` and ``.base_layer`` in addition.

    Raises:
        CheckpointError, on every rank: a name is missing, or the model lacks one; a shape differs; a file is missing
            or cut off; nothing has changed. Or a file can't be read to its end; the model then has a part of the
            values.
    """
    sharded_model = sharded(model)
    synchronized(model, sharded_model.container)
    sharded_model.take_over_writes()
    channel, what = channel_of(sharded_model), f"loading {folder}"
    with channel.together(what), checkpoint_errors(what):
        places = _match(model, sharded_model, Path(folder), rename)
    sharded_model.runtime.weights.before_writes()
    with channel.together(what), torch.no_grad():
        for stored, target in sorted(places.values(), key=lambda pair: (str(pair[0].path), pair[0].start)):
            _copy(stored, target)
    sharded_model.runtime.unset.params.difference_update(places)
    fill_modules(model, sharded_model, None, only_buffers=True)
    sharded_model.zero_grad()
    sharded_model.publish_all()


def _match(
    model: nn.Module, sharded_model: ShardedModel, folder: Path, rename: Callable[[str], str | None] | None
) -> dict[str, tuple[StoredTensor, Any]]:
    """By name of the model: what is read, and where it goes. Raises CheckpointError if the folder is of another
    model."""
    stored, mine = _tensors_in(folder), owned(sharded_model)
    in_buckets = {id(param): name for name, param in sharded_model.runtime.placed.items()}
    names: dict[int, list[str]] = {}  # of one tensor, as the folder has them
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        theirs = rename(name) if rename is not None else name
        if isinstance(value, Tensor) and theirs is not None:
            names.setdefault(id(value), []).append(theirs)
            tensors.setdefault(id(value), (in_buckets.get(id(value), name), value))
    missing = [known[0] for known in names.values() if not any(name in stored for name in known)]
    extra = stored.keys() - {name for known in names.values() for name in known}
    refuse_other_model(model, str(folder), missing, extra)
    places: dict[str, tuple[StoredTensor, Any]] = {}
    for number, (name, value) in tensors.items():
        source = stored[next(known for known in names[number] if known in stored)]
        check_tensor(str(folder), source.name, source, tuple(value.shape), value.dtype)
        places[name] = (source, mine.get(name, value))
    return places


def _tensors_in(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder, or of one file. Raises CheckpointError if something is missing or cut off."""
    if folder.is_file():
        return _header(folder)
    single, index = folder / "model.safetensors", folder / INDEX
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(f"{folder} has neither {single.name} nor {INDEX}")
        return _header(single)
    files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    absent = sorted({file for file in files.values() if not (folder / file).is_file()})
    if absent:
        raise CheckpointError(f"{index} names {len(absent)} file(s) that are not there: {some(absent)}")
    headers = {file: _header(folder / file) for file in sorted(set(files.values()))}
    lacking = [f"{name} in {file}" for name, file in files.items() if name not in headers[file]]
    if lacking:
        raise CheckpointError(f"{index} names tensors that are not there: {some(lacking)}")
    return {name: headers[file][name] for name, file in files.items()}


def _header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path} has {size} bytes: it is no safetensors file, or is cut off")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} is no safetensors file: {error}") from None
    stored: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"{path}: {name} has dtype {entry['dtype']}, zc reads {', '.join(_DTYPES)}")
        dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if stop - start != math.prod(shape) * dtype.itemsize or 8 + length + stop > size:
            raise CheckpointError(f"{path} is cut off: {name} ends at byte {8 + length + stop}, the file at {size}")
        stored[name] = StoredTensor(shape, dtype, path, name, 8 + length + start)
    return stored


def _copy(stored: StoredTensor, target: Owned | Tensor) -> None:
    """This rank's elements."""
    if isinstance(target, Tensor):
        flat = torch.empty(stored.shape, dtype=stored.dtype).view(-1)
        for at, piece in stored.read(0, flat.numel()):
            flat[at : at + piece.numel()] = piece
        target.detach().copy_(flat.view(stored.shape))
        return
    if target.slice is None or not target.numel:
        return
    out = flattened(target.slice.detach(), target.slot)
    if target.slot.order is None:
        for at, piece in stored.read(target.start, target.start + target.numel):
            out[at : at + piece.numel()].copy_(piece)
        return
    whole = torch.empty(stored.shape, dtype=stored.dtype)  # the rank's elements lie apart in the file
    for at, piece in stored.read(0, whole.numel()):
        whole.view(-1)[at : at + piece.numel()] = piece
    target.write(target.part_of(whole))
