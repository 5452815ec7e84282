"""The Triton kernels on a GPU, against the same oracle as the references. Rounding is to nearest even: all bits count.

Without a GPU every test skips; the kernels' logic is then covered by tests/kernels/interpreted.py, their code by
tests/kernels/test_compile.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
import comparisons as c
import encoded

from zc import kernels
from zc.kernels.blocks import decode_blocks_triton, encode_blocks_triton
from zc.kernels.sums_of_squares import BLOCK, PARTIALS, PER_PROGRAM

pytestmark = pytest.mark.skipif(
    kernels.why_reference() is not None, reason=f"the Triton kernels can't run here: {kernels.why_reference()}"
)

ALL = (c.F32, c.B16, c.F16)
SIZES = (*c.SIZES, 5_000_000)


def test_the_kernels_run_and_not_the_references() -> None:
    """A comparison of a reference with itself would pass everywhere."""
    x = torch.ones(100, device="cuda")
    with mock.patch("zc.kernels._slots.launch") as launch:
        kernels.accumulate_cast(x, [x.bfloat16()], [0])
    assert launch.called


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_flatten_cast(dtype: torch.dtype) -> None:
    grads = c.mixed_grads(SIZES, ALL, "cuda")
    for shift, (offsets, numel) in enumerate(c.layouts(grads)):
        c.check_flatten(kernels.flatten_cast, "cuda", dtype, grads, offsets, numel, c.nearest, shift=shift)


def test_flatten_cast_of_fp64() -> None:
    grads = c.mixed_grads(c.SIZES, (c.F64, c.F32), "cuda")
    c.check_flatten(kernels.flatten_cast, "cuda", c.F32, grads, *c.aligned(grads), c.nearest)


def test_flatten_cast_of_thousands_of_tensors() -> None:
    grads = [c.values((i % 97 + 1,), c.B16, "cuda", i) for i in range(3000)]
    c.check_flatten(kernels.flatten_cast, "cuda", c.F32, grads, *c.aligned(grads), c.nearest)


def test_flatten_cast_past_the_range_of_int32() -> None:
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    grads = [torch.ones(2**31 + 100, dtype=c.B16, device="cuda"), torch.full((1000,), 2.0, device="cuda")]
    out = torch.full((2**31 + 2048,), torch.nan, dtype=c.B16, device="cuda")
    kernels.flatten_cast(out, grads, [0, 2**31 + 128])
    assert bool((out[: 2**31 + 100] == 1).all())
    assert bool((out[2**31 + 128 : 2**31 + 1128] == 2).all())
    assert out[2**31 + 1128 :].tolist() == [0.0] * 920


@pytest.mark.parametrize("dtypes", [ALL, (c.F32,), (c.B16,)], ids=str)
def test_accumulate_cast(dtypes: tuple[torch.dtype, ...]) -> None:
    grads = c.mixed_grads(SIZES, dtypes, "cuda")
    for shift, (offsets, numel) in enumerate(c.layouts(grads)):
        c.check_accumulate(kernels.accumulate_cast, "cuda", c.F32, grads, offsets, numel, shift=shift)


def test_blocks() -> None:
    encoded.check_all(encode_blocks_triton, decode_blocks_triton, "cuda")


@pytest.mark.parametrize("narrow", [c.B16, c.F16, c.F32], ids=str)
def test_copy_writes(narrow: torch.dtype) -> None:
    c.check_copy_writes(kernels.copy_writes, "cuda", narrow, (*SIZES, 0))


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("wire", [*ALL, c.F64], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 16, 17, 64])
def test_reduce_rows(world_size: int, wire: torch.dtype, add: bool) -> None:
    for numel in c.SIZES:
        for shift in (0, 1):
            scale = 1 / world_size
            c.check_reduce(kernels.reduce_rows, "cuda", world_size, numel, wire, scale=scale, add=add, shift=shift)


def test_sums_of_squares() -> None:
    around = [n + i for n in (BLOCK, PER_PROGRAM) for i in (-1, 0, 1)]
    more_partials_than_added_at_a_time = PARTIALS * PER_PROGRAM + 1
    tensors = c.normals((*SIZES, *around, 0, more_partials_than_added_at_a_time, 0), (*ALL, c.F64), "cuda")
    c.check_sums_of_squares(kernels.sums_of_squares, tensors)


def test_sums_of_squares_of_thousands_of_tensors() -> None:
    c.check_sums_of_squares(kernels.sums_of_squares, c.normals(range(1000), [c.B16, c.F32], "cuda"))


def test_sums_of_squares_of_nothing() -> None:
    assert kernels.sums_of_squares([torch.empty(0, device="cuda")] * 3).tolist() == [0.0] * 3


def test_sums_of_squares_past_the_range_of_int32() -> None:
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    tensors = [torch.ones(2**31 + 100, dtype=c.B16, device="cuda"), torch.full((1000,), 2.0, device="cuda")]
    assert kernels.sums_of_squares(tensors).tolist() == [2**31 + 100, 4000]


def test_kernels_run_on_the_current_stream_without_a_synchronisation() -> None:
    grads = [torch.ones(1000, device="cuda"), torch.ones(70, 30, device="cuda").t()]
    halves = [grad.bfloat16() for grad in grads]
    out, acc = torch.zeros(5000, device="cuda"), torch.zeros(2500, device="cuda")
    kernels.accumulate_cast(out, halves, [0, 1024])  # compiles outside
    kernels.reduce_rows(out.view(2, 2500), acc, scale=0.5, add=True)
    kernels.sums_of_squares([out, acc])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            kernels.flatten_cast(out, grads, [0, 1024])
            kernels.accumulate_cast(out, halves, [0, 1024])
            kernels.reduce_rows(out.view(2, 2500), acc, scale=0.5, add=True)
            kernels.sums_of_squares([out, acc])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("half", [c.B16, c.F16], ids=str)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_matmul_into_fp32(batch: tuple[int, ...], half: torch.dtype, add: bool) -> None:
    """``out_dtype``: what a GPU's matmul does itself, against float64. 512 terms: bf16 would be off by 1e-1."""
    a = torch.randn(*batch, 512, 128, device="cuda").to(half).transpose(-1, -2)
    b = torch.randn(*batch, 512, 256, device="cuda").to(half)
    start = torch.randn(torch.Size((*batch, 128, 256)).numel(), device="cuda")
    out = start.clone() if add else torch.full_like(start, torch.nan)
    kernels.matmul_into(out, a, b, add=add)
    exact = torch.matmul(a.double(), b.double()).flatten() + (start.double() if add else 0)
    assert bool((out - exact).abs().max() < 1e-3)
