"""One bucket's weight gradients behind the last reduction: when, in which order, and the proof's word on it."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from llama import Llama, tokens
from torch import fx

import zc
from zc.passes import delay_weight_grads, exactly_once
from zc.passes.delay_weight_grads import _end, _Group, choose
from zc.passes.pipeline import PIPELINE
from zc.passes.runner import run_passes
from zc.planning.placement import PLACEMENTS
from zc.planning.plan import ParamSpec, Plan, make_plan
from zc.schedule import cost
from zc.schedule.nodes import launch_reduce, steps, text, wgrad_into

ROWS, WIDTH = 30_000, 64


def embedding_under_layers(batch: int = 4, **options: Any) -> tuple[fx.Graph, Plan]:
    """The backward of a large embedding (registered first, made last) under two small matrices, one bucket each."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def backward(grad, x2, x1, w2, w1, index, mask):  # type: ignore[no-untyped-def]
        d2 = torch.mm(x2.t(), grad)
        grad = torch.mm(grad, w2.t())
        d1 = torch.mm(x1.t(), grad)
        grad = torch.mm(grad, w1.t())
        zeros = torch.ops.aten.full.default([ROWS, WIDTH], 0.0)
        rows = torch.ops.aten._unsafe_masked_index_put_accumulate.default(zeros, mask, [index], grad)
        return rows, d1, d2

    x = [torch.randn(batch, WIDTH) for _ in range(3)] + [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    index, mask = torch.zeros(batch, dtype=torch.int64), torch.ones(batch, 1, dtype=torch.bool)
    gm = make_fx(backward, tracing_mode="fake")(*x, index, mask)
    graph: fx.Graph = gm.graph
    graph.owning_module = gm
    graph.output_node().meta["grad_of"] = ("embedding", "first", "second")
    shapes = {"embedding": (ROWS, WIDTH), "first": (WIDTH, WIDTH), "second": (WIDTH, WIDTH)}
    specs = [ParamSpec(n, s, torch.float32, torch.device("cpu")) for n, s in shapes.items()]
    settings = {"world_size": 2, "placement": PLACEMENTS[2], "reduce": "exact", "reduce_dtype": None, "num_buffers": 2,
                "overlap": True, "bucket_nbytes": WIDTH * WIDTH * 4}  # fmt: skip
    return graph, make_plan(specs, **{**settings, **options})


def scheduled(**options: Any) -> tuple[fx.Graph, Plan]:
    graph, plan = embedding_under_layers(**options)
    return run_passes(graph, plan, PIPELINE)[0], plan


def order(graph: fx.Graph) -> list[tuple[str, int, str]]:
    return [
        (n.target.__name__, n.args[0], n.args[2] if n.target is launch_reduce else n.args[1])
        for n in steps(graph)
        if n.target in (wgrad_into, launch_reduce)
    ]


def test_a_large_embedding_is_reduced_under_the_matmul_that_came_before_it() -> None:
    """The whole pipeline, verify included, over the schedule by hand."""
    graph, _ = scheduled()
    assert order(graph) == [
        ("wgrad_into", 0, "flat_grad[0]"), ("launch_reduce", 0, "flat_grad[0]"),
        ("wgrad_into", 2, "flat_grad[1]"), ("launch_reduce", 2, "flat_grad[1]"),
        ("wgrad_into", 1, "flat_grad[0]"), ("launch_reduce", 1, "flat_grad[0]"),
    ]  # fmt: skip
    assert not exactly_once.check(list(steps(graph)), None)


@pytest.mark.parametrize(
    "options", [{"world_size": 1}, {"overlap": False}], ids=["one rank sends nothing", "no overlap"]
)
def test_left_alone(options: dict[str, Any]) -> None:
    assert [bucket for kind, bucket, _ in order(scheduled(**options)[0]) if kind == "wgrad_into"] == [0, 1, 2]


def test_a_microbatch_that_sends_nothing_is_left_alone() -> None:
    graph, plan = embedding_under_layers(placement=PLACEMENTS[1])
    kinds = order(run_passes(graph, plan.microbatch(), PIPELINE)[0])
    assert [bucket for _, bucket, _ in kinds] == [0, 1, 2]


def test_the_choice_is_the_same_for_every_batch_size() -> None:
    """Ranks whose last batches differ in size must launch in one order (INVARIANTS I7)."""
    assert {str(order(scheduled(batch=batch)[0])) for batch in (1, 4, 500)} == {str(order(scheduled()[0]))}


def test_a_second_run_moves_nothing_more() -> None:
    graph, plan = embedding_under_layers()
    names = [p.name for p in PIPELINE]
    once = run_passes(graph, plan, PIPELINE[: names.index("delay_weight_grads") + 1])[0]
    assert text(delay_weight_grads.run(once, plan)) == text(once)


def group(bucket: int, delayed: float, before: float, exchange: float) -> _Group:
    return _Group(bucket, (), delayed, before, exchange)


def by_events(groups: list[_Group]) -> float:
    """When the last reduction of ``groups`` ends, by a loop over microseconds: an oracle that shares no formula."""
    ready, now = [], 0
    for g in groups:
        now += int(g.us_before + g.us_delayed)
        ready.append(now)
    time, left, done = 0, [int(g.us_exchange) for g in groups], 0
    while done < len(groups):
        if ready[done] <= time:
            left[done] -= 1
        time += 1
        if left[done] == 0:
            done += 1
    return max(now, time)


def test_the_predicted_end_against_a_clock() -> None:
    generator = random.Random(0)
    _, plan = embedding_under_layers()
    for _ in range(60):
        groups = [group(k, *(generator.randint(1, 30) for _ in range(3))) for k in range(generator.randint(2, 5))]
        assert _end(groups, None) == by_events(groups)
        ends = [by_events(groups)]
        for k in range(len(groups) - 1):
            # what of k is not delayed stays where it is
            stays = group(-1, 0, groups[k].us_before, 0)
            moved = group(k, groups[k].us_delayed, 0, groups[k].us_exchange)
            last = groups[k + 1 :]
            merged = [*groups[:k], _Group(-1, (), last[0].us_delayed, stays.us_before + last[0].us_before,
                                          last[0].us_exchange), *last[1:], moved]  # fmt: skip
            ends.append(by_events(merged))
            assert _end(groups, k) == ends[-1]
        chosen = choose(groups, plan)
        worth = min(ends[1:]) <= ends[0] * (1 - delay_weight_grads.GAIN)
        assert (chosen is not None) == worth
        assert chosen is None or ends[1 + chosen] == min(ends)


def test_options() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(zc.PlanError, match=r"delay_weight_grads=True needs write_in_place=True"):
        zc.compile(model, optimizer, delay_weight_grads=True, write_in_place=False)


def test_flops_of_a_schedule_are_those_of_its_matmuls() -> None:
    """By hand: the two matmuls that stay in segments, 2 M N K each; the weight gradients are wgrad_into's."""
    graph, plan = scheduled(batch=4)
    inner = [n for node in steps(graph) if "segment" in node.meta for n in node.meta["segment"].graph.nodes]
    assert sum(cost.flops(n) for n in inner) == 2 * (2 * 4 * WIDTH * WIDTH)
    us = cost.estimate(plan)
    assert all(us(n) >= 0 for n in steps(graph))
    launches = {n.args[0]: us(n) for n in steps(graph) if n.target is launch_reduce}
    assert launches[2] > 50 * launches[0], "the embedding is 469 times as large"
    half = ROWS * WIDTH * 4 / 2  # each of two ranks sends half of the bucket
    c = cost.CEILINGS["cpu"]
    assert launches[2] == pytest.approx(c.us_launch + half / c.nbytes_link, rel=1e-3)


def _train(rank: int, world_size: int, stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    results = []
    for delay in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Llama(vocab=4096, width=64, layers=1, hidden=96)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zc.compile(
            model, optimizer, stage=stage, backend="aot_eager", bucket_nbytes=2**15, write_in_place=True,
            delay_weight_grads=delay
        )  # fmt: skip
        # a step of this size would not be worth another order
        with mock.patch.object(delay_weight_grads, "GAIN", 1e-4):
            model(tokens(rank, 0, vocab=4096)).backward()
        for step in range(2):
            model(tokens(rank, step, vocab=4096)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    body = next(b for name, b in zc.explain(model).sections.items() if name.startswith("schedule backward"))
    return results[0], results[1], body


@pytest.mark.parametrize("stage", [1, 2])
def test_no_number_changes(stage: int) -> None:
    from harness import run_ranks

    for plain, delayed, body in run_ranks(_train, 2, stage, timeout=120):
        assert all(torch.equal(a, b) for a, b in zip(plain, delayed, strict=True))
        launched = [int(part.split(",")[0]) for part in body.split("launch_reduce(")[1:]]
        assert launched != sorted(launched), "nothing was delayed: the test shows nothing"
