"""`encode_blocks` and `decode_blocks` against an oracle in NumPy, block by block. Shared by the references' tests, the
interpreter's and the GPU's.

Bytes that no block has are filled with a mark, and must keep it. Values have the special numbers of ``comparisons``
strewn in, and blocks of each kind: zeros, subnormals, one NaN, one infinity, the largest number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import comparisons as c
import numpy as np
import torch
from torch import Tensor

from zc.kernels import Blocks

BLOCK, MARK = 256, 0xA5
LAYOUTS = {  # True: an exact block
    "one": [False],
    "one exact": [True],
    "runs": [True, *[False] * 9, True, True, False, *[True] * 2, *[False] * 4],  # 19 blocks: not whole programs
    "many": [*[False] * 1030, True],
    "none": [],
}


def blocks_of(kinds: Sequence[bool], bits: int) -> tuple[Blocks, int]:
    """Runs with a gap after each, all scales after them; and the bytes of a row."""
    runs, at = [], 128
    starts = [k for k in range(len(kinds)) if k == 0 or kinds[k] != kinds[k - 1]]
    for first, stop in zip(starts, [*starts[1:], len(kinds)][: len(starts)], strict=True):
        runs.append([first, stop - first, at, -1])
        at += (stop - first) * (1024 if kinds[first] else 32 * bits) + 128
    for run in runs:
        if not kinds[run[0]]:
            run[3], at = at // 4, at + 4 * run[1] + 4
    return Blocks([tuple(run) for run in runs], bits), -(-at // 128) * 128


def values(num_blocks: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[256 * blocks]: the k-th block is a special one for k = 1 ... 6, and one in 7 has magnitudes all over."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_blocks, BLOCK, generator=generator)
    x *= torch.logspace(-30, 30, BLOCK) ** (torch.arange(num_blocks) % 7 == 6)[:, None]
    kinds = ([0.0] * BLOCK, [1e-41, -3e-39] * 128, [torch.nan], [-torch.inf], [3.4e38, -3.4e38], [0.5, -2.5, 127.0])
    for k, kind in enumerate(kinds, 1):
        if k < num_blocks:
            x[k, : len(kind)] = torch.tensor(kind)
    return x.view(-1).to(dtype)


def encoded(x: np.ndarray, plain: np.ndarray, blocks: Blocks, nbytes: int) -> np.ndarray:
    """What the bytes must be."""
    wire = np.full(nbytes, MARK, np.uint8)
    words = wire.view(np.float32)
    top = np.float32({8: 127, 4: 7}[blocks.bits])
    for run in blocks.runs:
        for k in range(run.num):
            own = x[(run.first + k) * BLOCK :][:BLOCK]
            if run.scales < 0:
                words[run.at // 4 + k * BLOCK :][:BLOCK] = plain[(run.first + k) * BLOCK :][:BLOCK]
                continue
            scale, integers = np.float32(np.nan), np.zeros(BLOCK, np.int64)
            if np.isfinite(own).all():
                scale = np.abs(own).max() / top
                scale = np.float32(1) if scale < np.finfo(np.float32).tiny else scale
                integers = np.rint(own / scale).astype(np.int64)
            words[run.scales + k] = scale
            assert abs(integers).max() <= top
            if blocks.bits == 8:
                wire[run.at + k * BLOCK :][:BLOCK] = integers.astype(np.int8).view(np.uint8)
            else:
                wire[run.at + k * 128 :][:128] = (integers[:128] % 16 + 16 * (integers[128:] % 16)).astype(np.uint8)
    return wire


def decoded(wire: np.ndarray, blocks: Blocks) -> np.ndarray:
    """What the bytes stand for."""
    words, out = wire.view(np.float32), np.zeros(blocks.num_blocks * BLOCK, np.float32)
    for run in blocks.runs:
        for k in range(run.num):
            here = slice((run.first + k) * BLOCK, (run.first + k + 1) * BLOCK)
            if run.scales < 0:
                out[here] = words[run.at // 4 + k * BLOCK :][:BLOCK]
            elif blocks.bits == 8:
                out[here] = wire[run.at + k * BLOCK :][:BLOCK].view(np.int8).astype(np.float32) * words[run.scales + k]
            else:
                both = wire[run.at + k * 128 :][:128].astype(np.int64)
                integers = np.concatenate([both % 16, both // 16])
                integers -= 16 * (integers > 7)
                out[here] = integers.astype(np.float32) * words[run.scales + k]
    return out


Encode = Callable[[Tensor, Tensor, Blocks, Tensor | None], None]
Decode = Callable[[Tensor, Tensor, Blocks, float, bool, bool], None]


def check_encode(run: Encode, device: str, kinds: Sequence[bool], bits: int, dtype: torch.dtype,
                 base_dtype: torch.dtype | None = None) -> None:  # fmt: skip
    blocks, nbytes = blocks_of(kinds, bits)
    x = values(len(kinds), dtype)
    base = None if base_dtype is None else values(len(kinds), base_dtype, seed=1)
    wire = torch.full((nbytes,), MARK, dtype=torch.uint8, device=device)
    run(x.to(device), wire, blocks, None if base is None else base.to(device))
    wide = x.float().numpy()
    with np.errstate(all="ignore"):
        difference = wide if base is None else wide - base.float().numpy()
        expected = torch.from_numpy(encoded(difference, wide, blocks, nbytes))
    actual = wire.cpu()  # any NaN is as good as any other
    both = actual.view(torch.float32).isnan() & expected.view(torch.float32).isnan()
    assert bool(((actual == expected) | both.repeat_interleave(4)).all()), (actual != expected).nonzero()[:5]


def check_decode(run: Decode, device: str, kinds: Sequence[bool], bits: int, num_rows: int, *, scale: float = 1.0,
                 add: bool = False, update: torch.dtype | None = None) -> None:  # fmt: skip
    blocks, nbytes = blocks_of(kinds, bits)
    with np.errstate(all="ignore"):
        rows = [values(len(kinds), c.F32, seed=r).numpy() for r in range(num_rows)]
        wires = [encoded(row, row, blocks, nbytes) for row in rows]
        total = decoded(wires[0], blocks)
        for wire in wires[1:]:
            total = total + decoded(wire, blocks)
        out, storage = c.guarded(len(total), update or c.F32, device)
        old = values(len(kinds), update or c.F32, seed=99)
        if add or update:
            out.copy_(old)
        expected = torch.from_numpy(total * np.float32(scale))
        exact = torch.tensor(list(kinds), dtype=torch.bool).repeat_interleave(BLOCK)
        if update is not None:
            expected = torch.where(exact, expected, old.float() + expected).to(update)
        elif add:
            expected = old + expected
    received = torch.stack([torch.from_numpy(wire) for wire in wires]).to(device)
    run(received, out, blocks, scale, add or update is not None, update is not None)
    c.assert_bits(out, expected)
    c.assert_guards(storage, out)


def check_some(encode: Encode, decode: Decode, kinds: Sequence[bool]) -> None:
    """Each branch of the kernels once, for the interpreter, which is slow."""
    for bits, dtype, base in ((8, c.F32, None), (8, c.F32, c.B16), (4, c.F16, c.F32)):
        check_encode(encode, "cpu", kinds, bits, dtype, base)
    check_decode(decode, "cpu", kinds, 8, 3, scale=1 / 3, add=True)
    check_decode(decode, "cpu", kinds, 4, 1)
    for bits, update in ((8, c.F32), (4, c.B16)):
        check_decode(decode, "cpu", kinds, bits, 1, update=update)


def check_all(encode: Encode, decode: Decode, device: str, layouts: Sequence[str] = tuple(LAYOUTS)) -> None:
    for name in layouts:
        kinds = LAYOUTS[name]
        for bits in (8, 4):
            for dtype, base in ((c.F32, None), (c.B16, None), (c.F16, None), (c.F32, c.F32), (c.F32, c.B16)):
                check_encode(encode, device, kinds, bits, dtype, base)
            for num_rows, scale, add in ((1, 1.0, False), (2, 0.5, True), (3, 1 / 3, False), (17, 1 / 17, True)):
                check_decode(decode, device, kinds, bits, num_rows, scale=scale, add=add)
            for update in (c.F32, c.B16, c.F16):
                check_decode(decode, device, kinds, bits, 1, update=update)
