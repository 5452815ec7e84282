"""What zc relies on in Dynamo's counters, guards and options, and in classes of checkpoints; contract.py says what a
contract is."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import contract
from torch import Tensor, fx, nn

from zc import torch_private

pytestmark = pytest.mark.check


class Refusal(RuntimeError):
    """Of the package that defines the backend: this file."""


@contract("before_compiling", "torch._dynamo.callback")
def test_callbacks_run_around_the_compilation_of_a_frame() -> None:
    calls: list[str] = []
    compiled = torch.compile(lambda x: x + 1, backend=lambda gm, inputs: calls.append("backend") or gm.forward)
    with torch_private.before_compiling(lambda: calls.append("before"), lambda: calls.append("after")):
        compiled(torch.ones(2))
        assert calls == ["before", "backend", "after"]
        compiled(torch.ones(2))
        other = threading.Thread(target=compiled, args=[torch.ones(2, dtype=torch.int)])
        other.start()
        other.join()
    compiled(torch.ones(2, 2, dtype=torch.int))
    assert calls == ["before", "backend", "after", "backend", "backend"]


@contract("is_fake_quant", "torch.ao.quantization in Dynamo's MOD_SKIPLIST, for modules without hooks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fake_quantizers_without_hooks_run_eagerly() -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(8, 8))
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(net.train(), inplace=True)
    quantizers = [module for module in net.modules() if torch_private.is_fake_quant(module)]
    assert any(isinstance(module, torch.ao.quantization.FakeQuantizeBase) for module in quantizers)
    assert not any(list(module.parameters()) for module in quantizers)
    for module in net.modules():
        if module not in quantizers:
            module.register_forward_pre_hook(lambda *_: None)
    torch.compile(net, backend="aot_eager")(torch.ones(2, 8)).sum().backward()


@contract("before_compiling", "torch._dynamo.callback's count of compilations")
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_callback_that_raises_ends_its_own_compilation_alone(place: str) -> None:
    calls: list[str] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        return gm.forward

    def call(name: str) -> None:
        calls.append(name)
        if len(calls) <= 2 and name == place:
            raise Refusal("not this one")

    torch._dynamo.reset()
    layer, run = nn.Linear(2, 2), torch_private.compiled_call(torch_private.object_call, backend)
    with torch_private.before_compiling(lambda: call("before"), lambda: call("after")):
        with pytest.raises(Refusal, match="not this one"):
            run(layer, torch.ones(1, 2))
        run(layer, torch.ones(1, 2))
    assert calls == ["before", "after"] * 2
    torch._dynamo.reset()  # refuses while a compilation is under way


@contract("written_inputs", "TracingContext.fw_metadata.input_info[i].mutates_data, mutates_storage_metadata")
@contract("returned_inputs", "TracingContext.fw_metadata.output_info[i].output_type, base_idx")
def test_inputs_that_a_graph_writes_or_returns_are_named_to_the_inner_compiler() -> None:
    from torch._dynamo.backends.common import aot_autograd

    seen: list[list[int]] = []

    def inner(gm: fx.GraphModule, inputs: Any) -> Any:
        seen.extend([torch_private.written_inputs(), torch_private.returned_inputs()])
        return gm.forward

    def writes(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        z = x + 1  # Dynamo numbers inputs as they are used
        y.mul_(2)
        w.data = w.data + 1
        return z + y + w, x[:1], y * 1

    backend = aot_autograd(fw_compiler=inner, keep_inference_input_mutations=True)
    torch.compile(writes, backend=backend)(torch.ones(2), torch.ones(2), torch.ones(2))
    assert seen == [[1, 2], [0]]


@contract("graph_breaks", "torch._dynamo.utils.counters")
def test_graph_breaks_are_counted() -> None:
    def broken(x: Tensor) -> Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x + 2

    before = torch_private.graph_breaks()
    torch.compile(broken, backend="eager")(torch.ones(2))
    after = torch_private.graph_breaks()
    assert sum(after.values()) > sum(before.values()) and any("graph_break" in reason for reason in after)


@contract("guard_identity", "what Dynamo counts against recompile_limit, or the sources of parameters")
def test_instances_of_one_class_are_no_recompiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo compiles a function for more instances than its limit, which stays what it is, and other sizes of one
    instance count as ever. It prints no parameter."""
    printed: list[Tensor] = []
    monkeypatch.setattr(nn.Parameter, "__repr__", lambda param: printed.append(param) or "")

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x: Tensor, scale: int = 1) -> Tensor:
            return self.inner[0](x) * scale

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        names = [next((n for n, p in layer.named_parameters() if p is value), None) for value in inputs]
        torch_private.guard_identity(gm, names)
        compiled.append(layer)
        return gm.forward

    compiled: list[Layer] = []
    call = torch.compile(Layer.forward, backend=backend, dynamic=False)
    limit: int = torch._dynamo.config.recompile_limit
    layers = [Layer() for _ in range(limit + 4)]
    for layer in layers * 2:
        call(layer, torch.ones(1, 2))
    assert compiled == layers
    layer = layers[-1]
    for size in range(2, limit + 4):
        call(layer, torch.ones(size, 2))
    assert compiled.count(layer) == limit == torch._dynamo.config.recompile_limit
    assert not printed


