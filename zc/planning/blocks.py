"""Finds kinds of blocks: children of one container that share a compiled graph, such as a decoder's layers.

    GPT
      tokens: Embedding                       outside of blocks
      blocks: ModuleList
        0: Block  (norm.weight [64], ...)     one kind of block: "Block", with the members
        1: Block  (norm.weight [64], ...)     blocks.0, blocks.1, ...
        ...
      norm: LayerNorm                         outside of blocks

Members of a kind have the same class and the same parameters: relative name, shape, dtype, device and requires_grad.
Buckets follow them (`zc.planning.plan`): a bucket has whole blocks, or the same part of each block. PyTorch's regional
compilation also compiles a repeated block once, and FSDP2 wraps each block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from zc.planning.packing import ParamSpec

MIN_MEMBERS = 4  # fewer blocks are compiled with the rest of the model, since one schedule runs faster than several


@dataclass(frozen=True)
class BlockKind:
    """``name`` of the class, and the blocks' fully qualified names in order of registration."""

    name: str
    members: tuple[str, ...]

    def __str__(self) -> str:
        return f"block kind {self.name}: {len(self.members)} blocks, {self.members[0]} to {self.members[-1]}"


def find_kinds(model: nn.Module) -> tuple[BlockKind, ...]:
    """The kinds of blocks of ``model``, outermost first: the children of a block belong to it.

    A block has children and a matrix; elementwise work gains more from the graph around it. It shares no parameter with
    the rest of the model, because its compiled graph tells members apart by their parameters.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return tuple(_walk(model, "", uses, set()))


def find_singles(model: nn.Module, kinds: Sequence[BlockKind]) -> list[str]:
    """The modules outside of blocks that are compiled on their own: the outermost ones that have parameters and contain
    no block. Empty for a model without blocks, which is one graph."""
    blocks = {member for kind in kinds for member in kind.members}
    holders = {name[:k] for name in blocks for k in range(len(name)) if name[k] == "."} | {""}
    singles: dict[int, str] = {}
    for holder in sorted(holders) if blocks else ():
        for name, child in model.get_submodule(holder).named_children():
            path = f"{holder}.{name}".lstrip(".")
            if path not in blocks | holders and any(True for _ in child.parameters()):
                singles.setdefault(id(child), path)
    return list(singles.values())


def matrices_around(model: nn.Module, kinds: Sequence[BlockKind]) -> frozenset[str]:
    """The matrices outside of blocks, without those that only embeddings have: compiling a lookup or a norm gains
    little."""
    members = block_of(kinds)
    readers: dict[int, set[type[nn.Module]]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            readers.setdefault(id(param), set()).add(type(module))
    return frozenset(
        name
        for name, param in model.named_parameters()
        if kinds and param.dim() > 1 and split_name(name, members) is None and readers[id(param)] != {nn.Embedding}
    )


def block_of(kinds: Iterable[BlockKind]) -> dict[str, tuple[int, int]]:
    """A member's name -> its kind and its position among the members."""
    return {member: (k, i) for k, kind in enumerate(kinds) for i, member in enumerate(kind.members)}


def split_name(name: str, members: dict[str, tuple[int, int]]) -> tuple[str, str] | None:
    """A parameter's name as (member, name in it); None: it is outside of blocks."""
    end = name.find(".")
    while end >= 0:
        if name[:end] in members:
            return name[:end], name[end + 1 :]
        end = name.find(".", end + 1)
    return None


def _walk(module: nn.Module, prefix: str, uses: Counter[int], seen: set[int]) -> Iterator[BlockKind]:
    groups: dict[object, list[str]] = {}
    names = {}
    for name, child in module.named_children():
        if id(child) in seen:  # registered twice
            continue
        seen.add(id(child))
        path = f"{prefix}{name}"
        names[path] = child
        if isinstance(module, nn.ModuleList | nn.Sequential) and _can_be_block(child, uses):
            groups.setdefault(_signature(child), []).append(path)
    kinds = [paths for paths in groups.values() if len(paths) >= MIN_MEMBERS]
    members = {path for paths in kinds for path in paths}
    yield from (BlockKind(type(names[paths[0]]).__name__, tuple(paths)) for paths in kinds)
    for path, child in names.items():
        if path not in members:
            yield from _walk(child, f"{path}.", uses, seen)


