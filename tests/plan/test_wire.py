"""Which blocks travel encoded, and where: literal bytes. What can't be combined with it is refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import zc
from zc.errors import PlanError
from zc.kernels.blocks import Run
from zc.planning.layout import flat_layout
from zc.planning.wire import row_nbytes, rows_of

SHAPES = [("a", (5, 256)), ("bias", (300,)), ("b", (4, 256)), ("small", (3, 100))]


def test_rows_by_hand() -> None:
    """Slots at 0, 1280, 1792 and 2816: blocks 0 to 4 encoded, 5 and 6 exact, 7 to 10 encoded, 11 and 12 exact, and
    padding to 14. Two shards of 7."""
    layout = flat_layout(SHAPES, 2, 256)
    assert [slot.offset for slot in layout.slots] == [0, 1280, 1792, 2816] and layout.numel_padded == 14 * 256
    first = rows_of(layout, 8, 0, 1)
    assert first.runs == (Run(0, 5, 0, (5 * 256 + 2 * 1024) // 4), Run(5, 2, 5 * 256, -1))
    assert first.offsets == (0, 3456), "1280 + 2048 + 5 scales = 3348, to a multiple of 128"
    both = rows_of(layout, 8, 0, 2)
    scales = (3456 + 4 * 256 + 2 * 1024 + 256) // 4
    assert both.runs[2:] == (
        Run(7, 4, 3456, scales), Run(11, 2, 3456 + 1024, -1), Run(13, 1, 3456 + 1024 + 2048, scales + 4)
    )  # fmt: skip
    assert both.offsets == (0, 3456, 3456 + 3456) and row_nbytes(layout, 8) == (3456, 3456)
    assert rows_of(layout, 4, 0, 1).offsets == (0, 2816), "5 * 128 + 2048 + 20 = 2708"
    assert row_nbytes(layout, 4)[0] == 2816


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_rows_cover_each_block_once(world_size: int) -> None:
    layout = flat_layout(SHAPES * 3, world_size, 256)
    for bits in (8, 4):
        rows = rows_of(layout, bits, 0, world_size)
        runs = [Run(*run) for run in rows.runs]
        assert [run.first for run in runs] == [sum(r.num for r in runs[:k]) for k in range(len(runs))]
        assert sum(run.num for run in runs) * 256 == layout.numel_padded
        sizes = [stop - start for start, stop in itertools.pairwise(rows.offsets)]
        assert tuple(sizes) == row_nbytes(layout, bits)
        spans = sorted(
            span
            for r in runs
            for span in (
                [(r.at, r.at + r.num * 1024)]
                if r.scales < 0
                else [(r.at, r.at + r.num * 32 * bits), (4 * r.scales, 4 * (r.scales + r.num))]
            )
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "no bytes of two blocks"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"reduce_dtype": torch.int8, "reduce": "native"}, "reduce_dtype=torch.int8 and reduce='native'"),
    ({"gather_dtype": "int4", "reduce": "native"}, "gather_dtype='int4' and reduce='native'"),
    ({"gather_dtype": torch.int8, "offload": "cpu"}, "gather_dtype=torch.int8 and offload='cpu'"),
    ({"gather_dtype": torch.bfloat16}, "gather_dtype must be one of None, torch.int8, 'int4'"),
    ({"reduce_dtype": "int4"}, "reduce_dtype must be one of"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=lambda item: str(item)[:40])
def test_refused_before_anything_changes(options: dict[str, Any], text: str) -> None:
    model = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    before = list(optimizer.param_groups[0]["params"])
    with pytest.raises(PlanError, match=text):
        zc.compile(model, optimizer, backend="eager", **options)
    assert all(a is b for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))
    with pytest.raises(PlanError, match=text):
        zc.plan(model, world_size=2, **options)


def test_refused_parameters_optimizers_and_meshes() -> None:
    matrix = nn.Linear(40, 40, bias=False)
    for name, option in (("reduce_dtype", torch.int8), ("gather_dtype", "int4")):
        with pytest.raises(PlanError, match=rf"weight is torch.float64, of which {name}"):
            zc.plan(nn.Linear(4, 4).double(), world_size=2, **{name: option})
        with pytest.raises(PlanError, match=rf"{name}=.* and a mesh of two dimensions with 2 replicas"):
            zc.plan(matrix, world_size=4, num_replicas=2, **{name: option})
    for model, options in ((matrix, {"reduce_dtype": torch.float16}), (nn.Linear(4, 4).half(), {})):
        with pytest.raises(PlanError, match="in float16, and a sum over 2 ranks may pass"):
            zc.plan(model, world_size=2, reduce="native", **options)
    with pytest.raises(PlanError, match="gather_dtype='int4' and an optimizer that reads whole parameters"):
        zc.plan(matrix, world_size=2, optimizer="Muon", gather_dtype="int4")
    assert zc.plan(matrix, world_size=2, optimizer="Muon", reduce_dtype=torch.int8).wire["gradients"] > 0
