"""Where the blocks of a tensor lie in the bytes that are sent: `encode_blocks` writes them, `decode_blocks` reads them.

A block is 256 elements. An encoded one becomes 256 integers of 8 bits, or 128 bytes with two of 4 bits each, and one
fp32 scale. An exact one becomes 256 fp32 numbers. Blocks of either kind stand in *runs*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256  # elements that share a scale
HALF = BLOCK // 2
NUM = 8  # blocks per program
TRAINED = (torch.float32, torch.bfloat16, torch.float16)
UNIT = 128  # bytes: each block begins at a multiple of it, so that accesses are 128 bits wide
EXACT = 1024  # bytes of an exact block
TOP = {8: 127.0, 4: 7.0}  # the largest integer, by bits
TINY = torch.finfo(torch.float32).tiny  # a scale below this one is subnormal, and a quotient by it may overflow


class Run(NamedTuple):
    """Blocks [first, first + num), all encoded or all exact. Their bytes begin at byte ``at``, the scales of encoded
    ones at fp32 word ``scales``. It is -1 for exact ones."""

    first: int
    num: int
    at: int
    scales: int


class Piece(NamedTuple):
    """Some blocks of a run: their elements in the tensor, their bytes, and the fp32 words of their scales or None."""

    elements: slice
    payload: slice
    scales: slice | None


class Blocks:
    """Runs that cover blocks 0, 1, ... of a tensor, in order; ``bits``: of an encoded element. ``tables`` gets each
    `table`, for a caller who keeps it while launched kernels read it."""

    def __init__(
        self, runs: Sequence[tuple[int, int, int, int]], bits: int, tables: list[Tensor] | None = None
    ) -> None:
        self.runs, self.bits = tuple(Run(*run) for run in runs), bits
        self.num_blocks = sum(run.num for run in self.runs)
        self._tables: dict[torch.device, Tensor] = {}
        self._kept = tables if tables is not None else []
        if bits not in TOP:
            raise ValueError(f"bits is {bits}, expected 8 or 4")
        reached = 0
        for run in self.runs:
            if run.first != reached or run.at % UNIT:
                raise ValueError(f"{run}: expected blocks from {reached} on, at a multiple of {UNIT} bytes")
            reached += run.num

    @property
    def payload(self) -> int:
        """Bytes of an encoded block, without its scale."""
        return BLOCK * self.bits // 8

    def pieces(self, most: int) -> Iterator[Piece]:
        """All blocks in order, at most ``most`` at once."""
        for run in self.runs:
            is_exact = run.scales < 0
            width = EXACT if is_exact else self.payload
            for start in range(0, run.num, most):
                stop = min(start + most, run.num)
                yield Piece(
                    slice((run.first + start) * BLOCK, (run.first + stop) * BLOCK),
                    slice(run.at + start * width, run.at + stop * width),
                    None if is_exact else slice(run.scales + start, run.scales + stop),
                )

    def table(self, device: torch.device) -> Tensor:
        """[2, blocks] int32: of each block the `UNIT` where its bytes begin, and the word of its scale or -1."""
        if device not in self._tables:
            units, words = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
            for run in self.runs:
                k = torch.arange(run.num)
                width = EXACT if run.scales < 0 else self.payload
                units.append((run.at + k * width) // UNIT)
                words.append(torch.full_like(k, -1) if run.scales < 0 else run.scales + k)
            table = torch.stack([torch.cat(units), torch.cat(words)]).to(torch.int32)
            self._tables[device] = table.to(device)
            self._kept.append(self._tables[device])
        return self._tables[device]


def check_wire(name: str, wire: Tensor, blocks: Blocks) -> None:
    """``wire``: bytes, contiguous, aligned, and long enough for ``blocks``."""
    if wire.dtype != torch.uint8:
        raise ValueError(f"{name}: dtype is {wire.dtype}, expected torch.uint8")
    if not wire.is_contiguous():
        raise ValueError(f"{name}: shape {tuple(wire.shape)}, strides {wire.stride()}; expected contiguous bytes")
    if wire.shape[-1] % 4 or wire.storage_offset() % 4:
        where = f"{wire.shape[-1]} bytes from byte {wire.storage_offset()} on"
        raise ValueError(f"{name} has {where}, expected whole words")
    ends = [run.at + run.num * (EXACT if run.scales < 0 else blocks.payload) for run in blocks.runs]
    ends += [4 * (run.scales + run.num) for run in blocks.runs if run.scales >= 0]
    if wire.shape[-1] < max(ends, default=0):
        raise ValueError(f"{name} has {wire.shape[-1]} bytes, its blocks end at byte {max(ends)}")
