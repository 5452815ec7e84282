"""Segments are compiled with what is true of them, not of the whole backward."""

from __future__ import annotations

import copy
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import zc
from zc.engine.program import Program
from zc.planning import blocks


class Net(nn.Module):
    """Layers of one shape, so that segments repeat; tanh saves its output, which its backward may overwrite."""

    def __init__(self, num_layers: int = 6, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def trained(model: nn.Module, x: torch.Tensor, *, compiled: bool, **options: object) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if compiled:
        zc.compile(model, optimizer, **{"bucket_nbytes": 32 * 33 * 4, **options})
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = zc.full_state_dict(model).values() if compiled else model.parameters()
    return [value.detach().clone() for value in values]


def test_a_segment_donates_its_own_inputs_only() -> None:
    """Inductor reads the positions of donated inputs from the tracing context, where those of the whole backward stand:
    in a segment they would name other tensors. Canonical names carry what is donated, and both must agree. It is told
    the strides that the next segment was traced with."""
    from torch._guards import TracingContext
    from torch._inductor import compile_fx

    seen: list[tuple[list[int], list[str]]] = []
    strides: list[tuple[object, object]] = []
    inner = compile_fx.compile_fx_inner

    def spy(gm, example_inputs, **kwargs):
        if kwargs.get("is_backward"):
            context = TracingContext.try_get()
            names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
            seen.append((list(context.fw_metadata.bw_donated_idxs or ()), names))
            output = gm.graph.output_node()
            traced = [n if n is None else n.meta["val"].stride() for n in output.args[0]]
            strides.append((output.meta["original_output_strides"], traced))
        return inner(gm, example_inputs, **kwargs)

    model = Net()
    with mock.patch.object(compile_fx, "compile_fx_inner", spy):
        trained(model, torch.randn(8, 32), compiled=True)
    assert len(seen) >= 2
    for positions, names in seen:
        assert positions == [i for i, name in enumerate(names) if name.startswith("donated")]
    assert any(positions for positions, _ in seen), "nothing donated: the test shows nothing"
    assert all(told == traced for told, traced in strides)


@pytest.mark.parametrize("overlap_gather", [False, True])
def test_no_graph_becomes_a_cuda_graph(overlap_gather: bool) -> None:
    """A replay would overwrite gradients that still wait for their bucket. Inductor's option is left out, and that is
    said."""
    from torch._inductor import compile_fx, config

    seen: list[tuple[bool, bool]] = []
    inner = compile_fx.compile_fx_inner

    def spy(gm, example_inputs, **kwargs):
        seen.append((bool(kwargs.get("is_backward")), bool(kwargs["cudagraphs"])))
        return inner(gm, example_inputs, **kwargs)

    model, x = Net(2), torch.randn(8, 32)
    with mock.patch.object(compile_fx, "compile_fx_inner", spy), config.patch({"triton.cudagraphs": True}):
        with pytest.warns(UserWarning, match="triton.cudagraphs is on: zc compiles without CUDA graphs"):
            trained(model, x, compiled=True, overlap_gather=overlap_gather)
        assert "zc compiles without CUDA graphs" in str(zc.explain(model))
        assert {is_backward for is_backward, _ in seen} == {False, True} and not any(on for _, on in seen)


def test_identical_segments_are_compiled_once() -> None:
    from torch._inductor import compile_fx

    counts = {}
    for num_layers in (6, 12):
        torch._dynamo.reset()
        calls = []
        inner = compile_fx.compile_fx_inner

        def spy(gm, example_inputs, calls=calls, inner=inner, **kwargs):
            calls.append(bool(kwargs.get("is_backward")))
            return inner(gm, example_inputs, **kwargs)

        with mock.patch.object(compile_fx, "compile_fx_inner", spy):
            trained(Net(num_layers), torch.randn(8, 32), compiled=True)
        counts[num_layers] = sum(calls)
    assert counts[6] == counts[12], f"compilations of the backward by depth: {counts}"


@torch.compiler.nested_compile_region
def mixed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


class Regions(nn.Module):
    """The region saves its result, which the addition after it may overwrite, and views of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 32) / 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + mixed(x, self.weight)
        return x + mixed(x, self.weight)


@pytest.mark.parametrize(("make", "stage"), [(Net, 1), (Net, 2), (Regions, 2), (Regions, 3)])
def test_compiled_equals_eager_in_float64(make: type[nn.Module], stage: int) -> None:
    """One rank, against plain PyTorch, in float64: 1e-12 leaves room for reassociation and for nothing else."""
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(8, 32, dtype=torch.float64)
    wanted = trained(copy.deepcopy(model), x, compiled=False)
    got = trained(model, x, compiled=True, stage=stage)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_two_instances_of_one_class_keep_their_gradients_apart() -> None:
    """Dynamo would serve the second model with the first one's graph, and its gradients would land in the wrong
    bucket."""
    torch.manual_seed(0)
    first, second = Net(2), Net(2)
    plain = copy.deepcopy(second)
    x = torch.randn(8, 32)
    trained(first, x, compiled=True)
    for a, b in zip(trained(second, x, compiled=True), trained(plain, x, compiled=False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_compiled_autograd_is_refused() -> None:
    from torch._dynamo import compiled_autograd

    model = Net(2)
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="aot_eager")
    x, on = torch.randn(8, 32), partial(compiled_autograd._enable, torch.compile(backend="eager"))
    with pytest.raises(zc.ZcError, match="compiled autograd"), on():
        model(x)  # before its graph is compiled
    loss = model(x).square().mean()
    with pytest.raises(zc.ZcError, match="compiled autograd"), on():
        loss.backward()


def test_more_instances_than_dynamos_default_limit_all_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identity guards compile a graph for each instance. Dynamo counts each against a limit of its own, which stays.
    A bucket that two graphs fill is flushed right after the second, beside the graphs that follow."""
    called, call = list[str](), Program.__call__

    def noting(program: Program, *args: object, **kwargs: object) -> object:
        called.append(program.name)
        return call(program, *args, **kwargs)

    monkeypatch.setattr(Program, "__call__", noting)
    monkeypatch.setattr(blocks, "MIN_MEMBERS", 13)

    class Regional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Net(1) for _ in range(12))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    model = Regional()
    plain, limit = copy.deepcopy(model), torch._dynamo.config.recompile_limit
    x = torch.randn(8, 32)
    got = trained(model, x, compiled=True, backend="aot_eager", bucket_nbytes=2 * 32 * 33 * 4)
    for a, b in zip(got, trained(plain, x, compiled=False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    flushes = [called.index(f"flush_bucket_{bucket}") for bucket in range(6)]
    assert [sum("backward" in name for name in called[:k]) for k in flushes] == [2, 4, 6, 8, 10, 12], called
    assert len(zc.registry.sharded(model).runtime.programs) == 12 > limit == torch._dynamo.config.recompile_limit


def test_a_segment_of_another_global_state_is_compiled_again() -> None:
    """Deterministic algorithms and matmul precision choose other kernels; Dynamo compiles anew, and got the old one."""
    from torch._inductor import compile_fx

    compiled: list[str] = []
    inner = compile_fx.compile_fx_inner

    def spy(gm, example_inputs, **kwargs):
        compiled.append(torch.get_float32_matmul_precision())
        return inner(gm, example_inputs, **kwargs)

    model, x = Net(3), torch.randn(8, 32)
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_nbytes=32 * 33 * 4)
    precision = torch.get_float32_matmul_precision()
    counts = []
    try:
        with mock.patch.object(compile_fx, "compile_fx_inner", spy):
            for name in ("highest", "medium", "highest"):
                torch.set_float32_matmul_precision(name)
                model(x).sum().backward()
                counts.append((compiled.count("highest"), compiled.count("medium")))
    finally:
        torch.set_float32_matmul_precision(precision)
    (first, _), (_, second), last = counts
    assert first == second > 1 and last == (first, second), counts


def test_many_sets_of_hooks_make_a_bounded_number_of_programs() -> None:
    """Each set that autograd has to see was a program of its own, compiled in the middle of a backward."""
    from zc.compiler.graphs import MAX_PROGRAMS

    model, x = Net(8), torch.randn(8, 32)
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="aot_eager", bucket_nbytes=32 * 33 * 4)
    plain = Net(8)
    plain.load_state_dict(model.state_dict())
    params, others = list(model.parameters()), list(plain.parameters())
    for k in range(12):
        handles = [p.register_hook(lambda grad: grad * 2) for some in (params, others) for p in some[k : k + 3]]
        if k < 11:
            model(x).square().sum().backward()
        else:
            zc.registry.sharded(model).runtime.notes.clear()
            with pytest.warns(UserWarning, match="for further sets all of its gradients come through hooks"):
                model(x).square().sum().backward()
        plain(x).square().sum().backward()
        for handle in handles:
            handle.remove()
    for (name, grad), other in zip(zc.full_grad(model).items(), others, strict=True):
        torch.testing.assert_close(grad, other.grad, rtol=1e-5, atol=1e-5, msg=name)
    assert len(zc.registry.sharded(model).runtime.programs) <= MAX_PROGRAMS


