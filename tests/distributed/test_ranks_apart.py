"""Ranks that bring other gradients in one backward: the numbers of all of them together, in every stage.

Every loop here runs twice: under zc on the ranks, and on one process in float64, where the loss is the mean over ranks
of the sum over their backwards.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import run_cases
from models import Heads, seeded
from oracle import weights
from tiers import FULL, full_cases
from torch import Tensor, nn
from torch.optim import SGD

import zc
from zc.engine.buffers import Acc
from zc.engine.operations import MayReduce, Operations

STEPS = 4
Tasks = tuple[int, ...]


class BrokenHere(nn.Module):
    """A graph break on one rank alone, as Dynamo makes one where it has taken a number for dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.is_broken = nn.Linear(16, 16), nn.Linear(16, 16), False

    def forward(self, x: Tensor, tasks: Tasks) -> list[Tensor]:
        x = torch.tanh(self.first(x))
        if self.is_broken:
            torch._dynamo.graph_break()
        return [self.last(x)]


class Trunks(nn.Module):
    """One head, the first graph of each backward, and a trunk a task in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, tasks: Tasks) -> list[Tensor]:
        x = torch.stack([torch.tanh(self.trunks[task](x)) for task in tasks]).sum(0)
        torch._dynamo.graph_break()
        return [self.head(x)]


@dataclass(frozen=True)
class Loop:
    """``calls(rank, step)``: of each backward, the tasks of each call of the model whose losses it sums. ``held``: all
    backwards but the last are in no_sync. ``collects``: a collective of the loop's own stands before each step."""

    make: Callable[[], nn.Module]
    calls: Callable[[int, int], list[list[Tasks]]]
    held: bool = False
    collects: bool = False
    broken: tuple[int, ...] = ()


def other_heads(rank: int, step: int) -> list[list[Tasks]]:
    return [[((rank + step) % 3,)]]


def more_heads(rank: int, step: int) -> list[list[Tasks]]:
    return [[(0, 1)]] if rank == step % 2 else [[(2,)]]


def microbatches(rank: int, step: int) -> list[list[Tasks]]:
    return [[((rank + step + m) % 3,)] for m in range(3)]


def another_trunk(rank: int, step: int) -> list[list[Tasks]]:
    """All ranks propose head and trunk 0; from the second step on rank 1 brings trunk 1."""
    return [[(1,)]] if rank == 1 and step > 0 else [[(0,)]]


def one_more_graph(rank: int, step: int) -> list[list[Tasks]]:
    """As another_trunk, but rank 1 brings both, or, by turns, calls the model once more."""
    return [[(0,), (1,)] if step % 2 else [(0, 1)]] if rank == 1 and step > 0 else [[(0,)]]


def more_microbatches(rank: int, step: int) -> list[list[Tasks]]:
    return [[(0,)]] * (1 + (rank + step) % 3)


def one_head_alone(rank: int, step: int) -> list[list[Tasks]]:
    return [[(0,)]] * 2


def one_more_backward(rank: int, step: int) -> list[list[Tasks]]:
    return [[(k,)] for k in range(1 + (rank + step) % 2)]


LOOPS = {
    "other heads": Loop(Heads, other_heads),
    "more heads": Loop(Heads, more_heads),
    "microbatches in no_sync": Loop(Heads, microbatches, held=True),
    "microbatches": Loop(Heads, microbatches),
    "a graph broken on one rank": Loop(BrokenHere, other_heads, broken=(1,)),
    "another trunk than proposed": Loop(Trunks, another_trunk),
    "one more graph than proposed": Loop(Trunks, one_more_graph),
    "more microbatches in no_sync, then a collective": Loop(BrokenHere, more_microbatches, held=True, collects=True),
    "a head that nobody uses": Loop(Heads, one_head_alone, held=True),
    "one backward more": Loop(Heads, one_more_backward),
}


@dataclass
class Seen:
    weights: dict[str, Tensor] = field(default_factory=dict)
    num_kept: list[int] = field(default_factory=list)  # runs of a step that wrote nothing into the ring
    num_whole: list[int] = field(default_factory=list)  # buckets that are not reduced after a step's first backward
    notes: list[str] = field(default_factory=list)


def made(loop: Loop, rank: int, dtype: torch.dtype) -> tuple[nn.Module, SGD]:
    torch.manual_seed(0)
    model = loop.make().to(dtype)
    if rank in loop.broken:
        model.is_broken = True
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def loss_of(call: Callable[..., Any], model: nn.Module, rank: int, step: int, k: int, calls: list[Tasks]) -> Tensor:
    x = torch.randn(4, 16, generator=seeded(rank, step, k)).to(next(model.parameters()).dtype)
    return torch.stack([out.square().mean() for tasks in calls for out in call(x, tasks)]).sum()


