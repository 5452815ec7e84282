"""What zc relies on in what Dynamo, AOTAutograd and Inductor make of graphs; contract.py says what a contract is."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import pickle
import platform
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from contract import contract
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from zc import torch_private
from zc.compiler import backend as backends
from zc.compiler.segments import interpret

pytestmark = pytest.mark.check

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.table(tokens)).sigmoid().exp()


def compiled(model: nn.Module, backend: Any) -> Any:
    return functools.partial(torch_private.compiled_call(torch_private.object_call, backend), model)


class Traced:
    """One compilation of a Net, forward and backward, by a backend of the same shape as zc's."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.names: list[list[str | None]] = []
        self.graphs: dict[bool, fx.GraphModule] = {}
        self.kwargs: dict[bool, dict[str, Any]] = {}
        self.inside: list[Any] = []
        self.donated: list[int] = []
        self.left: list[int] = []
        self.arguments: list[tuple[type, int]] = []
        self.model = self.compile(Net())

    def compile(self, model: Net) -> Net:
        params = dict(model.named_parameters())

        def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
            names = [next((n for n, p in params.items() if p is value), None) for value in inputs]
            self.names.append(names)
            self.ids.append(torch_private.compile_id())
            torch_private.guard_identity(gm, names)
            return torch_private.compile_graph(gm, inputs, self.inner)

        torch_private.call_instead(model, compiled(model, backend))
        model(torch.tensor([1, 2])).sum().backward()
        return model

    def inner(self, gm: fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        is_backward = bool(kwargs.get("is_backward"))
        self.graphs.setdefault(is_backward, gm)  # of the first compilation
        self.kwargs.setdefault(is_backward, kwargs)
        if is_backward:
            self.donated = torch_private.take_donated_inputs()
            metadata = torch_private.forward_metadata()
            with torch_private.apart_from_the_whole([99]):
                self.inside = [metadata.bw_donated_idxs, torch._guards.TracingContext.get().output_strides]
            self.left = metadata.bw_donated_idxs

        def run(args: list[Any]) -> Any:
            self.arguments.append((type(args), len(args)))
            inputs = list(args)
            args.clear()
            return gm.forward(*inputs)

        return torch_private.boxed(run)


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    torch.compiler.reset()  # type: ignore[no-untyped-call]
    yield Traced()
    torch.compiler.reset()  # type: ignore[no-untyped-call]


@contract("class_call set_call places_of_params", "Module._call_impl of the object; _parameters")
def test_a_block_is_left_out_of_the_graph_around_it_and_one_graph_serves_all_blocks() -> None:
    graphs: list[int] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(sum(node.op.startswith("call_") for node in gm.graph.nodes))
        return gm.forward

    def around(x: torch.Tensor) -> torch.Tensor:
        return blocks[1](blocks[0](x.sin())).cos()

    torch._dynamo.reset()
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
    plain, x = copy.deepcopy(blocks), torch.ones(1, 2, requires_grad=True)
    compiled_block = torch_private.compiled_call(torch_private.class_call, backend)
    for block in blocks:
        call = torch.compiler.disable(functools.partial(compiled_block, block), reason=torch_private.BLOCK)
        torch_private.set_call(block, call)
    before = torch_private.graph_breaks()
    got = torch.compile(around, backend=backend)(x)
    torch.testing.assert_close(got, plain[1](plain[0](x.sin())).cos())
    assert sorted(graphs) == [1, 1, 2], "sin, cos, and one graph of a linear and a relu for both blocks"
    assert torch_private.graph_breaks() == before, "blocks are no graph breaks for explain"
    torch.testing.assert_close(torch_private.class_call(blocks[0], x), plain[0](x))
    (own, name, weight), (_, _, bias) = torch_private.places_of_params(blocks[0])
    assert own[name] is weight is blocks[0][0].weight and bias is blocks[0][0].bias
    other = torch.zeros(2, 2)
    seen = []
    hook = blocks[0][0].register_forward_pre_hook(lambda *_: seen.append(own[name]))
    torch.func.functional_call(blocks[0][0], {"weight": other}, (x,))
    hook.remove()
    assert seen[0] is other and own[name] is weight


@contract("registered_in", "Module._modules and _parameters, each one dict for the module's life")
def test_a_replaced_child_or_parameter_shows_in_the_dicts_of_before() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    children, weights = torch_private.registered_in(model)
    model[0].weight = weight = nn.Parameter(torch.zeros(2, 2))
    model.append(nn.ReLU())
    assert weights["weight"] is weight and list(children.values()) == list(model)
    model[0] = child = nn.Linear(2, 2)
    assert children["0"] is child


@contract("compiled_call object_call call_instead", "Module._compiled_call_impl or _call_impl")
def test_a_module_calls_what_was_compiled(traced: Traced) -> None:
    model, seen = Net(), []
    wanted, keys = model(torch.tensor([3])), list(model.state_dict())

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(gm)
        return gm.forward

    call = compiled(model, backend)
    assert torch.equal(model(torch.tensor([3])), wanted) and not seen
    torch_private.call_instead(model, call)
    assert torch.equal(model(torch.tensor([3])), wanted) and len(seen) == 1
    assert type(model) is Net and list(model.state_dict()) == keys and "forward" not in vars(model)
    model.eval()
    assert pickle.loads(pickle.dumps(model))._compiled_call_impl is None
    assert copy.deepcopy(model)._compiled_call_impl is None
    torch_private.call_instead(model, functools.partial(torch_private.object_call, model))
    assert torch.equal(model(torch.tensor([3])), wanted) and len(seen) == 1
    torch_private.call_instead(model, None)
    assert model._compiled_call_impl is None


@contract("compiled_call", "type(module).forward, which Dynamo does not guard")
@pytest.mark.parametrize("call", [torch_private.class_call, torch_private.object_call])
def test_a_forward_that_replaces_the_class_s_own_is_called(call: Any) -> None:
    class Doubling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    graphs = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return gm.forward

    model, x = type("Child", (Doubling,), {})(), torch.ones(2)
    compiled = torch_private.compiled_call(call, backend)
    plain = Doubling.forward
    for _ in range(2):
        assert torch.equal(compiled(model, x), x * 2)
        Doubling.forward = lambda self, x: plain(self, x) * 3
        assert torch.equal(compiled(model, x), x * 6)
        Doubling.forward = plain
    assert len(graphs) == 3, "one of the class's own forward, which came back, and one of each that replaced it"
    for factor in range(20):
        Doubling.forward = lambda self, x, factor=factor: x * factor
        assert torch.equal(compiled(model, x), x * factor)


@contract("guard_absent_hooks", "GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT or SEQUENCE_LENGTH")
def test_hooks_that_come_after_the_graph_run() -> None:
    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        torch_private.guard_absent_hooks()
        return gm.forward

    model, x = nn.Sequential(nn.ReLU()), torch.ones(2)
    run = compiled(model, backend)
    assert torch.equal(run(x), x)
    of_all = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
    assert torch.equal(run(x), x * 4)
    of_all.remove()
    assert torch.equal(run(x), x)
    for k, module in enumerate((model, model[0])):
        module.register_forward_hook(lambda module, args, output: output * 3)
        module.register_forward_pre_hook(lambda module, args: (args[0] * 5,))
        assert torch.equal(run(x), x * 15 ** (k + 1))


@contract("guard_requires_grad", "GuardBuilder.CONSTANT_MATCH of a parameter's attribute (2.11)")
def test_a_parameter_that_is_thawed_gets_a_gradient() -> None:
    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        torch_private.guard_requires_grad(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    run = compiled(layer, backend)
    for is_frozen in (True, True, False):
        layer.requires_grad_(not is_frozen)
        run(x).sum().backward()
        assert (layer.weight.grad is None) == is_frozen


@contract("compile_graph boxed", "compile_fx(inner_compile=), functorch's enable_autograd_cache or _boxed_call")
def test_inner_compile_gets_forward_and_backward(traced: Traced) -> None:
    assert traced.graphs.keys() == {False, True}
    assert [kind for kind, _ in traced.arguments] == [list, list]
    fresh = Net()
    fresh.load_state_dict(traced.model.state_dict())
    fresh(torch.tensor([1, 2])).sum().backward()
    for name, param in fresh.named_parameters():
        assert torch.allclose(param.grad, dict(traced.model.named_parameters())[name].grad), name


# what zc.compiler passes on to segments, and says of them why that is right
KNOWN = {"cudagraphs", "static_input_idxs", "is_backward", "graph_id", "cpp_wrapper", "aot_mode", "is_inference",
         "layout_opt", "extern_node_serializer", "boxed_forward_device_index", "fx_wrapper", "compile_region_name",
         "get_decomp_fn"}  # fmt: skip


@contract("compile_inner", "the arguments of inner compilers, by one that zc has never seen")
def test_inner_compilers_get_no_argument_that_zc_does_not_know(traced: Traced) -> None:
    from torch._inductor import compile_fx

    names = {name for kwargs in traced.kwargs.values() for name in kwargs}
    declared = set(compile_fx._CompileFxKwargs.__annotations__)
    assert names | declared <= KNOWN and {"static_input_idxs", "is_backward"} <= declared


@contract("use_of_streams", "the operators of torch.ops.streams, control_deps around them or meta['custom']['stream']")
def test_streams_of_the_program() -> None:
    from torch._dynamo.variables.streams import StreamContextVariable
    from torch._functorch._aot_autograd import streams
    from torch._inductor.fx_passes.control_dependencies import control_deps

    graph = fx.Graph()
    x = graph.placeholder("x")
    plain = graph.call_function(aten.sin.default, (x,))
    record = graph.call_function(torch.ops.streams.record_event.default, (0, 3))
    graph.output(graph.call_function(aten.cos.default, (plain,)))
    assert [torch_private.use_of_streams(n) for n in (x, plain)] == [None, None]
    assert torch_private.use_of_streams(record) == "streams.record_event.default"
    # what Dynamo writes at a stream context, AOTAutograd reads: under the same key
    assert '={"stream": self.get_stream().user_object_index}' in inspect.getsource(StreamContextVariable.__init__)
    streams.set_stream(plain, 3)
    assert streams.get_stream(plain) == 3 and torch_private.use_of_streams(plain) == "stream 3"
    wrap = getattr(streams, "wrap_all_sync_nodes_with_control_deps", None)
    if wrap is not None:  # since 2.13
        plain.meta["val"] = torch.empty(())
        wrap(gm := fx.GraphModule(nn.Module(), graph))
        uses = {n.target: torch_private.use_of_streams(n) for n in gm.graph.nodes}
        assert control_deps in uses and list(uses.values()).count("streams.record_event.default") == 1


@contract("compile_id", "torch._guards.CompileContext")
def test_compile_id(traced: Traced) -> None:
    frame, times = traced.ids[0].split("/")
    assert frame.isdigit() and times == "0"


@contract("guard_identity", 'meta["grapharg"].source of placeholders or GuardBuilder.ID_MATCH')
def test_another_instance_is_compiled_anew(traced: Traced) -> None:
    before = len(traced.ids)
    traced.model(torch.tensor([1, 2]))
    assert len(traced.ids) == before and {*traced.names[0]} >= {"table.weight", "linear.weight", "linear.bias"}
    params = dict(traced.model.named_parameters())
    traced.model.linear = nn.Linear(4, 3)  # the same graph, other parameters
    traced.model(torch.tensor([1, 2]))
    assert len(traced.ids) == before + 1
    traced.model.linear.weight, traced.model.linear.bias = params["linear.weight"], params["linear.bias"]


@contract("input_index grad_of_index", 'AOTAutograd\'s descriptors in meta["desc"]')
def test_descriptors(traced: Traced) -> None:
    names = traced.names[0]
    placeholders = [n for n in traced.graphs[False].graph.nodes if n.op == "placeholder"]
    indices = [torch_private.input_index(n.meta.get("desc")) for n in placeholders]
    assert [names[i] for i in indices if i is not None] == names, "the forward's inputs, in order"
    descs = traced.graphs[True].graph.output_node().meta["desc"]
    grad_indices = [torch_private.grad_of_index(desc) for desc in descs]
    assert {names[i] for i in grad_indices if i is not None} == {"table.weight", "linear.weight", "linear.bias"}
    assert torch_private.input_index(None) is None and torch_private.grad_of_index(None) is None


@contract("keep_for_backward", "joint_custom_post_pass or CheckpointPolicy.MUST_SAVE")
@pytest.mark.parametrize("is_kept", [True, False])
def test_values_that_a_backward_does_not_derive_again(is_kept: bool) -> None:
    saved, order = list[str](), list[str]()

    def joint_pass(graph: fx.Graph) -> None:
        order.append("zc's")
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default) if is_kept else ():
            torch_private.keep_for_backward(node)

    def inner(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            outputs = gm.graph.output_node().args[0]
            saved.extend(str(node.target) for node in outputs[torch_private.num_forward_outputs() :])
        return torch_private.boxed(lambda args: gm(*args))

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        options = {"joint_custom_post_pass": [lambda _: order.append("the user's")]}
        return torch_private.compile_graph(gm, inputs, inner, options, joint_pass=joint_pass)

    torch.compile(lambda x, y: x * (2 * y).cos(), backend=backend)(torch.ones(2, requires_grad=True), torch.ones(2))
    assert ("aten.cos.default" in saved) == is_kept, saved
    assert order == ["the user's", "zc's"]


@contract(
    "take_donated_inputs apart_from_the_whole forward_metadata",
    "TracingContext.fw_metadata.bw_donated_idxs or output_strides",
)
def test_donated_inputs(traced: Traced) -> None:
    placeholders = [n for n in traced.graphs[True].graph.nodes if n.op == "placeholder"]
    assert traced.donated and all(0 <= i < len(placeholders) for i in traced.donated), "activations, which die here"
    assert traced.inside == [[99], None] and traced.left == []
    assert torch_private.take_donated_inputs() == [] and torch_private.forward_metadata() is None, "no compilation"
    output = traced.model(torch.tensor([1, 2])).sum()
    output.backward(retain_graph=True)  # AOTAutograd would refuse it, were the list not empty
    output.backward()


class Refusal(RuntimeError):
    """Of the package that defines the backend: this file."""


@contract("compiled_call", "BackendCompilerFailed.inner_exception")
@pytest.mark.parametrize(("error", "comes_as"), [(Refusal, Refusal), (KeyError, BackendCompilerFailed)])
def test_a_backend_s_own_error_is_not_wrapped(error: type[Exception], comes_as: type[Exception]) -> None:
    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        raise error("not this graph")

    torch._dynamo.reset()
    with pytest.raises(comes_as, match="not this graph"):
        compiled(nn.Linear(2, 2), backend)(torch.ones(1, 2))


@contract("before_double_backward", "double_ctx of the function in which AOTAutograd runs a backward with create_graph")
def test_a_call_comes_before_the_backward_of_a_compiled_backward() -> None:
    creates_graph: list[bool] = []

    def refuse() -> None:
        raise ValueError("none")

    def hook(gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        def run(args: list[Any]) -> Any:
            if kwargs.get("is_backward"):
                creates_graph.append(torch_private.before_double_backward(refuse))
            return gm(*args)

        return torch_private.boxed(run)

    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(torch.sin, backend=lambda gm, inputs: torch_private.compile_graph(gm, inputs, hook, {}))
    compiled(x).sum().backward(retain_graph=True)
    (grad,) = torch.autograd.grad(compiled(x).sum(), [x], create_graph=True)
    assert creates_graph == [False, True]
    with pytest.raises(ValueError, match="none"):
        grad.sum().backward()


@contract("written_inputs num_forward_outputs", "fw_metadata.input_info[i].mutates_data or num_forward")
def test_which_inputs_a_forward_writes_and_which_outputs_its_backward_gets() -> None:
    seen: list[Any] = []

    def hook(gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            seen.append((torch_private.written_inputs(), torch_private.num_forward_outputs(), gm.graph.output_node()))
        return torch_private.boxed(lambda args: gm(*args))

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        return torch_private.compile_graph(gm, inputs, hook, {})

    def forward(x: Tensor, state: Tensor) -> Tensor:
        y = x * (state + 1)
        state.add_(1)
        return y

    torch._dynamo.reset()
    torch.compile(forward, backend=backend)(torch.ones(3, requires_grad=True), torch.ones(3))
    ((written, first, output),) = seen
    assert len(written) == 1 and len(output.args[0][first:]) == 1, "it writes the state, and saves one factor"


@contract("keeps_graph", "torch._C._autograd._get_current_graph_task_keep_graph")
def test_whether_a_backward_keeps_its_graph() -> None:
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(torch_private.keeps_graph()))
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


@contract(
    "compile_graph output_code_class dump_graph load_graph with_forward_metadata",
    "AOTAutograd's cache: its key's tag, bundled entries, OutputCode, or GraphPickler",
)
@pytest.mark.usefixtures("own_cache")
def test_graphs_out_of_the_cache_go_through_the_hook_again() -> None:
    from torch._dynamo.utils import counters
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    from zc.compiler.saved import cached

    seen: list[tuple[bool, str, list[int], bool]] = []

    def hook(traced: Any) -> Any:
        values = [n.meta["val"] for n in traced.gm.graph.nodes if n.op == "placeholder"]
        donated = [k for k, n in enumerate(traced.gm.graph.find_nodes(op="placeholder")) if n.meta["donated"]]
        has_metadata = torch_private.forward_metadata() is not None
        seen.append((traced.is_backward, f"{traced.gm.code}{[v.shape for v in values]}", donated, has_metadata))
        return interpret(traced.gm)

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        with cached(hook) as kept:
            compiler = backends._inner_compiler(kept)
            return torch_private.compile_graph(gm, inputs, compiler, kept_as="whole")

    def plain(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        settings = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}
        with functorch_config.patch(settings):
            return compile_fx(gm, inputs)

    grads: list[Tensor] = []
    cache: list[tuple[int, int]] = []
    for backend_of_run in (backend, backend, plain):
        torch.compiler.reset()  # type: ignore[no-untyped-call]
        counters.clear()
        torch.manual_seed(0)
        model = Net()
        torch_private.call_instead(model, compiled(model, backend_of_run))
        model(torch.tensor([1, 2])).sum().backward()
        assert model.linear.weight.grad is not None
        grads.append(model.linear.weight.grad)
        cache.append((counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_saved"]))
    assert cache == [(0, 1), (1, 0), (0, 1)], "a plain run with our settings has an entry of its own"
    assert seen[:2] == seen[2:]
    assert [is_backward for is_backward, *_ in seen[:2]] == [False, True] and seen[1][2]
    assert torch.equal(*grads[:2])
    torch.testing.assert_close(grads[2], grads[0])


@contract("(the backend)", "the arguments cudagraphs and is_backward of compile_fx_inner")
def test_arguments_of_inner_compile(traced: Traced) -> None:
    for is_backward, kwargs in traced.kwargs.items():
        asked = kwargs["cudagraphs"]
        assert bool(kwargs.get("is_backward")) == is_backward
        assert not bool(type(asked)(False)) and bool(type(asked)(True))


@contract("(write_in_place)", "the operators that AOTAutograd makes of a backward")
def test_operators_of_a_backward(traced: Traced) -> None:
    targets = {n.target for n in traced.graphs[True].graph.nodes}
    of_2_11 = {aten.index_put.default, aten._unsafe_index_put.default}  # and of 2.12, for an embedding
    assert aten.mm.default in targets
    assert targets & {aten._unsafe_masked_index_put_accumulate.default, *of_2_11}


@contract("compile_inner", "compile_fx_inner, or the output's user_visible_output_idxs and original_output_strides")
def test_inductor_on_one_graph(traced: Traced) -> None:
    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        return torch_private.compile_graph(gm, inputs, inner)

    def inner(gm: fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        compiled = torch_private.compile_inner(gm, example_inputs, **kwargs)

        def run(args: list[Any]) -> Any:
            outputs = compiled(args)
            emptied.append(not args)
            return outputs

        return torch_private.boxed(run)

    emptied: list[bool] = []
    a, b = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    with torch.no_grad():
        product = torch.compile(torch.mm, backend=backend)(a, b)  # an extern kernel: no C++ is compiled
    assert torch.equal(product, torch.mm(a, b)) and emptied == [True]
    sources = "".join(inspect.getsource(import_module(f"torch._inductor.{name}")) for name in ("compile_fx", "graph"))
    assert '"user_visible_output_idxs"' in sources and '"original_output_strides"' in sources, "nobody reads them"


@torch.compiler.nested_compile_region
def region(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


@contract("inline_regions", "the arguments of invoke_subgraph, or that a region returns what its backward reads")
def test_operations_of_a_region_stand_in_its_graph() -> None:
    graphs: list[list[object]] = []
    tanh = aten.tanh.default

    def inner(gm: fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        assert torch_private.inline_regions(gm) and not torch_private.inline_regions(gm)
        gm.graph.lint()
        gm.recompile()
        graphs.append([n.target for n in gm.graph.nodes])
        if not kwargs.get("is_backward"):
            saved = gm.graph.output_node().all_input_nodes
            given, made = gm.graph.find_nodes(op="placeholder"), gm.graph.find_nodes(op="call_function", target=tanh)
            storages, own, of_calls = ({torch_private.storage_of(n) for n in nodes} for nodes in (saved, given, made))
            assert own <= storages, "views of what it gets are known as such"
            assert len(of_calls) == 2, "each call has values of its own"
        return interpret(gm)

    w = torch.ones(4, 4, requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        x = x + region(x, w)
        return x + region(x, w)

    compiled = torch.compile(twice, backend=lambda gm, inputs: torch_private.compile_graph(gm, inputs, inner))
    x = torch.ones(2, 4, requires_grad=True)  # so both calls are of one region: Dynamo inlines what is called once
    compiled(x).sum().backward()
    wanted = torch.autograd.grad(twice(x).sum(), w)
    torch.testing.assert_close((w.grad,), wanted)
    assert len(graphs) == 2 and all(aten.mm.default in targets for targets in graphs)


@contract("apply_strides", "FakeTensorProp.propagate_dont_convert_inputs or detect_fake_mode")
def test_values_learn_of_other_strides() -> None:
    with FakeTensorMode() as mode:
        x = torch.ones(2, 3, 4, 4)
        gm = make_fx(lambda x: torch.relu(x) + 1)(x)
        other = x.to(memory_format=torch.channels_last)
        assert mode is not None
        torch_private.apply_strides(gm, [other])
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "call_function"]
    assert len(values) == 2 and all(v.stride() == other.stride() != x.stride() for v in values)


@contract("probe_vector_units", "the probes of vector instructions in torch._inductor.cpu_vec_isa")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere Inductor probes one set of instructions")
@config.patch({"cpp.vec_isa_ok": None})  # the tests' environment has "1"
def test_probes_of_vector_instructions_run_beside_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    threads: list[str] = []
    is_over = threading.Event()

    class Unit(cpu_vec_isa.VecAVX2):
        def check_build(self, code: str) -> bool:
            threads.append(threading.current_thread().name)
            return is_over.wait(60.0)

        __hash__ = object.__hash__

    units = [Unit(), Unit()]
    plain = inspect.unwrap(cpu_vec_isa.valid_vec_isa_list)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", functools.cache(plain))
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", units)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2"])

    inspect.unwrap(torch_private.probe_vector_units)()
    probes = [thread for thread in threading.enumerate() if thread.name == "zc vector units"]
    assert len(probes) == 2
    threading.Timer(0.3, is_over.set).start()
    _fork()
    assert not any(thread.is_alive() for thread in probes)
    assert str(cpu_vec_isa.pick_vec_isa()) == "avx2" and len(cpu_vec_isa.valid_vec_isa_list()) == 2
    assert threads == ["zc vector units"] * 2  # Inductor has asked for no probe of its own

    is_over.clear()
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Unit()])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", functools.cache(plain))
    inspect.unwrap(torch_private.probe_vector_units)()
    threading.Timer(0.3, is_over.set).start()
    assert len(cpu_vec_isa.valid_vec_isa_list()) == 1 and len(threads) == 3  # it has waited


def _fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@contract("compiling_kernels_together compile_inner", "AsyncCompile.wait, by which generated modules wait for kernels")
def test_modules_wait_for_their_kernels_where_the_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 2)  # one makes no futures
    scopes: list[dict[str, Any]] = [{"kernel": LambdaFuture(lambda value=value: value)} for value in range(3)]
    with torch_private.compiling_kernels_together():
        AsyncCompile().wait(scopes[0])
        assert isinstance(scopes[0]["kernel"], LambdaFuture)
    AsyncCompile().wait(scopes[1])
    with suppress(RuntimeError), torch_private.compiling_kernels_together():
        AsyncCompile().wait(scopes[2])
        raise RuntimeError
    assert [scope["kernel"] for scope in scopes] == [0, 1, 2]

    plain, waits = AsyncCompile.wait, []
    with mock.patch.object(AsyncCompile, "wait", lambda self, scope: waits.append(plain(self, scope))):
        inputs = torch.arange(6.0)
        assert torch.equal(torch.compile(lambda x: x * 2 + 0.125)(inputs), inputs * 2 + 0.125)
    assert waits  # a generated module has called it
