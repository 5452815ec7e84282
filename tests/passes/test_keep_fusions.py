"""What goes over a cut so that Inductor can fuse it, what stays, and how many kernels that leaves."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from generated import kernels
from tiers import full_only
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import zc
from zc.compiler import graphs
from zc.config import Config
from zc.passes import keep_fusions
from zc.passes.base import Pass, run_passes
from zc.passes.pipeline import pipeline
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan, flat
from zc.schedule.nodes import is_schedule_node, op_of
from zc.schedule.spec import FlattenCast, Segment

WIDTH, SEQ, HEADS, KV_HEADS, HIDDEN = 128, 16, 4, 2, 352


class Block(nn.Module):
    """A Llama's: RMSNorm, grouped attention with rotations, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        kv = WIDTH * KV_HEADS // HEADS
        self.norm_attn, self.norm_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, n, bias=False) for n in (WIDTH, kv, kv, WIDTH))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        y = self.norm_attn(x)
        q, k, v = (f(y).view(batch, seq, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (z * cos + torch.cat([-z.chunk(2, -1)[1], z.chunk(2, -1)[0]], -1) * sin for z in (q, k))
        k, v = (z[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).flatten(1, 2) for z in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, seq, WIDTH))
        y = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Behind its embedding, whose gradient a fake GPU can't trace; ``start`` makes the backward go down to there."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(SEQ, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = x + self.start
        half = WIDTH // HEADS // 2
        turn = torch.arange(SEQ)[:, None] / 10_000 ** (torch.arange(2 * half) % half / half)
        cos, sin = turn.cos().to(x.dtype), turn.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head_loss(x, targets)

    def head_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def traced(dtype: torch.dtype, num_layers: int, **options: Any) -> list[tuple[fx.Graph, Plan]]:
    """The backward graphs as AOTAutograd gives them to the backend, and their plans."""
    torch._dynamo.reset()
    model = Llama(num_layers).to(dtype)
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="aot_eager", **options)
    schedules: list[tuple[fx.Graph, Plan]] = []
    build = graphs.build

    def spy(graph: fx.Graph, plan: Plan, *args: Any, **kwargs: Any) -> Any:
        schedules.append((graph, plan))
        return build(graph, plan, *args, **kwargs)

    with mock.patch.object(graphs, "build", spy):
        model(torch.randn(2, SEQ, WIDTH, dtype=dtype), torch.zeros(2, SEQ, dtype=torch.int64)).backward()
    return schedules


def kernels_when_cut(graph: fx.Graph, plan: Plan, passes: tuple[Pass, ...]) -> list[str]:
    scheduled, _ = run_passes(graph, plan, passes)
    segments = [n.meta["segment"] for n in scheduled.nodes if isinstance(op_of(n), Segment)]
    return [name for segment in segments for name in kernels(segment)]


@pytest.mark.parametrize(
    ("dtype", "bucket_nbytes"), [pytest.param(torch.bfloat16, 1, marks=full_only), (torch.float32, 300_000)]
)
def test_a_cut_llama_has_at_most_a_tenth_more_kernels_than_the_whole(dtype: torch.dtype, bucket_nbytes: int) -> None:
    """A bucket a parameter, the worst case; and some four a layer. The negative control is the pass left out."""
    pytest.importorskip("triton")
    graph, plan = traced(dtype, 2, bucket_nbytes=bucket_nbytes)[0]
    assert len(plan.buckets) > 3
    whole = kernels(fx.GraphModule(graph.owning_module, graph))
    assert len(whole) > 20
    passes = pipeline(in_place=False)
    cut = kernels_when_cut(graph, plan, passes)
    # 2.11's Inductor makes four kernels less of the whole, and of the parts what later ones make
    most = len(whole) * (1.2 if torch.__version__.startswith("2.11.") else 1.1)
    assert len(cut) <= most, f"cut {len(cut)}, whole {len(whole)}"
    without = kernels_when_cut(graph, plan, tuple(p for p in passes if p is not keep_fusions.PASS))
    assert len(without) > most, "the pass changes nothing here: the test shows nothing"


def test_the_cuts_of_a_block_add_one_kernel() -> None:
    """Four layers, whose blocks are compiled apart: two graphs, of which the block's serves all four. 12 kernels become
    13; with 2.11, whose Inductor makes two of the six of the rotations, 8 become 9."""
    pytest.importorskip("triton")
    (graph, plan), outside = traced(torch.float32, 4, bucket_nbytes=300_000)
    assert len(outside[0].output_node().meta["grad_of"]) < 6 < len(graph.output_node().meta["grad_of"])
    whole = kernels(fx.GraphModule(graph.owning_module, graph))
    passes = pipeline(in_place=False)
    cut = kernels_when_cut(graph, plan, passes)
    assert 7 < len(whole) <= len(cut) <= len(whole) + 1, f"cut {len(cut)}, whole {len(whole)}"
    without = kernels_when_cut(graph, plan, tuple(p for p in passes if p is not keep_fusions.PASS))
    assert len(without) > len(whole) + 1, "the pass changes nothing here: the test shows nothing"


# --- on graphs small enough to read ---


