"""Schedules of real models: what zc.compile gets from AOTAutograd, taken through the passes under any plan.

`capture` trains one step in this process, without a second rank, and keeps the backward graphs as they were before any
pass, the tensors that they ran on, the gradients that came through hooks, and autograd's own gradients of a plain copy
of the model. `case` makes the schedules of a plan from them: the backwards in their order, then the flushes of what was
deposited, then the reductions of partial sums: what the runtime does.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from simulation import Case
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import zc
from zc.config import Config
from zc.engine import deposits, program
from zc.engine.runtime import Runtime
from zc.passes.base import Debt, Pass, copy_graph, debt_of, run_passes
from zc.passes.pipeline import pipeline
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan, flat

WIDTH = 8
_funcol = torch.distributed._functional_collectives
_all_gather = getattr(_funcol, "all_gather_single_autograd", None) or _funcol.all_gather_tensor_autograd  # 2.11, 2.12


class Views(nn.Module):
    """Gradients that are views of one tensor, and an output that is a view of an input's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        self.bias, self.shift = nn.Parameter(torch.randn(2 * WIDTH)), nn.Parameter(torch.randn(2 * WIDTH))
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        both = x @ torch.cat([self.query, self.key]).t() + self.bias + 2 * self.shift
        return self.out(both.view(-1, 2, WIDTH).transpose(1, 2).reshape(-1, 2 * WIDTH))


class Chain(nn.Module):
    """tanh saves its result, which its backward may overwrite."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Broken(nn.Module):
    """Three graphs; the first bucket's gradients come out of two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Chain(2), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x = torch.relu(self.second(x))
        torch._dynamo.graph_break()
        return self.third(x)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Chain(2) for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Tied(nn.Module):
    """An embedding that is the head's weight as well, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, WIDTH)
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x.abs().mul(4).long().clamp(max=15)[:, 0])
        return self.norm(self.layer(torch.relu(self.layer(y)))) @ self.tokens.weight.t()


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16, bias=False)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.tokens(x.abs().mul(4).long().clamp(max=15)[:, 0]))))


class Gathers(nn.Module):
    """A collective of the model's own in its forward, and so another in its backward. Needs a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(_all_gather(torch.tanh(self.first(x)), 0, dist.group.WORLD))


class Eager(nn.Module):
    """A part that Dynamo leaves alone: its gradients come through hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Chain(2), Chain(2)
        self.plain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_apart(self.plain, self.first(x)))


@torch.compiler.disable
def _apart(module: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(module(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "views": Views,
    "donated": Chain,
    "dynamic": Chain,
    "collective": Gathers,
    "graph break": Broken,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "checkpoint reentrant": lambda: Checkpointed(use_reentrant=True),
    "tied": Tied,
    "in place": Untied,
    "eager part": Eager,
}


@dataclass
class Captured:
    """One training step's backwards: ``graphs`` with the arguments of their run."""

    specs: list[ParamSpec]
    expected: dict[str, Tensor]
    graphs: list[tuple[fx.Graph, list[Any]]] = field(default_factory=list)
    hooks: dict[str, Tensor] = field(default_factory=dict)
    num_owed: int = 0  # gradients that the programs of the run owed


@functools.cache
def capture(name: str) -> Captured:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(6, WIDTH, requires_grad=name == "views")
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    specs = [ParamSpec(n, tuple(p.shape), p.dtype, p.device) for n, p in model.named_parameters()]
    captured = Captured(specs, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})
    graphs: dict[int, fx.Graph] = {}  # id of the schedule -> the graph that it was made from
    run_as_is, build_as_is, receive_as_is = Runtime.run_program, program.run_passes, Runtime.receive

    def build(graph: fx.Graph, *args: Any, **kwargs: Any) -> Any:
        before = copy_graph(graph)
        schedule = build_as_is(graph, *args, **kwargs)
        graphs[id(schedule[0])] = before
        return schedule

    def run(runtime: Runtime, schedule: Any, args: list[Any]) -> Any:
        detached = [a.detach() if isinstance(a, Tensor) else a for a in args]
        captured.graphs.append((graphs[id(schedule.graph)], copy.deepcopy(detached)))
        captured.num_owed += len(schedule.graph.output_node().meta["debt"].gradients)
        return run_as_is(runtime, schedule, args)

    def receive(runtime: Runtime, bucket: int, slot: int, grad: Tensor) -> None:
        captured.hooks[runtime.plan.buckets[bucket].slots[slot].name] = grad.clone()
        receive_as_is(runtime, bucket, slot, grad)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="aot_eager", bucket_nbytes=4 * WIDTH * WIDTH)
    if name == "dynamic":
        torch._dynamo.mark_dynamic(x, 0)
    with (
        mock.patch.object(program, "run_passes", build),
        mock.patch.object(Runtime, "run_program", run),
        mock.patch.object(Runtime, "receive", receive),
    ):
        model(x).square().mean().backward()
    torch._dynamo.reset()
    return captured