def alone(name: str, world_size: int) -> dict[str, Tensor]:
    """One process, float64."""
    loop = LOOPS[name]
    model, optimizer = made(loop, -1, torch.float64)
    for step in range(STEPS):
        for rank in range(world_size):
            for k, calls in enumerate(loop.calls(rank, step)):
                (loss_of(model, model, rank, step, k, calls) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@contextlib.contextmanager
def counted_keeps() -> Iterator[list[int]]:
    """[number]: runs of schedules whose gradients were all kept."""
    count, begin = [0], Operations.reducing_if

    def reducing_if(operations: Operations, may_reduce: MayReduce) -> Operations:
        is_counted = False

        def ask(*, starts: bool = False) -> bool:
            nonlocal is_counted
            may = may_reduce(starts=starts)
            count[0] += not may and not is_counted
            is_counted |= not may
            return may

        return begin(operations, ask)

    with mock.patch.object(Operations, "reducing_if", reducing_if):
        yield count


def under_zc(rank: int, world_size: int, name: str, stage: int, backend: str, options: dict[str, Any]) -> Seen:
    """Job."""
    loop, seen = LOOPS[name], Seen()
    model, optimizer = made(loop, rank, torch.float32)
    options = {"bucket_nbytes": 64, **options}
    model, optimizer = zc.compile(model, optimizer, stage=stage, backend=backend, **options)  # type: ignore[assignment]
    runtime = zc.registry.sharded(model).runtime
    with counted_keeps() as count:
        for step in range(STEPS):
            count[0] = 0
            backwards = loop.calls(rank, step)
            for k, calls in enumerate(backwards):
                inside = loop.held and k < len(backwards) - 1
                with zc.no_sync(model) if inside else contextlib.nullcontext():
                    loss_of(model, model, rank, step, k, calls).backward()
                if k == 0:
                    runtime.streams.join_main()
                    state = zip(runtime.accumulators.touched, runtime.accumulators.state, strict=True)
                    seen.num_whole.append(sum(any(touched) and acc is not Acc.REDUCED for touched, acc in state))
            seen.num_kept.append(count[0])
            if loop.collects:
                dist.all_reduce(torch.ones(1))
            optimizer.step()
            optimizer.zero_grad()
    seen.weights, seen.notes = weights(model), runtime.notes
    return seen


def check(name: str, ways: list[tuple[int, str, dict[str, Any]]], world_size: int = 2) -> list[tuple[Seen, ...]]:
    """Each way is a stage, a backend and options. What the ranks have seen, by way."""
    wanted, seen = alone(name, world_size), []
    for (_, *way), ranks in run_cases(under_zc, world_size, [(name, *way) for way in ways]):
        rtol = 0.02 if way[-1].get("reduce_dtype") is torch.bfloat16 else 1e-5
        for mine in ranks:
            for param, value in wanted.items():
                assert torch.equal(mine.weights[param], ranks[0].weights[param]), f"{way}: ranks differ in {param}"
                torch.testing.assert_close(
                    mine.weights[param].double(), value, rtol=rtol, atol=rtol / 10, msg=lambda m, way=way: f"{way}: {m}"
                )
        seen.append(ranks)
    return seen


# Of the loops compiled by default in stage 1, and in stage 2: other graphs than proposed, gradients that are held back,
# a broken graph, another number of runs. The others have the same graphs, and eager runs show how ranks agree.
STAGE_1 = ("another trunk than proposed",)
STAGE_2 = (*STAGE_1, "microbatches in no_sync", "a graph broken on one rank", "one backward more")


@cache
def compiled_in_stage_2(name: str) -> tuple[Seen, ...]:
    """Checked in both stages and backends, by default as STAGE_1 and STAGE_2 say."""
    ways = list(itertools.product((1, 2), ("eager", "aot_eager"), ({},)))
    if not FULL:
        left_out = {(stage, "aot_eager") for stage, names in ((1, STAGE_1), (2, STAGE_2)) if name not in names}
        ways = [way for way in ways if way[:2] not in left_out]
    return check(name, ways)[-1]


@pytest.mark.parametrize("name", LOOPS)
@full_cases("microbatches in no_sync", "another trunk than proposed")
def test_ranks_that_bring_other_gradients(name: str) -> None:
    compiled_in_stage_2(name)


@pytest.mark.parametrize("name", ["other heads", "microbatches in no_sync", "one backward more"])
def test_three_ranks(name: str) -> None:
    check(name, [(2, "eager", {}), *([(2, "aot_eager", {})] if FULL else [])], world_size=3)


OPTIONS: list[dict[str, Any]] = [
    {"offload": "cpu"},
    {"offload": "cpu", "offload_accumulate": "device"},
    {"write_in_place": True},  # by default compiled: other nodes of a backward's graph
    {"bucket_nbytes": 2**20},
    {"reduce_dtype": torch.bfloat16},
    {"overlap": False},
]


@pytest.mark.parametrize("name", ["microbatches in no_sync", "one backward more"])
@full_cases("one backward more")
def test_with_every_option(name: str) -> None:
    compiled = OPTIONS if FULL else OPTIONS[2:3] if name == "microbatches in no_sync" else ()
    check(name, [(2, "aot_eager" if options in compiled else "eager", options) for options in OPTIONS])


def test_a_graph_broken_on_one_rank_costs_one_backward() -> None:
    """The first one: from the second on all ranks propose what the first has brought, and reduce it inside of the
    backward. It is said once, where it can be read."""
    for mine in compiled_in_stage_2("a graph broken on one rank"):
        assert mine.num_kept[0] > 0 and mine.num_kept[1:] == [0] * (STEPS - 1), mine.num_kept
        assert sum("as without ZeRO-2" in note for note in mine.notes) == 1


@pytest.mark.parametrize("name", ["other heads", "microbatches in no_sync"])
def test_gradients_are_whole_to_the_end_of_their_backward_and_no_longer(name: str) -> None:
    """In no_sync too: else each microbatch's forward would find a full gradient in memory."""
    for mine in compiled_in_stage_2(name):
        assert any(mine.num_kept) and mine.num_whole == [0] * STEPS, (mine.num_kept, mine.num_whole)


def test_a_model_with_an_unused_parameter_keeps_nothing_whole_in_no_sync() -> None:
    """A bucket that is never full is a part of what like backwards propose, and is reduced at their end."""
    (ranks,) = check("a head that nobody uses", [(2, "eager", {"bucket_nbytes": 2**20})])
    for mine in ranks:
        assert mine.num_whole[1:] == [0] * (STEPS - 1), mine.num_whole