@contract("global_state_check", "torch._C._dynamo.guards.GlobalStateGuard, or what it looks at")
def test_global_state() -> None:
    is_same = torch_private.global_state_check()
    assert is_same()
    with torch.no_grad():
        assert not is_same()
    with torch.autocast("cpu"):
        assert not is_same()
    precision = torch.get_float32_matmul_precision()
    try:
        torch.use_deterministic_algorithms(True)
        assert not is_same()
        torch.use_deterministic_algorithms(False)
        assert is_same()
        torch.set_float32_matmul_precision("medium")  # the last: 2.15's setter does not bring back what was before
        assert not is_same()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(precision)


@contract("inductor_options", "torch._TorchCompileInductorWrapper and its config")
def test_options_of_inductor() -> None:
    assert torch_private.inductor_options("default", None, None) == {}
    assert torch_private.inductor_options("reduce-overhead", None, None)["triton.cudagraphs"]
    assert torch_private.inductor_options(None, {"max-fusion-size": 7}, None) == {"max_fusion_size": 7}
    for mode, options in (("fast", None), (None, {"no_such_option": 1}), (None, {"max_fusion_size": "7"})):
        with pytest.raises(RuntimeError):
            torch_private.inductor_options(mode, options, None)


# --- what is private without a function of ours ---


@contract("(zc.checkpoint.files)", "the classes of which DCP's metadata consists")
def test_metadata_of_a_checkpoint(tmp_path: Path) -> None:
    from torch.distributed import checkpoint as dcp

    from zc.checkpoint import files

    dcp.save({"a": torch.ones(3), "b": {"c": 1}}, checkpoint_id=tmp_path, no_dist=True)
    metadata = files._MetadataUnpickler(io.BytesIO((tmp_path / ".metadata").read_bytes())).load()
    assert {"a", "b.c"} <= metadata.state_dict_metadata.keys()


@contract("not_compiled_alone", "torch._dynamo.decorators.skip_code")
@contract("only_eager", "torch._dynamo.decorators.skip_code")
def test_a_hook_runs_in_a_frame_that_dynamo_skips_and_is_nothing_where_it_traces() -> None:
    module, called, graphs = torch.nn.Linear(2, 2), [], []
    module.register_forward_pre_hook(torch_private.only_eager(called.append))

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    def skipped(x: Any) -> Any:
        for _ in range(2):
            torch._dynamo.graph_break()  # inside a loop: the frame runs eagerly
            x = module(x)
        return x

    torch.compile(lambda x: module(x) + 1, backend=backend, fullgraph=True)(torch.ones(1, 2))
    assert called == [] and len(graphs) == 1
    torch.compile(skipped, backend=backend)(torch.ones(1, 2))
    assert called == [module, module]
