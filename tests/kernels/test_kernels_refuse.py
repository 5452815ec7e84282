"""Bad arguments: a ValueError that names both values, and nothing written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from zc import kernels

pytestmark = pytest.mark.check

NAN = torch.nan


def flat(numel: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((numel,), NAN, dtype=dtype)


OUT, SQUARE = flat(), flat().view(8, 8)
INT, META = torch.zeros(8, dtype=torch.int32), torch.zeros(8, device="meta")
SQUARE_OF_OUT, one = OUT.view(8, 8), torch.ones
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "flatten: int out": (lambda: kernels.flatten_cast(INT, [], []), r"out: dtype is torch.int32.*torch.float32"),
    "flatten: 2-D out": (lambda: kernels.flatten_cast(SQUARE, [], []), r"out: shape is \(8, 8\), expected 1 dim"),
    "flatten: strided out": (lambda: kernels.flatten_cast(OUT[::2], [], []), r"out: stride is 2, expected 1"),
    "flatten: int grad": (lambda: kernels.flatten_cast(OUT, [INT], [0]), r"grads\[0\]: dtype is torch.int32"),
    "flatten: device": (lambda: kernels.flatten_cast(OUT, [META], [0]), r"grads\[0\] is on meta, out on cpu"),
    "flatten: lengths": (lambda: kernels.flatten_cast(OUT, [one(2)], []), "1 grads, 0 offsets"),
    "flatten: slots overlap": (lambda: kernels.flatten_cast(OUT, [one(4)] * 2, [0, 3]), r"\[1\] is 3, expected 4"),
    "flatten: negative": (lambda: kernels.flatten_cast(OUT, [one(4)], [-1]), r"offsets\[0\] is -1, expected 0"),
    "flatten: too long": (lambda: kernels.flatten_cast(OUT, [one(4)], [61]), "ends at element 65, out has 64"),
    "flatten: overlap": (lambda: kernels.flatten_cast(OUT, [OUT[60:]], [0]), r"grads\[0\] overlaps out: bytes \[0x"),
    "flatten: strided": (lambda: kernels.flatten_cast(OUT[8:], [SQUARE_OF_OUT.t()], [0]), r"\[0\] overlaps out"),
    "accumulate: bf16": (lambda: kernels.accumulate_cast(flat(8, torch.bfloat16), [], []), "acc: dtype is torch.bf"),
    "accumulate: overlap": (lambda: kernels.accumulate_cast(OUT, [OUT[:4]], [9]), r"grads\[0\] overlaps acc"),
    "reduce: 1-D": (lambda: reduce(OUT, flat(8)), r"rows: shape is \(64,\), expected \[W, S\]"),
    "reduce: no rows": (lambda: reduce(SQUARE[:0], flat(8)), r"rows: shape is \(0, 8\), expected \[W, S\] with W >= 1"),
    "reduce: strided rows": (lambda: reduce(SQUARE.t(), flat(8)), "stride within a row is 8, expected 1"),
    "reduce: int": (lambda: reduce(SQUARE.int(), flat(8)), "rows: dtype is torch.int32"),
    "reduce: bf16 out": (lambda: reduce(SQUARE, flat(8, torch.bfloat16)), "out: dtype is torch.bfloat16.*float32"),
    "reduce: size": (lambda: reduce(SQUARE, flat(9)), "out has 9 elements, a row 8"),
    "reduce: device": (lambda: reduce(SQUARE, META), "out is on meta, rows on cpu"),
    "reduce: overlap": (lambda: reduce(SQUARE, SQUARE[3]), r"out overlaps rows: bytes \[0x"),
    "reduce: overlaps one row": (lambda: reduce(SQUARE[:, :6], SQUARE.view(-1)[20:26]), r"out overlaps rows\[2\]"),
    "norm: int": (lambda: kernels.sums_of_squares([OUT, INT]), r"tensors\[1\]: dtype is torch.int32"),
    "norm: 2-D": (lambda: kernels.sums_of_squares([OUT, SQUARE]), r"tensors\[1\]: shape is \(8, 8\), expected 1 dim"),
    "norm: 0-D": (lambda: kernels.sums_of_squares([one(())]), r"tensors\[0\]: shape is \(\), expected 1 dim"),
    "norm: strided": (lambda: kernels.sums_of_squares([OUT, OUT[::2]]), r"tensors\[1\]: stride is 2, expected 1"),
    "norm: device": (lambda: kernels.sums_of_squares([OUT, META]), r"tensors\[1\] is on meta, tensors\[0\] on cpu"),
}  # fmt: skip


def reduce(rows: torch.Tensor, out: torch.Tensor) -> None:
    kernels.reduce_rows(rows, out, scale=1.0, add=False)


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()
    assert bool(OUT.isnan().all()), "something was written"
    assert bool(SQUARE.isnan().all()), "something was written"