def _can_be_block(module: nn.Module, uses: Counter[int]) -> bool:
    params = [p for _, p in module.named_parameters(remove_duplicate=False)]
    is_leaf, has_matrix = next(module.children(), None) is None, any(p.dim() > 1 for p in params)
    own = Counter(map(id, params))
    return has_matrix and not is_leaf and all(uses[param] == count for param, count in own.items())


def _signature(module: nn.Module) -> object:
    """Equal for blocks that can share a graph, judging by class and parameters."""
    first: dict[int, str] = {}
    rows = []
    for name, param in module.named_parameters(remove_duplicate=False):
        first.setdefault(id(param), name)
        rows.append((name, first[id(param)], tuple(param.shape), param.dtype, param.device, param.requires_grad))
    return type(module), tuple(rows)


# --- buckets follow blocks ---

# The default is that of PyTorch's DDP, which overlaps well. It is larger where there would be more buckets than
# ENOUGH_BUCKETS, since each costs the host a write, a reduction and their events in every backward.
DEFAULT_NBYTES = 25 * 2**20
ENOUGH_BUCKETS = 32
# between hosts of CPUs: on a slow link, a step waits for the last bucket's reduction, and a layer for its gather
BETWEEN_HOSTS_NBYTES = 8 * 2**20


def default_nbytes(sizes: Sequence[int], least: int = DEFAULT_NBYTES) -> int:
    """The default size of a bucket for parameters of these ``sizes`` in bytes: enough for ENOUGH_BUCKETS, but at most
    the largest parameter. That one is a bucket in any case and decides the ring's size, so larger buckets cost no
    memory."""
    return max(least, min(max(sizes), sum(sizes) // ENOUGH_BUCKETS))


def nbytes_of(spec: ParamSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def split_at_blocks(
    specs: Sequence[ParamSpec], bucket_nbytes: int, kinds: Sequence[BlockKind], *, is_default: bool
) -> list[list[ParamSpec]]:
    """Splits parameters into buckets: whole blocks of one kind, as many as ``bucket_nbytes`` allows, the same part of
    each block, or parameters outside of blocks. With the default size, a block of at least a quarter of it gets its own
    bucket, which its compiled graph fills alone."""
    positions = block_of(kinds)
    outside: list[ParamSpec] = []
    blocks: dict[tuple[int, int], list[ParamSpec]] = {}
    for spec in specs:
        parts = split_name(spec.name, positions)
        if parts is None:
            outside.append(spec)
        else:
            blocks.setdefault(positions[parts[0]], []).append(spec)
    chunks = _split(outside, bucket_nbytes) if outside else []
    for kind in range(len(kinds)):
        members = [own for (number, _), own in blocks.items() if number == kind]
        largest = max((sum(map(nbytes_of, own)) for own in members), default=1)
        if largest > bucket_nbytes:
            chunks += [chunk for own in members for chunk in _split(own, bucket_nbytes)]
            continue
        count = 1 if is_default and 4 * largest >= bucket_nbytes else bucket_nbytes // largest
        for start in range(0, len(members), count):
            chunks.append([spec for own in members[start : start + count] for spec in own])
    return chunks


def _split(specs: Sequence[ParamSpec], bucket_nbytes: int) -> list[list[ParamSpec]]:
    """Splits in order, so that no bucket is larger than ``bucket_nbytes`` unless one parameter is."""
    chunks: list[list[ParamSpec]] = [[]]
    filled = 0
    for spec in specs:
        nbytes = nbytes_of(spec)
        if chunks[-1] and filled + nbytes > bucket_nbytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(spec)
        filled += nbytes
    return chunks
