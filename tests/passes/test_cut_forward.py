"""Where a forward graph is cut under overlap_gather, and what moves there."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from graphs import plan_for
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from zc.passes import window_weights
from zc.schedule.nodes import is_schedule_node

pytestmark = pytest.mark.check


def orthogonal(x: Tensor, first: Tensor, last: Tensor, num_steps: int) -> Tensor:
    """Each step of Newton and Schulz reads the value before it twice: parameter-only diamonds in a chain."""
    x = torch.mm(x, first)
    for _ in range(num_steps):
        last = 1.5 * last - 0.5 * torch.mm(torch.mm(last, last.t()), last)
    return torch.mm(x, last)


def traced(num_steps: int) -> fx.Graph:
    gm = make_fx(lambda *args: orthogonal(*args, num_steps), tracing_mode="fake")(*(torch.ones(4, 4) for _ in range(3)))
    gm.graph.owning_module = gm
    _, first, last = gm.graph.find_nodes(op="placeholder")
    first.meta["buffer"], last.meta["buffer"] = "gathered[1]", "gathered[0]"
    return gm.graph


def num_calls(graph: fx.Graph, limit: int) -> int:
    """Python calls of the pass; raises at ``limit``."""
    count = 0

    def counted(frame: Any, event: str, _: object) -> None:
        nonlocal count
        count += event == "call"
        if count > limit:
            raise RuntimeError(f"more than {limit} calls")

    sys.setprofile(counted)
    try:
        window_weights.run(graph, plan_for(["a", "b"]))
    finally:
        sys.setprofile(None)
    return count


def test_a_chain_of_diamonds_costs_as_much_as_its_nodes() -> None:
    short, long = traced(4), traced(32)
    few = num_calls(short, 10**6)
    assert num_calls(long, 16 * few) < 16 * few  # it has 7 times as many nodes; each step doubled the paths


def test_what_reads_parameters_alone_moves_behind_the_cut() -> None:
    graph = traced(2)
    before = [n.name for n in graph.nodes if n.op == "call_function"]
    new = window_weights.run(graph, plan_for(["a", "b"]))
    new.lint()  # each value before its readers
    names = [n.name for n in new.nodes if n.op == "call_function" and not is_schedule_node(n)]
    assert before[0] == names[0] == "mm" and names == before, "mm reads the other bucket, and stands first already"
    assert [n.name for n in new.nodes if n.meta.get("cut")] == [names[1]]


def test_diamonds_that_stand_first_move_in_their_old_order() -> None:
    def late(x: Tensor, first: Tensor, last: Tensor) -> Tensor:
        for _ in range(2):  # each step's value is read by two operations, of which the later one needs the other
            last = 1.5 * last - 0.5 * torch.mm(torch.mm(last, last.t()), last)
        return torch.mm(torch.mm(x, first), last)

    gm = make_fx(late, tracing_mode="fake")(*(torch.ones(4, 4) for _ in range(3)))
    gm.graph.owning_module = gm
    _, first, last = gm.graph.find_nodes(op="placeholder")
    first.meta["buffer"], last.meta["buffer"] = "gathered[1]", "gathered[0]"
    before = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    new = window_weights.run(gm.graph, plan_for(["a", "b"]))
    new.lint()
    names = [n.name for n in new.nodes if n.op == "call_function" and not is_schedule_node(n)]
    assert names == [before[-2], *before[:-2], before[-1]]
    assert [n.name for n in new.nodes if n.meta.get("cut")] == [before[0]]


def test_random_operations_keep_their_order() -> None:
    def dropped(x: Tensor, first: Tensor, last: Tensor) -> Tensor:
        last = torch.rand_like(last) * last
        return torch.mm(torch.mm(torch.rand_like(x) * x, first), last)

    gm = make_fx(dropped, tracing_mode="fake")(*(torch.ones(4, 4) for _ in range(3)))
    gm.graph.owning_module = gm
    _, first, last = gm.graph.find_nodes(op="placeholder")
    first.meta["buffer"], last.meta["buffer"] = "gathered[1]", "gathered[0]"
    new = window_weights.run(gm.graph, plan_for(["a", "b"]))
    names = [n.name for n in new.nodes if n.op == "call_function" and not is_schedule_node(n)]
    assert names == ["rand_like", "mul", "rand_like_1", "mul_1", "mm", "mm_1"]
