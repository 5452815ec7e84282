# mypy: disable-error-code="no-untyped-def"
# (Triton resolves the annotations of a kernel's parameters as types of its own, so they have none.)
"""``unflatten_cast``: updated fp32 weights into the low-precision flat parameter, rounded to nearest or stochastically.

Bytes moved: [N] read once, [N] written once (fp32 to bf16: 6 bytes an element); the random numbers cost none. 128-bit
accesses where both start at 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zc.kernels._check import FLOATS, check_device, check_disjoint, check_dtype, check_flat, check_numel
from zc.kernels._chunks import ranges, scratch_like
from zc.kernels._triton import cdiv, constexpr, jit, jit_with, on_device, tl, use_triton

__all__ = ["unflatten_cast", "unflatten_cast_triton", "unflatten_cast_twin"]

BLOCK = 2048
WINDOW = 1 << 32  # elements that one key serves: the hash has 32 bits of index


@torch.no_grad()
def unflatten_cast(out: Tensor, master: Tensor, *, seed: int | None = None) -> None:
    """``out = master`` cast to ``out.dtype``: to nearest even, or with ``seed`` stochastically from fp32 to bf16.

    Stochastic: the 16 bits that bf16 drops are added a uniform 16-bit number and cut, so that the expected value of
    the result is the weight (Gupta et al., arXiv:1502.02551): updates smaller than half an ulp are not lost on average.
    The number is a hash of (seed, element's index), so a seed gives one result on every device. Use another seed for
    each step, bucket and rank.

    Args:
        out: [N] bf16, fp16, fp32 or fp64, contiguous.
        master: [N] any of these, contiguous, not overlapping ``out``. With ``seed``: fp32, and ``out`` bf16.
        seed: any int (its low 64 bits count).

    Raises:
        ValueError: a dtype, device, layout, size or overlap that breaks the above; nothing has been written.
    """
    check_dtype("out", out, FLOATS if seed is None else (torch.bfloat16,))
    check_dtype("master", master, FLOATS if seed is None else (torch.float32,))
    check_flat("out", out)
    check_flat("master", master)
    check_numel("out", out, "master", master.numel())
    check_device("out", out, "master", master)
    check_disjoint("out", out, "master", master)
    if use_triton(out) and torch.float64 not in (out.dtype, master.dtype):
        unflatten_cast_triton(out, master, seed)
    else:
        unflatten_cast_twin(out, master, seed)


def unflatten_cast_twin(out: Tensor, master: Tensor, seed: int | None) -> None:
    """The same in torch; int32 arithmetic wraps exactly as the kernel's uint32 does."""
    if seed is None:
        out.copy_(master)
        return
    index = torch.arange(scratch_like(out, torch.int32).numel(), dtype=torch.int32, device=out.device)
    noise, shifted = torch.empty_like(index), torch.empty_like(index)
    for start, length in ranges(out.numel()):
        key = _signed32(stream_key(seed, start >> 32) + (start & 0xFFFFFFFF))
        hashed, tmp, bits = noise[:length], shifted[:length], master[start : start + length].view(torch.int32)
        torch.add(index[:length], key, out=hashed)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            torch.bitwise_right_shift(hashed, shift, out=tmp)
            hashed.bitwise_xor_(tmp.bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed32(factor))
        hashed.bitwise_and_(0xFFFF).add_(bits)
        # a NaN would turn into inf or -0.0 when the sum carries: keep it, made quiet
        torch.bitwise_or(bits, 0x00400000, out=tmp)
        is_nan = master[start : start + length].isnan()
        torch.where(is_nan, tmp, hashed, out=hashed)
        # as integers: torch's own cast would turn a NaN into another one
        out[start : start + length].view(torch.int16).copy_(hashed.bitwise_right_shift_(16))


def unflatten_cast_triton(out: Tensor, master: Tensor, seed: int | None) -> None:
    """One launch for each 2^32 elements."""
    for start in range(0, out.numel(), WINDOW):
        here, source = out[start : start + WINDOW], master[start : start + WINDOW]
        key = 0 if seed is None else _signed32(stream_key(seed, start // WINDOW))
        with on_device(out):
            cast_flat[(cdiv(here.numel(), BLOCK),)](
                here, source, here.numel(), key, STOCHASTIC=seed is not None, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip


@jit
def _cast(x, index, key, out_dtype: constexpr, STOCHASTIC: constexpr):
    if STOCHASTIC:
        noise = index.to(tl.uint32) + key.to(tl.uint32, bitcast=True)
        noise = (noise ^ (noise >> 16)) * 0x7FEB352D
        noise = (noise ^ (noise >> 15)) * 0x846CA68B
        noise = noise ^ (noise >> 16)
        bits = x.to(tl.uint32, bitcast=True)
        # a NaN would turn into inf or -0.0 when the sum carries: keep it, made quiet
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x00400000, bits + (noise & 0xFFFF))
        rounded = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # no early return: Triton compiles what stands behind one, for fp16 as well
        rounded = x.to(out_dtype)
    return rounded


@jit_with(do_not_specialize=["key"])  # a key that 16 divides would compile again
def cast_flat(out, master, numel, key, STOCHASTIC: constexpr, BLOCK: constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    dtype: constexpr = out.dtype.element_ty
    if start + BLOCK <= numel:  # no mask: 128-bit accesses
        tl.store(out + start + at, _cast(tl.load(master + start + at), start + at, key, dtype, STOCHASTIC))
    else:
        mask = at < numel - start
        x = tl.load(master + start + at, mask=mask)
        tl.store(out + start + at, _cast(x, start + at, key, dtype, STOCHASTIC), mask=mask)


def stream_key(seed: int, index_high: int) -> int:
    """The 32-bit key added to an index's low word: every bit of ``seed`` and of the index's high word is mixed in."""
    key = 0
    for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, index_high & 0xFFFFFFFF):
        key = lowbias32((key + word + 0x9E3779B9) & 0xFFFFFFFF)
    return key


def lowbias32(x: int) -> int:
    """A 32-bit hash with low bias, one multiplication a round: github.com/skeeto/hash-prospector (public domain)."""
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def _signed32(x: int) -> int:
    return (x + (1 << 31) & 0xFFFFFFFF) - (1 << 31)
