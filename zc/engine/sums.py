"""Sums of what several ranks have sent, in the order of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from einops import rearrange
from torch import Tensor

from zc.kernels import reduce_rows
from zc.ranks.journal import GATHER_SUMS, wait

if TYPE_CHECKING:
    from zc.ranks.group import Group


def sum_rows(rows: Tensor, out: Tensor, acc_dtype: torch.dtype) -> None:
    """out [n] <- the sum of rows [ranks, n] in rank order, in ``acc_dtype``."""
    total = out if out.dtype == acc_dtype else torch.empty_like(out, dtype=acc_dtype)
    reduce_rows(rows, total, scale=1.0, add=False)
    if total is not out:
        out.copy_(total)


def sum_over_replicas(replicas: Group, out: Tensor, sent: Tensor, bucket: int) -> None:
    """out [S] <- the sum of ``sent`` [S] over the replicas, in their order: the same bits on all of them. Each replica
    sums a piece, and all get all pieces.

    ``out`` is at least as wide as ``sent``: the pieces that a rank receives lie there until it has summed them.
    """
    rows = out.view(torch.uint8)[: sent.nbytes].view(sent.dtype)
    piece = torch.empty(len(out) // replicas.world_size, dtype=out.dtype, device=out.device)
    wait(replicas.all_to_all(rows, sent, bucket))
    pieces = rearrange(rows, "(replica piece) -> replica piece", replica=replicas.world_size)
    reduce_rows(pieces, piece, scale=1.0, add=False)
    wait(replicas.all_gather(out, piece, GATHER_SUMS, bucket))
