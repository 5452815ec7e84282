"""Pieces of unequal length that the owners of whole parameters exchange: pairs (rank, piece) in ascending order of
ranks, contiguous in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Pieces = Sequence[tuple[int, Tensor]]


def joined(pieces: Pieces, others: Pieces, device: torch.device) -> Tensor:
    """All ``pieces`` as one 1-D tensor. Without pieces it is empty, on ``device``, because a backend refuses even empty
    tensors of other devices, and has the dtype of ``others``, if there are any."""
    if not pieces:
        return torch.empty(0, dtype=others[0][1].dtype if others else None, device=device)
    first, numel = pieces[0][1], sum(piece.numel() for _, piece in pieces)
    assert pieces[-1][1].data_ptr() + pieces[-1][1].nbytes == first.data_ptr() + numel * first.element_size()
    return first.as_strided((numel,), (1,), first.storage_offset())


def lengths(pieces: Pieces, world_size: int) -> list[int]:
    """The number of elements of each rank's piece, 0 without one."""
    numel = {rank: piece.numel() for rank, piece in pieces}
    return [numel.get(rank, 0) for rank in range(world_size)]


def keep_own(received: Pieces, sent: Pieces, rank: int) -> None:
    """Copies the piece that ``rank`` sends to itself, unless source and destination are the same memory."""
    own = dict(sent)
    for source, piece in received:
        if source == rank and piece.data_ptr() != own[rank].data_ptr():
            piece.copy_(own[rank])