def case(
    name: str, *, stage: int = 2, world_size: int = 2, ring: int = 2, in_place: bool = False,
    offload: str | None = None, overlap: bool = True,
) -> Case:  # fmt: skip
    captured = capture(name)
    config = Config(
        stage=stage, bucket_nbytes=800, num_buffers=ring, overlap=overlap, offload=offload and "cpu",
        offload_accumulate=offload or "cpu",
    )  # fmt: skip
    plan = make_plan(captured.specs, config, flat(world_size))
    passes = pipeline(in_place=in_place)
    graphs, owed = [], Debt()
    for number, (graph, args) in enumerate(captured.graphs):
        new = copy_graph(graph)
        new.owning_module = graph.owning_module
        for node, value in zip((n for n in new.nodes if n.op == "placeholder"), args, strict=True):
            node.meta["given"] = value
        debt = debt_of(new, plan)
        owed = Debt(owed.gradients | debt.gradients, owed.sums | debt.reductions(plan))
        graphs.append(_scheduled(new, plan, passes, f"{name} {number}"))
    graphs += list(_rest(captured, plan, passes, owed))
    more = [f"offload {offload}"] * bool(offload) + ["in place"] * in_place + ["no overlap"] * (not overlap)
    label = " ".join([name, f"s{stage} w{world_size} r{ring}", *more])
    return Case(label, plan, tuple(graphs))


def _scheduled(graph: fx.Graph, plan: Plan, passes: tuple[Pass, ...], name: str) -> fx.Graph:
    new, _ = run_passes(graph, plan, [p._replace(requires=frozenset()) for p in passes], name=name)
    new.output_node().meta["plan"] = plan
    return new


def _rest(captured: Captured, plan: Plan, passes: tuple[Pass, ...], owed: Debt) -> Iterator[fx.Graph]:
    """What the runtime does after the backwards: flushes of what was deposited or came through hooks, and in stage 1
    the reductions of partial sums."""
    no_segments = tuple(p for p in passes if p.name != "outline_segments")
    ring = plan.placement.shards_gradients
    for bucket in plan.buckets:
        hooks = {k: captured.hooks[s.name] for k, s in enumerate(bucket.slots) if s.name in captured.hooks}
        if bucket.index not in owed.sums and (hooks or ring):
            graph = deposits.GRAPHS["flush"](plan, bucket.index)
            for k, node in enumerate(n for n in graph.nodes if n.op == "placeholder"):
                node.meta.update(kept=(bucket.index, k), given=hooks.get(k), is_none=not ring and k not in hooks)
            flushed = plan if ring else plan.microbatch()
            yield _scheduled(graph, flushed, no_segments, f"flush {bucket.index}")
        if not ring and plan.world_size > 1 and bucket.index not in owed.sums:
            graph = deposits.GRAPHS["reduce"](plan, bucket.index)
            rest = tuple(p for p in no_segments if p.name not in ("bucket_gradients", "reduce_buckets"))
            yield _scheduled(graph, plan, rest, f"reduce {bucket.index}")


def cases() -> Iterator[Case]:
    """Each model under some plans: both stages, one to three ranks, rings, in place, offload."""
    for name in MODELS:
        yield case(name)
        yield case(name, stage=1)
    for name in ("views", "donated", "dynamic", "checkpoint", "tied", "in place"):
        yield case(name, ring=1, world_size=3)
    for name in ("in place", "donated", "views", "graph break", "dynamic"):
        yield case(name, in_place=True)
        yield case(name, in_place=True, stage=1)
    for name in ("donated", "graph break", "tied", "eager part"):
        yield case(name, offload="cpu")
        yield case(name, offload="device", stage=1, in_place=True)
        yield case(name, offload="cpu", stage=1, world_size=3)
        yield case(name, world_size=1)
    yield case("graph break", overlap=False, ring=1)