def graph_of(backward: Any, num_grads: int, num_inputs: int) -> tuple[fx.Graph, Plan]:
    """A graph of 8 x 8 matrices whose first ``num_grads`` results are gradients, one bucket each, and its plan."""
    gm = make_fx(backward, tracing_mode="fake")(*(torch.randn(8, 8) for _ in range(num_inputs)))
    graph: fx.Graph = gm.graph
    graph.owning_module = gm
    num_others = len(graph.output_node().args[0]) - num_grads
    names = [f"w{k}" for k in range(num_grads)]
    graph.output_node().meta["grad_of"] = (*names, *([None] * num_others))
    specs = [ParamSpec(n, (8, 8), torch.float32, torch.device("cpu")) for n in names]
    return graph, make_plan(specs, Config(bucket_nbytes=1), flat(2))


def parts(graph: fx.Graph, plan: Plan, *, keeping: bool = True) -> list[list[str]]:
    """The names of the operations between the cuts."""
    names = [p.name for p in pipeline(in_place=False)]
    chosen = pipeline(in_place=False)[: names.index("keep_fusions") + keeping]
    groups: list[list[str]] = [[]]
    for node in run_passes(graph, plan, chosen)[0].nodes:
        if isinstance(op_of(node), FlattenCast):
            groups.append([])
        elif node.op == "call_function" and not is_schedule_node(node):
            groups[-1].append(node.name)
    return groups


def test_what_reads_the_same_goes_up() -> None:
    def backward(g, w_down, up, gate, x):  # type: ignore[no-untyped-def]
        mm = g.mm(w_down)
        d_up = x.mm(mm * gate)
        return d_up, x.mm((mm * up).tanh())

    graph, plan = graph_of(backward, 2, 5)
    assert parts(graph, plan, keeping=False) == [["mm", "mul", "mm_1"], ["mul_1", "tanh", "mm_2"], []]
    assert parts(graph, plan) == [["mm", "mul", "mm_1", "mul_1", "tanh"], ["mm_2"], []]


def test_what_fuses_with_later_work_alone_goes_down() -> None:
    def backward(g, x, w_v, w_k, w_q):  # type: ignore[no-untyped-def]
        total = g.mm(w_v) + g.mm(w_k)
        d_v = x.mm(g)
        total = (total + g.mm(w_q)).tanh()
        return d_v, total.mm(x)

    graph, plan = graph_of(backward, 2, 5)
    assert parts(graph, plan, keeping=False) == [["mm", "mm_1", "add", "mm_2"], ["mm_3", "add_1", "tanh", "mm_4"], []]
    assert parts(graph, plan) == [["mm", "mm_1", "mm_2"], ["add", "mm_3", "add_1", "tanh", "mm_4"], []]


def test_no_group_is_torn() -> None:
    def backward(g, x, w):  # type: ignore[no-untyped-def]
        mm = g.mm(w)
        needed, beside = mm.sin(), mm.cos()  # the first gradient needs `needed`, so what reads the same stays with it
        d_0 = x.mm(needed)
        return d_0, x.mm(beside + mm.mm(d_0))

    graph, plan = graph_of(backward, 2, 3)
    assert {"sin", "cos"} <= set(parts(graph, plan)[0]) and parts(graph, plan) == parts(graph, plan, keeping=False)


def test_a_reduction_stays_since_it_frees_what_it_reads() -> None:
    def backward(g, x, w):  # type: ignore[no-untyped-def]
        summed = g.mm(w).sum(0)
        d_0 = x.mm(g)
        return d_0, x.mm(summed + x.mm(d_0))

    graph, plan = graph_of(backward, 2, 3)
    assert "sum_1" in parts(graph, plan)[0]


def test_nothing_moves_twice() -> None:
    def backward(g, w, a, b, x):  # type: ignore[no-untyped-def]
        mm = g.mm(w)
        d_0 = x.mm(mm * a)
        d_1 = x.mm(mm * d_0.mm(w))
        return d_0, d_1, x.mm(mm * b)

    graph, plan = graph_of(backward, 3, 5)
    assert "mul_2" in parts(graph, plan, keeping=False)[2] and "mul_2" in parts(graph, plan)[1]


def test_nothing_goes_further_than_one_part() -> None:
    """A sum over many layers (an encoder's output): down to the last user, all its terms would live until then."""

    def backward(g, x, w):  # type: ignore[no-untyped-def]
        early = g.mm(w) + x.mm(w)
        grads = [x.mm(g)]
        for _ in range(3):
            g = g.mm(w)
            grads.append(x.mm(g))
        return (*grads, early + g.mm(w))

    graph, plan = graph_of(backward, 4, 3)
    assert "add" in parts(graph, plan)[0]


_LIBRARY = torch.library.Library("zc_tests_fusions", "DEF")  # as long as the module: its end takes the operator
_LIBRARY.define("noisy(Tensor x) -> Tensor", tags=(torch.Tag.pointwise, torch.Tag.nondeterministic_seeded))
_LIBRARY.impl("noisy", torch.empty_like, "CompositeExplicitAutograd")


@pytest.mark.parametrize("breaks", ["random", "writes"])
def test_random_numbers_stay_and_a_graph_that_writes_is_left_alone(breaks: str) -> None:
    def backward(g, w_down, up, gate, x):  # type: ignore[no-untyped-def]
        mm = g.mm(w_down)
        d_up = x.mm(mm * gate)
        late = torch.ops.zc_tests_fusions.noisy(mm) if breaks == "random" else mm * up
        d_gate = x.mm(late)
        if breaks == "writes":
            torch.ops.aten.copy_.default(up, d_gate)
        return d_up, d_gate

    graph, plan = graph_of(backward, 2, 5)
    assert parts(graph, plan) == parts(graph, plan, keeping=False)
