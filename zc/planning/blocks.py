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

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from zc.planning.plan import BlockKind, block_of, split_name

MIN_MEMBERS = 4  # fewer blocks are compiled with the rest of the model, since one schedule runs faster than several


def find_kinds(model: nn.Module) -> tuple[BlockKind, ...]:
    """The kinds of blocks of ``model``, outermost first: the children of a block belong to it.

    A block has children and a matrix; elementwise work gains more from the graph around it. It shares no parameter with
    the rest of the model, because its compiled graph tells members apart by their parameters.
    """
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return tuple(_walk(model, "", uses, set()))


def find_singles(model: nn.Module, kinds: Sequence[BlockKind]) -> list[BlockKind]:
    """The modules outside of blocks that are compiled on their own, each as a kind of one member: the outermost ones
    that have parameters and contain no block. Empty for a model without blocks, which is one graph."""
    blocks = {member for kind in kinds for member in kind.members}
    holders = {name[:k] for name in blocks for k in range(len(name)) if name[k] == "."} | {""}
    singles: dict[int, BlockKind] = {}
    for holder in sorted(holders) if blocks else ():
        for name, child in model.get_submodule(holder).named_children():
            path = f"{holder}.{name}".lstrip(".")
            if path not in blocks | holders and any(True for _ in child.parameters()):
                singles.setdefault(id(child), BlockKind(type(child).__name__, (path,)))
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
    inside = Counter(map(id, params))
    return has_matrix and not is_leaf and all(uses[param] == count for param, count in inside.items())


def _signature(module: nn.Module) -> object:
    """Equal for blocks that can share a graph, judging by class and parameters."""
    first: dict[int, str] = {}
    rows = []
    for name, param in module.named_parameters(remove_duplicate=False):
        first.setdefault(id(param), name)
        rows.append((name, first[id(param)], tuple(param.shape), param.dtype, param.device, param.requires_grad))
    return type(module), tuple(rows)
