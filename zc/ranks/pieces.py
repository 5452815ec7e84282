"""Pieces of unequal length, (rank, piece) ascending in rank and behind one another in memory: what an exchange between
the owners of whole parameters sends and receives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Pieces = Sequence[tuple[int, Tensor]]


def joined(pieces: Pieces, others: Pieces) -> Tensor:
    """1-D: all ``pieces`` as one; without elements where there are none, of the dtype and device of ``others``."""
    if not pieces:
        return others[0][1].new_empty(0) if others else torch.empty(0)
    first, numel = pieces[0][1], sum(piece.numel() for _, piece in pieces)
    assert pieces[-1][1].data_ptr() + pieces[-1][1].nbytes == first.data_ptr() + numel * first.element_size()
    return first.as_strided((numel,), (1,), first.storage_offset())


def lengths(pieces: Pieces, world_size: int) -> list[int]:
    """Elements of each rank's piece, 0 where it has none."""
    numel = {rank: piece.numel() for rank, piece in pieces}
    return [numel.get(rank, 0) for rank in range(world_size)]


def keep_own(received: Pieces, sent: Pieces, rank: int) -> None:
    """Copies what ``rank`` sends to itself, unless it is there already."""
    own = dict(sent)
    for source, piece in received:
        if source == rank and piece.data_ptr() != own[rank].data_ptr():
            piece.copy_(own[rank])
