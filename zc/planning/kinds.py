"""Kinds of blocks, which a plan's buckets follow. `zc.planning.blocks` finds them in a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockKind:
    """``name`` of the class, and the blocks' fully qualified names in order of registration."""

    name: str
    members: tuple[str, ...]

    def __str__(self) -> str:
        return f"block kind {self.name}: {len(self.members)} blocks, {self.members[0]} to {self.members[-1]}"


def block_of(kinds: Iterable[BlockKind]) -> dict[str, tuple[int, int]]:
    """By member name: the number of its kind, and its position among the members."""
    return {member: (k, i) for k, kind in enumerate(kinds) for i, member in enumerate(kind.members)}


def split_name(name: str, members: dict[str, tuple[int, int]]) -> tuple[str, str] | None:
    """A parameter's name as (member, name inside the member); None for a parameter outside of blocks."""
    end = name.find(".")
    while end >= 0:
        if name[:end] in members:
            return name[:end], name[end + 1 :]
        end = name.find(".", end + 1)
    return None
