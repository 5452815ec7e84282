"""What the pictures of a schedule are drawn from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from zc.config import Config
from zc.passes.base import run_passes
from zc.passes.pipeline import pipeline
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan, flat
from zc.report import timeline
from zc.schedule.nodes import op_of, steps
from zc.schedule.spec import Take

ROWS, WIDTH = 30_000, 64


def embedding_under_layers() -> tuple[fx.Graph, Plan]:
    """The backward of a large embedding (registered first, made last) under two small matrices, one bucket each."""

    def backward(grad, x2, x1, w2, w1, index, mask):  # type: ignore[no-untyped-def]
        d2 = torch.mm(x2.t(), grad)
        grad = torch.mm(grad, w2.t())
        d1 = torch.mm(x1.t(), grad)
        grad = torch.mm(grad, w1.t())
        zeros = torch.ops.aten.full.default([ROWS, WIDTH], 0.0)
        rows = torch.ops.aten._unsafe_masked_index_put_accumulate.default(zeros, mask, [index], grad)
        return rows, d1, d2

    x = [torch.randn(4, WIDTH) for _ in range(3)] + [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    gm = make_fx(backward, tracing_mode="fake")(*x, torch.zeros(4, dtype=torch.int64), torch.ones(4, 1).bool())
    graph: fx.Graph = gm.graph
    graph.owning_module = gm
    graph.output_node().meta["grad_of"] = ("embedding", "first", "second")
    shapes = {"embedding": (ROWS, WIDTH), "first": (WIDTH, WIDTH), "second": (WIDTH, WIDTH)}
    specs = [ParamSpec(n, s, torch.float32, torch.device("cpu")) for n, s in shapes.items()]
    return graph, make_plan(specs, Config(bucket_nbytes=WIDTH * WIDTH * 4), flat(2))


def test_flops_of_a_schedule_are_those_of_its_matmuls() -> None:
    """By hand: the two matmuls that stay in segments, 2 M N K each; the weight gradients are wgrad_into's."""
    graph, plan = embedding_under_layers()
    graph = run_passes(graph, plan, pipeline(in_place=True))[0]
    inner = [n for node in steps(graph) if "segment" in node.meta for n in node.meta["segment"].graph.nodes]
    assert sum(timeline.flops(n) for n in inner) == 2 * (2 * 4 * WIDTH * WIDTH)
    us = timeline.estimate(plan)
    assert all(us(n) >= 0 for n in steps(graph))
    launches = {n.args[0]: us(n) for n in steps(graph) if isinstance(op_of(n), Take)}
    assert launches[2] > 50 * launches[0], "the embedding is 469 times as large"
    half = ROWS * WIDTH * 4 / 2  # each of two ranks sends half of the bucket
    c = timeline.CEILINGS["cpu"]
    assert launches[2] == pytest.approx(c.us_launch + half / c.nbytes_link, rel=1e-3)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_flops_of_convolutions_and_attention(mode: str) -> None:
    """By hand, forward and backward; a symbolic size counts as 1, and nothing is guarded on."""

    def both(x, w, q, k, v):  # type: ignore[no-untyped-def]
        total = F.conv2d(x, w).sum() + F.scaled_dot_product_attention(q, k, v).sum()
        return torch.autograd.grad(total, (x, w, q, k, v))

    inputs = [torch.randn(shape, requires_grad=True) for shape in ((2, 3, 8, 8), (4, 3, 3, 3), *((2, 4, 16, 8),) * 3)]
    graph = make_fx(both, tracing_mode=mode)(*inputs).graph
    flops = [work for node in graph.nodes if (work := timeline.flops(node))]
    once = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3), 4 * (2 * 4 * 16 * 8) * 16
    assert flops == ([once[0], once[1], once[1] * 10 / 4, once[0] * 2] if mode == "fake" else [2, 4, 10, 4])
