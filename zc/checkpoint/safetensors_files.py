"""Weights as safetensors, in the layout of the Hugging Face Hub: `export` writes them, `load_pretrained` reads them.

    model.safetensors                                             one file
    model.safetensors.index.json, model-00001-of-00002....        {"weight_map": {name: file}}

A file begins with 8 bytes, the length of a header of JSON; the header gives each tensor's dtype, shape and bytes
(https://github.com/huggingface/safetensors). Each rank reads its own elements of each tensor. Files are read, not
mapped: what is mapped counts as the process's memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from zc.checkpoint.files import Reader
from zc.checkpoint.first_values import fill_modules
from zc.checkpoint.saving import channel_of, checkpoint_errors
from zc.checkpoint.state import Owned, owned, synchronized
from zc.checkpoint.target import Stored, check_tensor, refuse_other_model
from zc.engine.memory_order import flattened
from zc.errors import CheckpointError, some
from zc.machine import write_synced
from zc.registry import sharded, whole_values

if TYPE_CHECKING:
    from zc.optim.model import ShardedModel

_T = TypeVar("_T")
SHARD_NBYTES = 5 * 10**9  # the Hub's usual file size
INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "C64": torch.complex64,
}  # fmt: skip
_CHUNK_NBYTES = 1 << 24  # read at one time


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
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CheckpointError(
            f"zc.export was given dtype={dtype!r}, to which it casts weights: give a floating-point one, such as "
            "torch.bfloat16, or leave it out"
        )
    if isinstance(source, nn.Module):
        return _export_model(path, source, dtype, shard_nbytes)
    return _export_checkpoint(Path(path), Path(source), dtype, shard_nbytes)


def _export_checkpoint(path: Path, checkpoint: Path, dtype: torch.dtype | None, shard_nbytes: int) -> list[Path]:
    reader = Reader(checkpoint)
    metadata = reader.read_metadata()
    weights = {
        key: entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    if not weights:
        raise CheckpointError(f"{checkpoint} has no weights: no key begins with model.")
    with _Folder(path) as folder:
        for entries in _in_files(((key, _nbytes(weights[key], dtype), weights[key]) for key in weights), shard_nbytes):
            items: dict[str, Any] = {
                k: torch.empty(e.size, dtype=e.properties.dtype, device="cpu") for k, e in entries.items()
            }
            with checkpoint_errors(f"exporting {checkpoint}"):
                dcp_load(items, storage_reader=reader, no_dist=True)
            reader.check_unchanged()
            folder.write({key.removeprefix("model."): _cast(value, dtype) for key, value in items.items()})
        return folder.finish()


def _export_model(path: str | Path, model: nn.Module, dtype: torch.dtype | None, shard_nbytes: int) -> list[Path]:
    sharded_model = sharded(model)
    channel, what = channel_of(sharded_model), f"exporting {type(model).__name__} to {path}"
    is_writer, files = sharded_model.runtime.group.rank == 0, list[Path]()
    with channel.together(what):
        folder = _Folder(Path(path)) if is_writer else None
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


@dataclass(frozen=True)
class StoredTensor(Stored):
    """One tensor of a file of safetensors, row-major from byte ``start`` on."""

    path: Path
    name: str
    start: int

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, {self.shape}) at byte {self.start} of {self.path.name}"

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
        RankMismatchError: ranks gave other folders, or see other tensors or files there; nothing has changed.
    """
    sharded_model = sharded(model)
    synchronized(model, sharded_model.container)
    sharded_model.take_over_writes()
    channel, what = channel_of(sharded_model), f"loading {folder}"
    channel.same_call("zc.load_pretrained", folder)
    with channel.together(what), checkpoint_errors(what):
        places = _match(model, sharded_model, Path(folder), rename)
    channel.same_content(folder, [f"for {name}: {stored}" for name, (stored, _) in places.items()])
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
    stored, mine = _tensors_in(folder), {own.planned: own for own in owned(sharded_model).values()}
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
    if isinstance(target, Owned):
        if target.slice is None or not target.numel:
            return
        if target.slot.order is None:
            out = flattened(target.slice.detach(), target.slot)
            for at, piece in stored.read(target.start, target.start + target.numel):
                out[at : at + piece.numel()].copy_(piece)
            return
    whole = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")  # or the rank's elements lie apart in the file
    for at, piece in stored.read(0, whole.numel()):
        whole.view(-1)[at : at + piece.numel()] = piece
    if isinstance(target, Owned):
        target.write(target.part_of(whole))
    else:
        target.detach().copy_(whole)