def test_options_of_torch_compile_are_passed_on() -> None:
    from torch._inductor import compile_fx, config

    options = []
    inner = compile_fx.compile_fx_inner

    def spy(gm, example_inputs, **kwargs):
        options.append((config.max_fusion_size, any(isinstance(i, torch.SymInt) for i in example_inputs)))
        return inner(gm, example_inputs, **kwargs)

    x = torch.randn(8, 32)
    model, plain = Net(2), Net(2)
    plain.load_state_dict(model.state_dict())
    with mock.patch.object(compile_fx, "compile_fx_inner", spy):
        got = trained(model, x, compiled=True, options={"max_fusion_size": 7}, dynamic=True, fullgraph=True)
    assert len(options) > 1 and {size for size, _ in options} == {7} and config.max_fusion_size != 7
    assert any(is_symbol for _, is_symbol in options), "dynamic=True"
    for a, b in zip(got, trained(plain, x, compiled=False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_an_optimizers_step_under_the_authors_torch_compile_runs_as_without() -> None:
    """Dynamo compiled 353 frames of zc's, for seconds, and AdamW got other bits."""
    graphs: list[torch.fx.GraphModule] = []
    weights = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        model = Net(1)
        _, optimizer = zc.compile(model, torch.optim.AdamW(model.parameters()), backend="eager")
        step = optimizer.step
        if is_compiled:
            step = torch.compile(step, backend=lambda gm, _: graphs.append(gm) or gm.forward)  # type: ignore[func-returns-value]
        for number in range(3):
            model(torch.full((2, 32), 1.0 + number)).square().sum().backward()
            step()
            optimizer.zero_grad()
        weights.append(model.layers[0].weight)
    assert not graphs and torch.equal(*weights)


class Gated(nn.Module):
    """Reads a frozen parameter, a counter and a buffer by themselves, and buffers beside a value with a gradient,
    and clones of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.linspace(-1, 1, 8), requires_grad=False)
        self.register_buffer("scale", torch.linspace(0.5, 2, 8))
        self.register_buffer("count", torch.tensor(1))
        self.register_buffer("shift", torch.linspace(-1, 2, 8))
        self.register_buffer("queue", torch.linspace(-1, 1, 64).view(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x.sin()) * x.cos() * self.scale * self.count.rsqrt() * self.queue[0].clone()
        y = self.last(y * (2 * self.frozen).cos() + y * (2 * self.scale).sin())
        y = y @ self.queue.clone().T
        return y + (self.last.bias + self.shift).square()


def test_what_the_loop_writes_before_the_backward_reaches_it_as_in_eager_autograd() -> None:
    """As EMA and MoCo's queue, by .data: gradients were 0.01 off, in silence. A counted write of a counter, or of the
    next batch into the tensor of this one, was torch's "modified by an inplace operation"."""
    results = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        model = Gated()
        if is_compiled:
            trainable = [*model.first.parameters(), *model.last.parameters()]
            zc.compile(model, torch.optim.SGD(trainable, lr=0.1), backend="aot_eager")
        batch = torch.randn(4, 8)
        loss = model(batch).square().mean()
        for tensor in (model.frozen, model.scale):
            tensor.data.mul_(0.5)
        model.count += 1
        model.shift += 1
        model.queue[:4] = 0.0
        batch.zero_()
        loss.backward()
        results.append(zc.full_grad(model)["first.weight"] if is_compiled else model.first.weight.grad)
    torch.testing.assert_close(*results)


def test_fullgraph_raises_at_a_graph_break() -> None:
    class Broken(Net):
        def forward(self, x):
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x * 2

    model = Broken(1)
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        model(torch.randn(8, 32))
