"""The band of gathered weights in the picture of a step (stage 3): its bytes, the line of weight_nbytes, the page."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zc
from zc.config import Config
from zc.engine.ledger import ClockedStep, Span
from zc.engine.operations import Operations
from zc.engine.program import Program, build
from zc.passes.pipeline import PARTS
from zc.passes.scheduling import scheduling
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan, flat
from zc.planning.residency import Uses, plan_residency
from zc.registry import sharded
from zc.report.html import STYLE, Timeline, draw, measured
from zc.schedule.nodes import op_of, steps, stream_of
from zc.schedule.spec import FreeWeights, Gather, ReadWeights, Sync
from zc.weights.weight_uses import PREFIX, weights_graph


def plan_of(sizes: tuple[int, ...], cap: int) -> Plan:
    """Buckets of so many bytes."""
    specs = [ParamSpec(f"p{k}", (size // 4,), torch.float32, torch.device("cpu")) for k, size in enumerate(sizes)]
    return make_plan(specs[::-1], Config(stage=3, bucket_nbytes=256, weight_nbytes=cap), flat(2))


def planned(plan: Plan, uses: Uses, name: str = "weights_0") -> Program:
    residency = plan_residency(uses, {bucket.index: bucket.nbytes for bucket in plan.buckets}, plan.weight_cap)
    nothing = Operations(SimpleNamespace(operations={}))  # type: ignore[arg-type]
    passes = scheduling(prove=True, prefix=PREFIX, parts=PARTS)
    return build(weights_graph(plan, residency), plan, passes, nothing, name=name)


def spans_of(one: Program, begin: float = 0.0) -> list[Span]:
    """By hand: the k-th gather runs from 100 k to 100 k + 50, a read takes 10 after what is before it, a free 5."""
    spans, now, num_gathers = list[Span](), begin, 0
    for node in steps(one.graph):
        op = op_of(node)
        if isinstance(op, Sync):
            continue
        start = now
        if isinstance(op, Gather):
            start, num_gathers = begin + 100.0 * num_gathers, num_gathers + 1
        now = start + {Gather: 50.0, ReadWeights: 10.0, FreeWeights: 5.0}[type(op)]
        spans.append(Span(one.name, node.name, stream_of(node), start, now))
    return spans


def line_of(spans: list[Span], *passes: Program) -> Timeline:
    return measured(ClockedStep(tuple(spans), (Span("", "forward", "loop", 0.0, 400.0),), ()), passes)


def three_layers() -> Timeline:
    """Two of three buckets fit."""
    one = planned(plan_of((256, 256, 256), 512), ((2,), (1,), (0,)))
    return line_of(spans_of(one), one)


def test_the_bytes_of_each_moment() -> None:
    """2 and 1 are gathered, 2 is read and freed, 0 comes in its place."""
    line = three_layers()
    assert line.weight_cap == 512
    assert line.gathered == (
        (0.0, 256), (100.0, 512), (165.0, 256), (200.0, 512), (265.0, 256), (280.0, 0),
    )  # fmt: skip
    gathers = [box for box in line.boxes if isinstance(box.op, Gather)]
    assert [(box.lane, box.start, box.stop) for box in gathers] == [
        ("comm", 0.0, 50.0), ("comm", 100.0, 150.0), ("comm", 200.0, 250.0),
    ]  # fmt: skip
    assert not any(isinstance(box.op, ReadWeights | FreeWeights) for box in line.boxes), "they do nothing themselves"


def test_what_a_pass_has_left_goes_with_the_next_gather_there() -> None:
    """An exception in a forward: nothing was freed, and the next pass gathers into these bytes, in another order."""
    plan = plan_of((256, 512), 768)
    left, following = planned(plan, ((1,), (0,)), "left"), planned(plan, ((0,), (1,)), "following")
    spans = [*spans_of(left)[:3], *spans_of(following, 1000.0)]
    assert line_of(spans, left, following).gathered == (
        (0.0, 512), (100.0, 768), (1000.0, 512), (1100.0, 768), (1165.0, 512), (1180.0, 0),
    )  # fmt: skip


def test_the_band_and_its_line() -> None:
    """48 pixels are weight_nbytes; 1,060 pixels are the 400 microseconds from pixel 90 on."""
    line = three_layers()
    picture = draw(line)
    (path,) = re.findall(r'<path class="gathered" d="([^"]*)"', picture)
    bottom = 34 * 3 + 24 + 8 + 48  # below three lanes and the caption
    full, half = bottom - 48.0, bottom - 24.0
    assert path == (
        f"M90.0,{bottom} V{half} H355.0 V{full} H527.2 V{half} H620.0 V{full} H792.2 V{half} H832.0 V{bottom}.0 "
        f"H1150.0 V{bottom} Z"
    )
    (cap,) = re.findall(r'<line class="cap" x1="90" x2="1160" y1="(\d+)" y2="(\d+)"/>', picture)
    assert cap == (str(bottom - 48), str(bottom - 48))
    assert "gathered weights: at most 0.0 MB; the line is weight_nbytes, 0.0 MB" in picture
    assert f'viewBox="0 0 1160 {bottom + 20}"' in picture
    assert "path.gathered" in STYLE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(("stage", "cap"), [(2, None), (3, 2**15)])
def test_the_page_of_a_run(stage: int, cap: int | None, tmp_path: Path) -> None:
    """A clocked step of stage 3 has the band: each gather of the pass, never above the cap. Stage 2 has none."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    zc.compile(model, optimizer, stage=stage, backend="aot_eager", bucket_nbytes=2**14, weight_nbytes=cap)
    for _ in range(6):
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = zc.explain(model, format="html", path=tmp_path / "page.html")
    page = report.path.read_text()
    assert page.count('class="cap"') == page.count('<path class="gathered"') == (stage == 3)
    runtime = sharded(model).runtime
    step = runtime.streams.clock.step()
    assert step is not None
    if stage == 3:
        assert cap is not None
        passes = runtime.weights.passes_so_far
        line = measured(step, [program for _, program in passes])
        gathers = [box for box in line.boxes if isinstance(box.op, Gather)]
        peak, _, *uses = next(table for table, _ in passes if table).splitlines()
        planned = [bucket for use in uses for bucket in use[22:44].split(",") if bucket.strip() != "-"]
        assert len(gathers) == len(planned) > 4, "each gather of the pass"
        assert max(nbytes for _, nbytes in line.gathered) == cap
        assert peak.startswith(f"at most {cap:,} bytes")
        assert line.gathered[-1][1] == 0 and len(line.gathered) >= 2 * len(gathers)
