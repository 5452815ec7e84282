"""The Triton kernels in Triton's interpreter, on CPU tensors. Not collected: test_interpreter.py runs it with
TRITON_INTERPRET=1 in a process of its own, because Triton reads that variable when it decorates a kernel.

The one place where the interpreter computes wrongly is its cast between fp32 and bf16 (in 3.6 and in 3.9, whatever
rounding is asked for): to bf16 it truncates instead of rounding to nearest even, and subnormals go wrong both ways.
``exact_casts`` puts torch's cast there, so that every comparison below is of bits, special numbers included.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import comparisons as c
import encoded
import numpy as np
import pytest
import torch
from tiers import FULL

from zc.kernels._common import tl, triton
from zc.kernels._slots import collapse, fills_tiles
from zc.kernels.blocks import decode_blocks_triton, encode_blocks_triton
from zc.kernels.copy_writes import copy_writes_triton
from zc.kernels.reduce_rows import reduce_rows_triton
from zc.kernels.sums_of_squares import BLOCK, PER_PROGRAM, sums_of_squares_triton
from zc.kernels.write_grads import accumulate_cast_triton

interpreter = importlib.import_module("triton.runtime.interpreter")
TRAINING = (c.F32, c.B16, c.F16)


INTERPRETERS_OWN = interpreter._convert_float


def exact_cast(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    if {source, target} != {tl.float32, tl.bfloat16}:
        return INTERPRETERS_OWN(data, source, target, rounding)
    if source == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return torch.from_numpy(np.ascontiguousarray(data)).to(c.B16).view(torch.int16).numpy().view(np.uint16)


@pytest.fixture(autouse=True)
def exact_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_convert_float", exact_cast)


def test_this_is_the_interpreter_and_its_own_cast_truncates() -> None:
    """Where this fails, Triton has mended its cast: drop ``exact_casts``."""
    assert triton.knobs.runtime.interpret
    x = np.array([1 + 2.0**-8 + 2.0**-9], dtype=np.float32)  # three quarters of an ulp above 1
    assert INTERPRETERS_OWN(x, tl.float32, tl.bfloat16, None).view(np.uint16)[0] == 0x3F80
    assert exact_cast(x, tl.float32, tl.bfloat16, None)[0] == 0x3F81


def test_transposed_gradients_go_in_tiles() -> None:
    grads = c.transposed(TRAINING, "cpu")
    assert all(fills_tiles(*collapse(grad)) for grad in grads)
    for offsets, numel in c.layouts(grads):
        c.check_accumulate(accumulate_cast_triton, "cpu", c.F32, grads, offsets, numel, shift=numel % 2)


@pytest.mark.parametrize(
    ("shape", "strides", "fills"),
    [
        ((64, 16), (1, 64), True),
        ((4, 64, 3, 3), (576, 1, 192, 64), True),
        ((4, 16, 3, 3), (144, 1, 48, 16), False),  # 144 of the 1024 elements of a tile
        ((64, 3, 7, 7), (147, 1, 21, 3), False),
        ((64, 16), (2, 128), False),
        ((64, 16), (32, 1), False),
        ((8, 64, 16, 8), (1, 8192, 8, 128), False),  # four dimensions
    ],
    ids=str,
)
def test_what_fills_tiles(shape: tuple[int, ...], strides: tuple[int, ...], fills: bool) -> None:
    assert fills_tiles(*collapse(torch.empty_strided(shape, strides))) == fills


def test_accumulate_cast_of_a_million() -> None:
    grads = [c.values((c.SIZES[-1],), c.B16)]
    c.check_accumulate(accumulate_cast_triton, "cpu", c.F32, grads, [0], c.SIZES[-1] + 5000)


def test_accumulate_cast_of_nothing() -> None:
    c.check_accumulate(accumulate_cast_triton, "cpu", c.F32, [], [], 100)
    c.check_accumulate(accumulate_cast_triton, "cpu", c.F32, [], [], 0)


def test_accumulate_cast() -> None:
    grads = c.mixed_grads((0, 1, 63, 1025, 9000), TRAINING, "cpu")
    for offsets, numel in c.layouts(grads):
        c.check_accumulate(accumulate_cast_triton, "cpu", c.F32, grads, offsets, numel)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("wire", TRAINING, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 16, 17, 24, 26, 64] if FULL else [1, 3, 17])
def test_reduce_rows(world_size: int, wire: torch.dtype, add: bool) -> None:
    for numel in c.SIZES[:-1]:
        shift = numel % 2
        c.check_reduce(reduce_rows_triton, "cpu", world_size, numel, wire, scale=1 / world_size, add=add, shift=shift)


def test_reduce_rows_of_a_million() -> None:
    c.check_reduce(reduce_rows_triton, "cpu", 2, c.SIZES[-1], c.B16, scale=0.5, add=True)


def test_blocks() -> None:
    encoded.check_some(encode_blocks_triton, decode_blocks_triton, encoded.LAYOUTS["runs"])


@pytest.mark.parametrize("narrow", [c.B16, c.F16], ids=str)
def test_copy_writes(narrow: torch.dtype) -> None:
    c.check_copy_writes(copy_writes_triton, "cpu", narrow, (0, 1, 63, 1025, 0, 9000))
    copy_writes_triton([torch.empty(0)] * 3, [torch.empty(0, dtype=narrow)] * 3, None)


SQUARED = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, PER_PROGRAM, 0, PER_PROGRAM + 1, 2 * PER_PROGRAM + BLOCK + 5, 0)


def test_sums_of_squares() -> None:
    """By default every size in one dtype, and two sizes in each: a kernel knows the dtype where it loads, alone."""
    every = c.normals(SQUARED, (*TRAINING, c.F64) if FULL else (c.B16,), "cpu")
    others = c.normals((BLOCK + 1, SQUARED[-2]), () if FULL else (c.F32, c.F16, c.F64), "cpu")
    c.check_sums_of_squares(sums_of_squares_triton, every + others)


def test_sums_of_squares_of_more_partials_than_are_added_at_a_time() -> None:
    module = importlib.import_module("zc.kernels.sums_of_squares")
    with mock.patch.object(module, "PARTIALS", 2):
        tensors = c.normals([5 * PER_PROGRAM + 1, 4 * PER_PROGRAM], [c.B16], "cpu")
        c.check_sums_of_squares(sums_of_squares_triton, tensors)


def test_sums_of_squares_of_nothing() -> None:
    assert sums_of_squares_triton([torch.empty(0)] * 3).tolist() == [0.0] * 3
