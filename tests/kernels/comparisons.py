"""Kernels against plain, a slow oracle: shared by the references' tests, the interpreter's and the GPU's.

Outputs start as NaN between two guard zones; a comparison is of bits, except that any NaN equals any NaN (its payload
is the hardware's choice). ``cast`` is how the machine under test rounds fp32 to a half type.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from torch import Tensor

Cast = Callable[[Tensor, torch.dtype], Tensor]
F32, B16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SIZES = (0, 1, 63, 1025, 2**20 + 3)
GUARD = 64
SENTINEL = 1234.0  # exact in every dtype
SPECIALS = (torch.nan, torch.inf, -torch.inf, 1e-41, -1e-41, 3e-39, -3e-39, 1e-7, -0.0, 0.0, 3.4e38, -3.4e38, 65520.0)


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounding to nearest even: torch, GPUs."""
    return x.to(dtype)


def values(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    """Normal numbers with the special ones strewn in, on both sides of block edges."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(int(torch.Size(shape).numel()), generator=generator)
    for start in range(0, flat.numel(), 509):  # a prime: every position within a vector is met
        chosen = torch.tensor(SPECIALS)[: flat.numel() - start]
        flat[start : start + len(chosen)] = chosen.roll(start)
    return flat.view(shape).to(dtype).to(device)


def guarded(numel: int, dtype: torch.dtype, device: str, shift: int = 0) -> tuple[Tensor, Tensor]:
    """A NaN-filled [numel] view, ``shift`` elements past 128 bytes of alignment, and the storage with its guards."""
    storage = torch.full((numel + 2 * GUARD + shift,), SENTINEL, dtype=dtype, device=device)
    view = storage[GUARD + shift : GUARD + shift + numel]
    view.fill_(torch.nan)
    return view, storage


def assert_guards(storage: Tensor, view: Tensor) -> None:
    first = view.storage_offset()
    assert bool((storage[:first] == SENTINEL).all()), "wrote before the output"
    assert bool((storage[first + view.numel() :] == SENTINEL).all()), "wrote past the output"


def assert_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    actual, expected = actual.cpu(), expected.cpu()
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    same = (actual.view(as_int) == expected.view(as_int)) | (actual.isnan() & expected.isnan())
    wrong = (~same).nonzero().flatten()
    first = wrong[:5]
    assert len(wrong) == 0, f"{len(wrong)} differ, first at {first.tolist()}: {actual[first]} {expected[first]}"


def mixed_grads(sizes: Sequence[int], dtypes: Sequence[torch.dtype], device: str) -> list[Tensor]:
    """Gradients of many layouts: contiguous of ``sizes``, the ``dtypes`` in turn, then strided and unaligned ones."""
    flat = [values((size,), dtypes[i % len(dtypes)], device, i) for i, size in enumerate(sizes)]
    dtype = dtypes[0]
    strided = [
        values((70, 33), dtype, device).t(),
        values((5, 4, 3, 6), dtypes[-1], device).permute(3, 1, 0, 2),
        values((40, 50), dtype, device)[:, ::2],
        values((2, 2, 2, 2, 2, 2), dtype, device).permute(5, 3, 1, 4, 2, 0),  # more digits than the kernel's index
        values((1,), dtypes[-1], device).expand(37),
        values((100, 90), dtype, device).t().unsqueeze(1),
        values((100, 90), dtype, device)[:, ::2],  # more than one piece of the kernel's strided loop
        values((6, 7, 7, 3), dtype, device).permute(0, 3, 1, 2),  # channels-last, few
        torch.view_as_complex(values((40, 2), F32, device)).conj().imag,  # memory has its negative
        *transposed(dtypes, device),
    ]
    odd = [values((2000,), dtype, device)[1:], values((4, 0, 3), dtype, device), values((1025,), dtype, device)]
    return [values((), dtype, device), *flat, *strided, *odd]  # the last is not empty: its slot can end at P


def transposed(dtypes: Sequence[torch.dtype], device: str) -> list[Tensor]:
    """Of [B, J, M] in memory of another order, J at a stride of 1: sizes at a tile's edges, of several tiles, of 1."""
    tensors = [
        values((16, 64), dtypes[0], device).t(),
        values((17, 65), dtypes[-1], device).t(),
        values((7, 3, 3, 40), dtypes[0], device).permute(0, 3, 1, 2),  # channels-last, as of a convolution
        values((2, 5, 5, 130), dtypes[-1], device).permute(0, 3, 1, 2),
        values((1, 3, 3, 40), dtypes[0], device).permute(0, 3, 1, 2),
        values((4, 70, 1, 33), dtypes[-1], device)[..., 1:].permute(0, 3, 1, 2),  # holes, and an odd address
        values((1, 40, 20), dtypes[0], device).expand(3, 40, 20).transpose(1, 2),  # B at a stride of 0
    ]
    return [grad.unsqueeze(1) for grad in tensors]


def spread(grads: Sequence[Tensor], gaps: Sequence[int]) -> tuple[list[int], int]:
    """Offsets with the gaps in turn before each gradient, and P with a gap at the end."""
    offsets, stop = [], 0
    for i, grad in enumerate(grads):
        offsets.append(stop + gaps[i % len(gaps)])
        stop = offsets[-1] + grad.numel()
    return offsets, stop + gaps[0]


def aligned(grads: Sequence[Tensor]) -> tuple[list[int], int]:
    """Offsets as zc.planning.layout packs them: multiples of 64 elements."""
    offsets, stop = [], 0
    for grad in grads:
        offsets.append(stop)
        stop = -(-(stop + grad.numel()) // 64) * 64
    return offsets, stop


def layouts(grads: Sequence[Tensor]) -> list[tuple[list[int], int]]:
    """As zc.planning.layout packs; unaligned with gaps; and one whose last slot ends where the buffer ends."""
    return [aligned(grads), spread(grads, (3, 0, 17)), spread(grads, (0, 5, 16))]  # the first gap is also the last


def check_flatten(run: Callable[..., None], device: str, out_dtype: torch.dtype, grads: Sequence[Tensor],
                  offsets: Sequence[int], numel: int, cast: Cast, shift: int = 0) -> None:  # fmt: skip
    out, storage = guarded(numel, out_dtype, device, shift)
    expected = torch.zeros(numel, dtype=out_dtype, device=device)
    for grad, offset in zip(grads, offsets, strict=True):
        flat = rearrange(grad, "... -> (...)")
        wide = flat.to(F64 if F64 in (grad.dtype, out_dtype) else F32)
        expected[offset : offset + grad.numel()] = flat if grad.dtype == out_dtype else cast(wide, out_dtype)
    run(out, grads, offsets)
    assert_bits(out, expected)
    assert_guards(storage, out)


def check_accumulate(run: Callable[..., None], device: str, acc_dtype: torch.dtype, grads: Sequence[Tensor],
                     offsets: Sequence[int], numel: int, shift: int = 0) -> None:  # fmt: skip
    acc, storage = guarded(numel, acc_dtype, device, shift)
    acc.fill_(SENTINEL)  # a NaN in the padding would stay one, whatever is added to it
    expected = acc.clone()
    for grad, offset in zip(grads, offsets, strict=True):
        slot = slice(offset, offset + grad.numel())
        acc[slot] = values((grad.numel(),), acc_dtype, device, seed=offset + 1)
        expected[slot] = acc[slot] + rearrange(grad, "... -> (...)").to(acc_dtype)
    run(acc, grads, offsets)
    assert_bits(acc, expected)
    assert_guards(storage, acc)


def check_reduce(run: Callable[..., None], device: str, world_size: int, numel: int, wire: torch.dtype, *, scale: float,
                 add: bool, shift: int = 0) -> None:  # fmt: skip
    received = values((world_size * (numel + shift),), wire, device)
    rows = rearrange(received, "(w s) -> w s", w=world_size)[:, shift:]
    wide = F64 if wire == F64 else F32
    out, storage = guarded(numel, wide, device, shift)
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total = total + row.to(wide)
    expected = total * torch.tensor(scale, dtype=wide, device=device)
    if add:
        out.copy_(values((numel,), wide, device, seed=1))
        expected = out + expected
    run(rows, out, scale=scale, add=add)
    assert_bits(out, expected)
    assert_guards(storage, out)


def normals(sizes: Sequence[int], dtypes: Sequence[torch.dtype], device: str) -> list[Tensor]:
    """Every size in every dtype, aligned to 128 bytes and one element past it, between guards of NaN."""
    tensors = []
    for i, (size, dtype, shift) in enumerate(itertools.product(sizes, dtypes, (0, 1))):
        storage = torch.full((size + 2 * GUARD + shift,), torch.nan, dtype=dtype, device=device)
        x = storage[GUARD + shift : GUARD + shift + size]
        x.copy_(torch.randn(size, generator=torch.Generator().manual_seed(i)))
        tensors.append(x)
    return tensors


def check_sums_of_squares(run: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> None:
    """Values; then the same bits again, in another order, and of a copy (aligned) alone; then special numbers."""
    sums = run(tensors)
    assert_squares(sums, tensors)
    assert_bits(run(tensors), sums)
    assert_bits(run(tensors[::-1]).flip(0), sums)
    assert_bits(torch.cat([run([x.clone()]) for x in tensors]), sums)
    filled = [i for i, x in enumerate(tensors) if x.numel() > 0]
    for first in range(3):
        results = {}
        for i in filled[first::3]:
            results[i] = tensors[i].clone()
            largest = 65504.0 if tensors[i].dtype == F16 else 3e38  # its square overflows fp32
            tensors[i][(0, -1)[i % 2]] = (torch.nan, torch.inf, largest)[i // 2 % 3]
        special = run(tensors)
        assert_squares(special, tensors)
        others = [i for i in range(len(tensors)) if i not in results]
        assert_bits(special[others], sums[others])
        for i, x in results.items():
            tensors[i].copy_(x)


def assert_squares(sums: Tensor, tensors: Sequence[Tensor]) -> None:
    """Against float64, one by one."""
    assert sums.device == tensors[0].device
    expected = torch.stack([x.cpu().double().square().sum() for x in tensors])
    torch.testing.assert_close(sums.cpu(), expected, rtol=1e-12, atol=0, equal_nan=True)  # also dtype and shape


def check_copy_writes(run: Callable[..., None], device: str, narrow: torch.dtype, sizes: Sequence[int]) -> None:
    """Masters of these sizes, a third of whose weights were written, then a NaN, an infinity and a -0.0 over 0.0."""
    masters, weights, expected, storages = [], [], [], []
    for k, size in enumerate(sizes):
        master, storage = guarded(size, F32, device, shift=k % 2)
        master.copy_(torch.randn(size, generator=torch.Generator().manual_seed(k)))
        weight = master.to(narrow, copy=True)
        is_written = torch.rand(size, generator=torch.Generator().manual_seed(k + 99)).to(device) < 0.3
        weight[is_written] = 9.0
        odd = torch.tensor([torch.nan, torch.nan, 1.0, torch.inf, -0.0], device=device)[:size]
        master[: len(odd)] = torch.tensor([torch.nan, 1.0, torch.nan, torch.inf, 0.0], device=device)[:size]
        weight[: len(odd)] = odd.to(narrow)
        wanted = torch.where(is_written, weight.float(), master)
        wanted[: len(odd)] = odd
        for values, each in ((masters, master), (weights, weight), (expected, wanted), (storages, storage)):
            values.append(each)
    before = [master.to(narrow, copy=True) for master in masters]
    compared = [master.clone() for master in masters]
    run(masters, weights, None)
    run(compared, weights, before)
    for master, other, wanted, storage in zip(masters, compared, expected, storages, strict=True):
        assert_bits(master, wanted)
        assert_bits(other, wanted)
        assert_guards(storage, master)
