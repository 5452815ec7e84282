"""The torch references (what zc.kernels runs on a CPU) against a slow oracle."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
import comparisons as c
import encoded

import zc
from zc import kernels
from zc.kernels import _common
from zc.kernels.blocks import decode_blocks_reference, encode_blocks_reference

ALL = (c.F32, c.B16, c.F16, c.F64)


def test_why_reference_gives_a_reason_where_there_is_no_gpu() -> None:
    reason = kernels.why_reference()
    assert (reason is None) == torch.cuda.is_available() or "triton" in str(reason)


def test_without_triton_a_gpu_s_user_is_told_what_to_install() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    with mock.patch.object(_common, "_import_error", "ModuleNotFoundError: No module named 'triton'"):
        said = kernels.note_of(gpu)
        assert said is not None and "No module named 'triton' (pip install 'zero-compile[triton]')" in said
        assert kernels.note_of(cpu) is None, "a CPU has references only"
    sees_gpu = mock.patch.object(torch.cuda, "is_available", return_value=True)
    with mock.patch.object(_common, "_import_error", None), sees_gpu:
        assert kernels.note_of(gpu) is None
    model = torch.nn.Linear(2, 2)
    noted = mock.patch.object(kernels, "note_of", lambda device: f"a note of {device}")
    with noted, pytest.warns(UserWarning, match="a note of cpu"):
        zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    assert "a note of cpu" in zc.explain(model).sections["notes"]


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_flatten_cast(dtype: torch.dtype) -> None:
    grads = c.mixed_grads(c.SIZES, ALL, "cpu")
    for offsets, numel in c.layouts(grads):
        c.check_flatten(kernels.flatten_cast, "cpu", dtype, grads, offsets, numel, c.nearest)


@given(
    sizes=st.lists(st.integers(0, 70), max_size=6),
    gaps=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    order=st.permutations(ALL),
)
@settings(deadline=None, max_examples=60)
def test_flatten_cast_of_any_layout(sizes: list[int], gaps: list[int], order: list[torch.dtype]) -> None:
    grads = [c.values((size,), order[i % 4], seed=i) for i, size in enumerate(sizes)]
    c.check_flatten(kernels.flatten_cast, "cpu", order[0], grads, *c.spread(grads, gaps), c.nearest, shift=1)
    acc_dtype = c.F64 if order[0] == c.F64 else c.F32
    c.check_accumulate(kernels.accumulate_cast, "cpu", acc_dtype, grads, *c.spread(grads, gaps))


def test_flatten_cast_of_nothing_is_zeros() -> None:
    c.check_flatten(kernels.flatten_cast, "cpu", c.B16, [], [], 100, c.nearest)
    c.check_flatten(kernels.flatten_cast, "cpu", c.B16, [], [], 0, c.nearest)


def test_gradients_that_require_grad_leave_no_graph() -> None:
    grad, out = torch.ones(3, requires_grad=True), torch.empty(3)
    kernels.flatten_cast(out, [grad], [0])
    assert not out.requires_grad


@pytest.mark.parametrize("dtype", [c.F32, c.F64], ids=str)
def test_accumulate_cast(dtype: torch.dtype) -> None:
    grads = c.mixed_grads(c.SIZES, ALL, "cpu")
    for offsets, numel in c.layouts(grads):
        c.check_accumulate(kernels.accumulate_cast, "cpu", dtype, grads, offsets, numel)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("wire", ALL, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
def test_reduce_rows(world_size: int, wire: torch.dtype, add: bool) -> None:
    scale = 1 / world_size
    for numel in c.SIZES if world_size == 2 else c.SIZES[:-1]:
        c.check_reduce(kernels.reduce_rows, "cpu", world_size, numel, wire, scale=scale, add=add, shift=numel % 2)


def test_reduce_rows_accepts_an_output_between_rows() -> None:
    storage = torch.ones(3, 10)
    kernels.reduce_rows(storage[:, :5], storage[1, 5:], scale=1.0, add=False)
    assert storage[1].tolist() == [1.0] * 5 + [3.0] * 5


def test_sums_of_squares() -> None:
    """All in one call: runs of small tensors, tensors that fill a piece or are longer than one, none first and last."""
    around_a_piece = (_common.CHUNK - 8, _common.CHUNK - 1, _common.CHUNK, _common.CHUNK + 1)
    sizes = (*c.SIZES, 7, 8, 9, *around_a_piece, 2 * _common.CHUNK + 5, 256, 0)
    c.check_sums_of_squares(kernels.sums_of_squares, c.normals(sizes, ALL, "cpu"))


@given(sizes=st.lists(st.integers(0, 100), min_size=1, max_size=12), dtype=st.sampled_from(ALL))
@settings(deadline=None, max_examples=60)
def test_sums_of_squares_of_any_runs(sizes: list[int], dtype: torch.dtype) -> None:
    with mock.patch.object(_common, "CHUNK", 64):
        c.check_sums_of_squares(kernels.sums_of_squares, c.normals(sizes, [dtype], "cpu"))


def test_runs_are_as_long_as_a_piece_allows() -> None:
    with mock.patch.object(_common, "CHUNK", 64):
        assert list(_common.runs([10, 50, 4, 64, 0, 65, 0, 3])) == [(0, 3), (3, 5), (5, 6), (6, 8)]
        assert list(_common.runs([])) == []


def test_sums_of_squares_of_no_tensors() -> None:
    c.assert_bits(kernels.sums_of_squares([]), torch.empty(0, dtype=c.F64))


def test_sums_of_squares_leave_no_graph() -> None:
    assert not kernels.sums_of_squares([torch.ones(3, requires_grad=True)]).requires_grad


@pytest.mark.parametrize("narrow", ALL, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 63, 1025, _common.CHUNK + 7])
def test_copy_writes(narrow: torch.dtype, numel: int) -> None:
    """Element by element: written ones are taken, the others keep the bits that ``narrow`` has dropped; NaN is NaN."""
    generator = torch.Generator().manual_seed(numel)
    master = torch.randn(numel + 3, generator=generator)[3:]  # begins in the middle of a word of 8 bytes
    params = master.to(narrow, copy=True)
    kernels.copy_writes([before := master.clone()], [params])
    assert torch.equal(before, master), "nothing was written"
    is_written = torch.rand(numel, generator=generator) < 0.3
    params[is_written] = 9.0
    odd = torch.tensor([float("nan"), float("nan"), 1.0, float("inf"), -0.0])[:numel]
    wanted = torch.where(is_written, params.float(), master)
    master[: len(odd)] = torch.tensor([float("nan"), 1.0, float("nan"), float("inf"), 0.0])[:numel]
    params[: len(odd)], wanted[: len(odd)] = odd.to(narrow), odd
    kernels.copy_writes([master], [params])
    torch.testing.assert_close(master, wanted, rtol=0, atol=0, equal_nan=True)
    if numel > 10 and narrow.itemsize < 4:
        unwritten = master[5:][~is_written[5:]]
        assert not torch.equal(unwritten, unwritten.to(narrow).float()), "precision is kept"


@pytest.mark.parametrize("narrow", [c.B16, c.F32], ids=str)
def test_copy_writes_of_several(narrow: torch.dtype) -> None:
    c.check_copy_writes(kernels.copy_writes, "cpu", narrow, (0, 1, 63, 1025, _common.CHUNK + 7))


def test_copy_writes_compares_with_what_was_there_before() -> None:
    master, before = torch.tensor([1.25, 2.25, 3.25]), torch.tensor([1.0, 2.0, 3.0])
    params = before.clone()
    kernels.copy_writes([master], [params], [before])
    assert master.tolist() == [1.25, 2.25, 3.25], "nothing was written"
    params[1] = 9.0
    kernels.copy_writes([master], [params], [before])
    assert master.tolist() == [1.25, 9.0, 3.25]


@pytest.mark.parametrize("layout", encoded.LAYOUTS)
def test_blocks(layout: str) -> None:
    encoded.check_all(encode_blocks_reference, decode_blocks_reference, "cpu", [layout])


def test_blocks_longer_than_a_piece() -> None:
    assert importlib.import_module("zc.kernels.blocks").CHUNK == _common.CHUNK
    with mock.patch("zc.kernels.blocks.CHUNK", 512):
        encoded.check_all(encode_blocks_reference, decode_blocks_reference, "cpu", ["runs"])


def test_a_difference_arrives_within_half_a_step() -> None:
    """What one update leaves is in the next difference: after three, weights are their masters to 1 in 10^6."""
    blocks, nbytes = encoded.blocks_of([False] * 4, 8)
    master, weights = (torch.randn(1024, generator=torch.Generator().manual_seed(k)) for k in range(2))
    wire = torch.zeros(nbytes, dtype=torch.uint8)
    errors = []
    for _ in range(3):
        kernels.encode_blocks(master, wire, blocks, base=weights)
        kernels.add_blocks(wire, weights, blocks)
        errors.append(float((master - weights).abs().max()))
    assert errors[0] < 4.0 / 127 and errors[1] < errors[0] / 100 and errors[2] < 1e-6


def test_copy_writes_refuses() -> None:
    with pytest.raises(ValueError, match=r"weights\[0\] has 4 elements, masters\[0\] 3"):
        kernels.copy_writes([torch.zeros(3)], [torch.zeros(4)])
    with pytest.raises(ValueError, match="overlap"):
        kernels.copy_writes([same := torch.zeros(3)], [same])
