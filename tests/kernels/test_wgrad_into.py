"""Gradients made in their slots, against torch's own products, float64 and a loop; guarded, NaN-filled outputs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import comparisons as c

from zc.kernels import matmul_into, rows_into, scatter_into

SHAPES = [(1, 1, 1), (63, 5, 1), (1, 0, 7), (33, 128, 64), (65, 1025, 3)]


def operands(m: int, k: int, n: int, dtype: torch.dtype, batch: int | None = None) -> tuple[Tensor, Tensor]:
    """[M, K] as the transpose of a [K, M], as a weight's gradient has it, and [K, N]."""
    generator = torch.Generator().manual_seed(m * 7 + n)
    lead = () if batch is None else (batch,)
    a = torch.randn(*lead, k, m, generator=generator).to(dtype).transpose(-1, -2)
    return a, torch.randn(*lead, k, n, generator=generator).to(dtype)


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("dtype", [c.F32, c.B16, c.F16, c.F64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_written_it_is_torch_s_product(shape: tuple[int, int, int], dtype: torch.dtype, batch: int | None) -> None:
    a, b = operands(*shape, dtype, batch)
    expected = torch.matmul(a, b)
    for shift in (0, 1):
        out, storage = c.guarded(expected.numel(), dtype, "cpu", shift)
        matmul_into(out, a, b, add=False)
        c.assert_guards(storage, out)
        # an unaligned output may take another path through BLAS
        if shift == 0:
            c.assert_bits(out, expected.flatten())
        assert torch.allclose(out.double(), expected.flatten().double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("half", [c.B16, c.F16], ids=str)
def test_into_fp32_nothing_is_rounded_to_half_precision(half: torch.dtype, batch: int | None) -> None:
    a, b = operands(33, 512, 64, half, batch)
    start = torch.randn(torch.matmul(a, b).numel())
    for add in (False, True):
        exact = torch.matmul(a.double(), b.double()).flatten() + (start.double() if add else 0)
        out, storage = c.guarded(start.numel(), c.F32, "cpu")
        if add:
            out.copy_(start)
        matmul_into(out, a, b, add=add)
        c.assert_guards(storage, out)
        assert (out - exact).abs().max() < 1e-4, "fp32 all the way"
        assert (torch.matmul(a, b).flatten() - exact + (start if add else 0)).abs().max() > 1e-3, "halves are not"


def test_added_it_is_a_sum_in_fp32() -> None:
    """256 + 1 is 257."""
    out = torch.full((1,), 256.0)
    matmul_into(out, torch.ones(1, 1), torch.ones(1, 1), add=True)
    assert out.item() == 257.0


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_scatter(add: bool, index_dtype: torch.dtype) -> None:
    """Rows that come often, never, and where the mask is off (an index out of range there)."""
    rows, dim = 9, 5
    index = torch.tensor([[3, 3, 0, 8], [3, 10**6, -5, 2]], dtype=index_dtype)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1]], dtype=torch.bool).unsqueeze(-1)
    values = torch.randn(2, 4, dim)
    values[1, 1] = torch.nan  # masked: it must not reach any row
    start = torch.randn(rows * dim)
    out, storage = c.guarded(rows * dim, c.F32, "cpu")
    if add:
        out.copy_(start)
    expected = [[float(x) for x in row] if add else [0.0] * dim for row in start.view(rows, dim)]
    for i, m, v in zip(index.flatten().tolist(), mask.flatten().tolist(), values.view(-1, dim).tolist(), strict=True):
        if m:
            expected[i] = [torch.tensor(x).add(y).item() for x, y in zip(expected[i], v, strict=True)]
    scatter_into(out, index, mask, values, add=add)
    c.assert_guards(storage, out)
    c.assert_bits(out, torch.tensor(expected).flatten())


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_rows(add: bool, index_dtype: torch.dtype) -> None:
    """Against torch's index_put; rows that come often, never, and from the end."""
    index = torch.tensor([[3, 3, 0, 8], [3, -1, -9, 2]], dtype=index_dtype)
    values, start = torch.randn(2, 5, 4).transpose(1, 2), torch.randn(9, 5)
    out, storage = c.guarded(45, c.F32, "cpu")
    out.copy_(start.view(-1) if add else out)
    rows_into(out, index, values, add=add)
    c.assert_guards(storage, out)
    c.assert_bits(out, (start if add else torch.zeros(9, 5)).index_put([index.long()], values, True).view(-1))
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        rows_into(out, index + 9, values, add=True)


def test_scatter_of_nothing_zeros_the_slot() -> None:
    out, storage = c.guarded(12, c.F32, "cpu")
    scatter_into(
        out, torch.zeros(0, dtype=torch.int64), torch.ones(0, 1, dtype=torch.bool), torch.ones(0, 4), add=False
    )
    assert out.tolist() == [0.0] * 12
    c.assert_guards(storage, out)


OUT = torch.full((64,), torch.nan)
X, HALF, MASK = torch.ones(8, 8), torch.ones(8, 8, dtype=torch.bfloat16), torch.ones(8, 1, dtype=torch.bool)
INDEX = torch.zeros(8, dtype=torch.int64)
REFUSED = {
    "inner sizes": (lambda: matmul_into(OUT, X, torch.ones(7, 8), add=False), r"\(8, 8\).*\(7, 8\)"),
    "dimensions": (lambda: matmul_into(OUT, X, X.view(1, 8, 8), add=False), r"\(8, 8\).*\(1, 8, 8\)"),
    "size of out": (lambda: matmul_into(OUT[:63], X, X, add=False), "out has 63 elements, a @ b 64"),
    "2-D out": (lambda: matmul_into(OUT.view(8, 8), X, X, add=False), r"out: shape is \(8, 8\)"),
    "dtypes": (lambda: matmul_into(OUT, X, HALF, add=False), r"b: dtype is torch.bfloat16.*torch.float32"),
    "half out": (lambda: matmul_into(OUT.bfloat16(), X, X, add=False), "out: dtype is torch.bfloat16"),
    "device": (lambda: matmul_into(OUT, X.to("meta"), X, add=False), "a is on meta, out on cpu"),
    "overlap": (lambda: matmul_into(OUT, OUT.view(8, 8), X, add=False), r"a overlaps out: bytes \[0x"),
    "scatter shapes": (lambda: scatter_into(OUT, INDEX, MASK[:7], X, add=False), r"\(8,\), \(7, 1\), \(8, 8\)"),
    "rows shapes": (lambda: rows_into(OUT, INDEX, X[:7], add=False), r"index, values do.*: \(64,\), \(8,\), \(7, 8\)"),
    "rows overlap": (lambda: rows_into(OUT, INDEX, OUT.view(8, 8), add=True), "values overlaps out"),
    "scatter dtype": (lambda: scatter_into(OUT, INDEX, MASK, HALF, add=False), "values: dtype is torch.bfloat16"),
    "scatter index": (lambda: scatter_into(OUT, X[0], MASK, X, add=False), "index: dtype is torch.float32"),
    "scatter overlap": (lambda: scatter_into(OUT, INDEX, MASK, OUT.view(8, 8), add=True), "values overlaps out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
    assert bool(OUT.isnan().all()), "something was written"
