"""Each private name of torch that zc relies on, by itself and in under a second, on whatever torch is installed.

Where a new torch breaks one, the failure says which function of zc.torch_private (or zc.kernels._private) relies on
what. Nothing here trains: what zc makes of these names is tested elsewhere.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import io
import pickle
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from zc import torch_private
from zc.kernels import _private as kernels_private

pytestmark = pytest.mark.check

aten = torch.ops.aten
TESTED: set[str] = set()


def contract(names: str, relies_on: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test of these functions of ours; a failure says on what they rely."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        TESTED.update(names.split())

        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  (whatever it is, it says that)
                pytest.fail(f"torch {torch.__version__} has changed {relies_on}, on which {names} relies: {error!r}")

        return run

    return decorate


def test_every_function_has_its_contract() -> None:
    for module in (torch_private, kernels_private):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        ours = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        assert {name for name in ours if not name.startswith("_")} <= TESTED


# --- profilers ---


@contract("is_profiling", "torch.autograd.profiler._is_profiler_enabled")
def test_a_profiler_is_seen() -> None:
    assert not torch_private.is_profiling()
    for profiler in (torch.profiler.profile(), torch.autograd.profiler.profile()):
        with profiler:
            assert torch_private.is_profiling()
        assert not torch_private.is_profiling()
    assert "_run_on_profiler_start()" in inspect.getsource(torch.autograd.profiler.emit_nvtx.__enter__)


# --- autograd ---


@contract("is_inside_another_backward", "every backward going through torch.autograd.graph._engine_run_backward")
def test_a_backward_inside_another_one() -> None:
    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(torch_private.is_inside_another_backward())
            inner = torch.ones(1, requires_grad=True)
            inner.register_hook(lambda _: seen.append(torch_private.is_inside_another_backward()))
            with torch.enable_grad():
                inner.mul(2).sum().backward()
            return grad

    seen = [torch_private.is_inside_another_backward()]
    Reentrant.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert seen == [False, False, True]


def in_backward(do: Callable[[], Any], *params: nn.Parameter, grad: bool = False) -> Any:
    """What ``do`` returns inside a backward to ``params``, or inside torch.autograd.grad."""
    found: list[Any] = []
    made = torch.stack([p.sum() for p in params]).sum() * 1
    made.register_hook(lambda _: found.append(do()))
    if grad:
        torch.autograd.grad(made, params)
    else:
        made.backward()
    return found[0]


@contract("current_graph_task", "torch._C._current_graph_task_id")
def test_graph_task() -> None:
    param = nn.Parameter(torch.ones(2))
    assert torch_private.current_graph_task() == -1
    first, second = (in_backward(torch_private.current_graph_task, param) for _ in range(2))
    assert first >= 0 and second >= 0 and first != second


@contract("queue_callback", "Variable._execution_engine.queue_callback")
def test_callback_at_the_end_of_a_backward() -> None:
    param, seen = nn.Parameter(torch.ones(2)), []
    param.register_post_accumulate_grad_hook(lambda _: seen.append("gradient"))
    in_backward(lambda: torch_private.queue_callback(lambda: seen.append("end")), param)
    assert seen == ["gradient", "end"]


@contract("version", "Tensor._version")
def test_version() -> None:
    param = nn.Parameter(torch.ones(2))
    before = torch_private.version(param)
    with torch.no_grad():
        param.mul_(2)
    assert torch_private.version(param) == before + 1
    param.data.mul_(2)
    assert torch_private.version(param) == before + 1, "a write through .data is not seen"


@contract("num_accumulate_hooks", "Tensor._post_accumulate_grad_hooks")
def test_accumulate_hooks() -> None:
    param = nn.Parameter(torch.ones(2))
    assert torch_private.num_accumulate_hooks(param) == 0
    handle = param.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_private.num_accumulate_hooks(param) == 1
    handle.remove()
    assert torch_private.num_accumulate_hooks(param) == 0


@contract("kept_by_autograd", "torch._C._will_engine_execute_node, Tensor._backward_hooks or Function.apply's nodes")
def test_what_autograd_must_see() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))

    def kept() -> frozenset[str]:
        return torch_private.kept_by_autograd({"a": a, "b": b})

    assert in_backward(kept, a, b) == frozenset()
    assert in_backward(kept, a) == {"b"}, "the backward does not reach b"
    assert in_backward(kept, a, b, grad=True) == {"a", "b"}
    handle = a.register_hook(lambda g: g)
    assert in_backward(kept, a, b) == {"a"}
    handle.remove()
    assert in_backward(kept, a, b) == frozenset()


@contract("compiled_autograd_is_on", "torch._dynamo.compiled_autograd's flags")
def test_compiled_autograd() -> None:
    from torch._dynamo import compiled_autograd

    assert not torch_private.compiled_autograd_is_on()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        assert torch_private.compiled_autograd_is_on()
    assert not torch_private.compiled_autograd_is_on()


@contract("has_later_step_hook", "Optimizer._optimizer_step_pre_hooks")
def test_order_of_step_hooks() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert isinstance(optimizer._optimizer_step_pre_hooks, dict)
    optimizer.register_step_pre_hook(lambda *_: None)
    own = optimizer.register_step_pre_hook(lambda *_: None)
    assert not torch_private.has_later_step_hook(optimizer, own)
    later = optimizer.register_step_pre_hook(lambda *_: None)
    assert torch_private.has_later_step_hook(optimizer, own)
    later.remove()
    assert not torch_private.has_later_step_hook(optimizer, own)


@contract("bare_copy", "Optimizer.__setstate__, and hooks standing in _optimizer_*")
def test_a_bare_copy() -> None:
    """A scheduler and hooks of the original never hear of it, and it has everything else that the class has made."""

    class Own(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.5)
            self.extra = [1]

    calls: list[str] = []
    param, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Own([param])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    made: Any = torch_private.bare_copy(optimizer)
    assert type(made) is Own and made.extra == [1] and made.extra is not optimizer.extra
    assert made.param_groups == [] and not made.state
    made.param_groups = [{**optimizer.param_groups[0], "params": [other]}]
    other.grad = torch.ones(2)
    made.step()
    assert other.tolist() == [0.5, 0.5] and param.tolist() == [1.0, 1.0] and not calls
    assert not getattr(optimizer, "_opt_called", False) and scheduler.last_epoch == 0
    assert len(optimizer._optimizer_step_pre_hooks) == 1 and optimizer.param_groups[0]["params"] == [param]


@contract("watching_collectives", "collectives being operators of c10d")
def test_collectives_are_seen(tmp_path: Path) -> None:
    import torch.distributed as dist

    seen: list[str] = []
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with torch_private.watching_collectives(seen.append):
            dist.all_reduce(torch.ones(2))
            dist.all_gather([torch.ones(2)], torch.ones(2))
            torch.ones(2).add_(1)
    finally:
        dist.destroy_process_group()
    assert len(seen) == 2 and "allreduce" in seen[0] and "allgather" in seen[1]


@contract("step_frame", "step hooks being called by the frame of torch's wrapper around step")
def test_hooks_of_one_step_have_one_frame() -> None:
    frames: list[Any] = []

    def seen() -> None:
        frames.append(torch_private.step_frame())

    class Parent(torch.optim.SGD):
        pass

    class Child(Parent):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    Parent([nn.Parameter(torch.ones(2))], lr=0.1)  # from now on its step is wrapped
    optimizer = Child([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen())
    optimizer.register_step_post_hook(lambda *_: seen())
    optimizer.step()
    outer, inner, inner_end, outer_end = frames
    assert outer is outer_end and inner is inner_end and outer is not inner


class _Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@contract("unscale_", "torch._amp_foreach_non_finite_check_and_unscale_, which GradScaler calls")
def test_unscale() -> None:
    grads, found = [torch.tensor([2.0, 4.0]), torch.tensor([6.0])], torch.zeros(1)
    torch_private.unscale_(grads, found, torch.tensor([0.5]))
    assert [g.tolist() for g in grads] == [[1.0, 2.0], [3.0]] and found.item() == 0
    torch_private.unscale_([torch.tensor([float("inf")])], found, torch.tensor([0.5]))
    assert found.item() == 1
    param = nn.Parameter(torch.ones(2))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([param], lr=0.1)
    scaler.scale(param.sum()).backward()
    with _Watching() as watching:
        scaler.unscale_(optimizer)
    assert aten._amp_foreach_non_finite_check_and_unscale_.default in watching.seen


# --- tensors ---


class _Plain(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


asked: list[Any] = []


class _Wrapper(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


@contract("make_wrapper", "Tensor._make_wrapper_subclass")
def test_wrapper_without_storage() -> None:
    like = torch.ones(3, 5, dtype=torch.bfloat16).t()
    made = torch_private.make_wrapper(_Wrapper, like)
    assert type(made) is _Wrapper
    assert (made.shape, made.stride(), made.dtype, made.device) == (like.shape, like.stride(), like.dtype, like.device)


@contract("without_torch_function", "torch._C.DisableTorchFunctionSubclass")
def test_torch_function_is_not_asked() -> None:
    tensor = torch.ones(2).as_subclass(_Plain)
    asked.clear()
    with torch_private.without_torch_function():
        _ = tensor.shape
        tensor.grad = None
        assert not asked
    tensor.add(1)
    assert asked


@contract("own_storage", "torch.utils.dlpack.from_dlpack")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.float8_e4m3fn])
def test_the_same_memory_under_another_storage(dtype: torch.dtype) -> None:
    flat = torch.arange(9).to(dtype)
    own = torch_private.own_storage(flat[2:5])
    assert own.dtype == dtype and own.data_ptr() == flat[2:].data_ptr() and own.shape == (3,)
    assert own.untyped_storage().nbytes() == 3 * dtype.itemsize and own.storage_offset() == 0
    flat[3] = 0
    del flat
    more = [torch.full((9,), 7).to(dtype) for _ in range(100)]  # would take memory that was given back
    assert own.float().tolist() == torch.tensor([2, 0, 4]).to(dtype).float().tolist() and len(more) == 100
    assert torch_private.own_storage(own[:0]).numel() == 0
    alone, view = torch_private.num_sharing(own), own[1:]
    assert torch_private.num_sharing(own) == alone + 1 and view.data_ptr() > own.data_ptr()


def test_own_storage_of_another_device_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Tensor.__dlpack__`` raises BufferError then, for a model on cuda:1 without torch.cuda.set_device, and in each
    thread of DCP's."""
    current, plain = [0], torch.utils.dlpack.from_dlpack

    @contextlib.contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        before, current[0] = current[0], 1
        yield
        current[0] = before

    def from_dlpack(tensor: Tensor) -> Tensor:
        if current[0] != 1:
            raise BufferError("Can't export tensors on a different CUDA device index. Expected: 1. Current device: 0.")
        return plain(tensor)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", from_dlpack)
    assert torch_private.own_storage(torch.ones(3)[1:]).tolist() == [1, 1] and current == [0]


@contract("num_sharing", "torch._C._storage_Use_Count")
def test_holders_of_a_storage() -> None:
    tensor = torch.ones(4)
    alone = torch_private.num_sharing(tensor)
    view = tensor[1:]
    assert torch_private.num_sharing(tensor) == alone + 1
    array = tensor.numpy()
    assert torch_private.num_sharing(tensor) >= alone + 2
    del view, array
    assert torch_private.num_sharing(tensor) == alone


@contract("storage_of", "UntypedStorage._cdata, of fake tensors too")
def test_identity_of_a_storage() -> None:
    for mode in (torch.no_grad(), FakeTensorMode()):
        with mode:
            a = torch.ones(4, 2)
            graph, values = fx.Graph(), (a, a.t()[1:], torch.ones(4, 2), 3)
            nodes = [graph.placeholder(f"p{i}") for i in range(len(values))]
            for node, value in zip(nodes, values, strict=True):
                node.meta["val"] = value
            same, view, other, number = map(torch_private.storage_of, nodes)
            assert same == view != other and number is None


@contract("serve_optimizer_states", "what torch.distributed.checkpoint.state_dict's public functions go through")
def test_who_answers_for_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import state_dict as stock

    for name in ("_get_optim_state_dict", "_load_optim_state_dict"):
        plain = getattr(stock, name)
        if plain.__module__ == torch_private.__name__:  # served already
            plain = next(c.cell_contents for c in plain.__closure__ if getattr(c.cell_contents, "__name__", "") == name)
        monkeypatch.setattr(stock, name, plain)
    ours, seen = torch.optim.SGD(nn.Linear(2, 2).parameters(), momentum=0.9), []

    def get(model: nn.Module, optimizers: Any, options: Any) -> Any:
        assert not options.full_state_dict and not options.submodule_prefixes and not options.cpu_offload
        assert not options.flatten_optimizer_state_dict and not options.broadcast_from_rank0
        return {"state": {}, "param_groups": []} if optimizers == (ours,) else None

    def put(model: nn.Module, optimizers: Any, state: Any, options: Any) -> bool:
        seen.append(state)
        return optimizers == (ours,)

    torch_private.serve_optimizer_states(get, put)
    torch_private.serve_optimizer_states(get, put)
    model = nn.Linear(2, 2)
    own = torch.optim.SGD(model.parameters(), momentum=0.9)
    assert stock.get_state_dict(model, ours)[1] == {"state": {}, "param_groups": []}
    stock.set_optimizer_state_dict(model, ours, {"state": 1})
    states = stock.get_optimizer_state_dict(model, own)
    stock.set_state_dict(model, own, model_state_dict=model.state_dict(), optim_state_dict=states)
    assert seen == [{"state": 1}, states] and states["state"].keys() == {"weight", "bias"}


@contract("set_apply plain_apply", "Module._apply, asked of the object")
def test_what_moves_a_module() -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2)), []

    def apply(function: Any, recurse: bool = True) -> nn.Module:
        seen.append(function(torch.ones(1)).dtype)
        return torch_private.plain_apply(model, function, recurse)

    torch_private.set_apply(model, apply)
    assert nn.Sequential(model).double()[0] is model and model.half().float() is model
    assert seen == [torch.float64, torch.float16, torch.float32] and model[0].weight.dtype == torch.float32


@contract("tell_ddp", "_ddp_params_and_buffers_to_ignore, which DDP's constructor reads")
def test_ddp_goes_through_what_it_is_told() -> None:
    if torch.distributed.is_initialized():
        pytest.skip("a process group of another test is open")

    def names() -> Iterator[str]:
        yield "weight"
        raise LookupError

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        torch_private.tell_ddp(model, names())
        with pytest.raises(LookupError):
            nn.parallel.DistributedDataParallel(model)
        torch_private.tell_ddp(model, ["weight"])
        ignored = nn.parallel.DistributedDataParallel(model).parameters_to_ignore
        assert ignored == {"weight"}
    finally:
        torch.distributed.destroy_process_group()


@contract("new_group", "distributed_c10d._new_process_group_helper, _get_default_timeout and _world.pg_group_ranks")
def test_a_group_under_a_name() -> None:
    if torch.distributed.is_initialized():
        pytest.skip("a process group of another test is open")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group, tensor = torch_private.new_group([0], "gloo", "zc/0/1"), torch.ones(2)
        assert torch.distributed.get_process_group_ranks(group) == [0] and group.group_name == "zc/0/1"
        torch.distributed.all_reduce(tensor, group=group)
        torch.distributed.destroy_process_group(group)
        assert tensor.tolist() == [1, 1] and torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


@contract("new_group timeout_of", "ProcessGroup.bound_device_id, its _get_backend, or a backend's options._timeout")
def test_a_group_beside_one_that_is_bound_to_a_device() -> None:
    if torch.distributed.is_initialized():
        pytest.skip("a process group of another test is open")
    store, seven = torch.distributed.HashStore(), timedelta(seconds=7)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=seven)
    try:
        default: Any = torch.distributed.group.WORLD
        assert torch_private.timeout_of(default, "cpu") == seven and torch_private.timeout_of(default, "meta") is None
        default.bound_device_id = torch.device("cuda", 0)
        assert torch_private.timeout_of(torch_private.new_group([0], "gloo", "zc/0/2", 2 * seven), "cpu") == 2 * seven
        assert default.bound_device_id == torch.device("cuda", 0)
        c10d: Any = torch.distributed.distributed_c10d
        if hasattr(c10d, "_nccl2_device"):  # since 2.15: the group's own device comes first
            assert "device_id" in inspect.signature(c10d._new_process_group_helper).parameters
            asked = types.SimpleNamespace(enable_reconfigure=False, process_group=default)
            assert c10d._nccl2_device(asked) == torch.device("cuda", 0)
            assert hasattr(c10d.ProcessGroupNCCL2, "options")
        default.bound_device_id = None
        assert default.bound_device_id is None
        options = torch.distributed.distributed_c10d.__dict__.get("ProcessGroupNCCL")
        assert options is None or not options.Options().is_high_priority_stream
    finally:
        torch.distributed.destroy_process_group()


@contract("default_store", "torch.distributed.distributed_c10d._get_default_store")
def test_store_of_the_default_group() -> None:
    if torch.distributed.is_initialized():
        pytest.skip("a process group of another test is open")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        store = torch_private.default_store()
        store.set("a key", "a value")
        assert store.get("a key") == b"a value"
    finally:
        torch.distributed.destroy_process_group()


@contract("own_store", "Store.clone")
def test_a_store_through_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = torch.distributed.HashStore(), torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    for store in (*stores, torch.distributed.PrefixStore("a", stores[1])):
        monkeypatch.setattr(torch_private, "default_store", lambda: store)  # noqa: B023
        found, is_own = torch_private.own_store()
        found.set("a key", "a value")
        assert is_own and store.get("a key") == b"a value"
    monkeypatch.setattr(torch_private, "default_store", object)
    assert not torch_private.own_store()[1]


@contract("mutates", "OpOverload._schema.is_mutable")
def test_what_an_operator_says_of_itself() -> None:
    assert torch_private.mutates(aten.add_.Tensor) and torch_private.mutates(aten.add.out)
    assert not torch_private.mutates(aten.add.Tensor) and not torch_private.mutates(len)


@contract("copy_all_", "torch._foreach_copy_")
def test_copies_cast() -> None:
    to = [torch.zeros(2), torch.zeros(1, 3)]
    kernels_private.copy_all_(to, [torch.tensor([1, 2], dtype=torch.bfloat16), torch.full((1, 1), 3.0).expand(1, 3)])
    assert [t.tolist() for t in to] == [[1.0, 2.0], [[3.0, 3.0, 3.0]]]


@contract("views_of", "torch._utils._unflatten_dense_tensors")
def test_views_one_after_another() -> None:
    flat = torch.arange(8.0)
    views = kernels_private.views_of(flat, [torch.empty(2, 3), torch.empty(2)])
    assert [v.tolist() for v in views] == [[[0, 1, 2], [3, 4, 5]], [6, 7]]
    assert all(v.untyped_storage().data_ptr() == flat.data_ptr() for v in views)


# --- Dynamo, AOTAutograd, Inductor ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.table(tokens)).sigmoid().exp()


class Traced:
    """One compilation of a Net, forward and backward, by a backend of the same shape as zc's."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.names: list[list[str | None]] = []
        self.graphs: dict[bool, fx.GraphModule] = {}
        self.kwargs: dict[bool, dict[str, Any]] = {}
        self.inside: list[Any] = []
        self.donated: list[int] = []
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

        torch_private.call_instead(model, torch_private.compiled_call(model, backend))
        model(torch.tensor([1, 2])).sum().backward()
        return model

    def inner(self, gm: fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        is_backward = bool(kwargs.get("is_backward"))
        self.graphs.setdefault(is_backward, gm)  # of the first compilation
        self.kwargs.setdefault(is_backward, kwargs)
        if is_backward:
            self.donated = torch_private.donated_inputs()
            with torch_private.apart_from_the_whole([99]):
                self.inside = [torch_private.donated_inputs(), torch._guards.TracingContext.get().output_strides]
            self.inside.append(torch_private.donated_inputs())

        def run(args: list[Any]) -> Any:
            self.arguments.append((type(args), len(args)))
            taken = list(args)
            args.clear()
            return gm.forward(*taken)

        return torch_private.boxed(run)


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    torch.compiler.reset()  # type: ignore[no-untyped-call]
    yield Traced()
    torch.compiler.reset()  # type: ignore[no-untyped-call]


@contract("compiled_call call_after plain_call call_instead", "Module._compiled_call_impl or _call_impl")
def test_a_module_calls_what_was_compiled(traced: Traced) -> None:
    model, seen = Net(), []
    wanted, keys = model(torch.tensor([3])), list(model.state_dict())

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(gm)
        return gm.forward

    call = torch_private.compiled_call(model, backend, before=lambda: seen.append("before"))
    assert torch.equal(model(torch.tensor([3])), wanted) and not seen
    torch_private.call_instead(model, call)
    assert torch.equal(model(torch.tensor([3])), wanted) and seen[0] == "before" and len(seen) == 2
    assert type(model) is Net and list(model.state_dict()) == keys and "forward" not in vars(model)
    model.eval()
    assert pickle.loads(pickle.dumps(model))._compiled_call_impl is None
    assert copy.deepcopy(model)._compiled_call_impl is None
    torch_private.call_instead(model, torch_private.call_after(lambda: seen.clear(), torch_private.plain_call(model)))
    assert torch.equal(model(torch.tensor([3])), wanted) and not seen
    torch_private.call_instead(model, None)
    assert model._compiled_call_impl is None


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

    given = {name for kwargs in traced.kwargs.values() for name in kwargs}
    declared = set(compile_fx._CompileFxKwargs.__annotations__)
    assert given | declared <= KNOWN and {"static_input_idxs", "is_backward"} <= declared


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
    found = [torch_private.grad_of_index(desc) for desc in descs]
    assert {names[i] for i in found if i is not None} == {"table.weight", "linear.weight", "linear.bias"}
    assert torch_private.input_index(None) is None and torch_private.grad_of_index(None) is None


@contract("donated_inputs apart_from_the_whole", "TracingContext.fw_metadata.bw_donated_idxs or output_strides")
def test_donated_inputs(traced: Traced) -> None:
    placeholders = [n for n in traced.graphs[True].graph.nodes if n.op == "placeholder"]
    assert traced.donated and all(0 <= i < len(placeholders) for i in traced.donated), "activations, which die here"
    assert traced.inside == [[99], None, traced.donated]
    assert torch_private.donated_inputs() == [], "outside of a compilation"


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
            found = compiled(args)
            emptied.append(not args)
            return found

        return torch_private.boxed(run)

    emptied: list[bool] = []
    a, b = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    with torch.no_grad():
        found = torch.compile(torch.mm, backend=backend)(a, b)  # an extern kernel: no C++ is compiled
    assert torch.equal(found, torch.mm(a, b)) and emptied == [True]
    sources = "".join(inspect.getsource(import_module(f"torch._inductor.{name}")) for name in ("compile_fx", "graph"))
    assert '"user_visible_output_idxs"' in sources and '"original_output_strides"' in sources, "nobody reads them"


@contract("adopt_strides", "FakeTensorProp.propagate_dont_convert_inputs or detect_fake_mode")
def test_values_learn_of_other_strides() -> None:
    with FakeTensorMode() as mode:
        x = torch.ones(2, 3, 4, 4)
        gm = make_fx(lambda x: torch.relu(x) + 1)(x)
        other = x.to(memory_format=torch.channels_last)
        assert mode is not None
        torch_private.adopt_strides(gm, [other])
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "call_function"]
    assert len(values) == 2 and all(v.stride() == other.stride() != x.stride() for v in values)


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
def test_instances_of_one_class_are_no_recompiles() -> None:
    """Dynamo compiles a function for more instances than its limit, which stays what it is, and other sizes of one
    instance count as ever."""

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
        torch.set_float32_matmul_precision("medium")
        assert not is_same()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(precision)
    assert is_same()


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
    found = files._MetadataUnpickler(io.BytesIO((tmp_path / ".metadata").read_bytes())).load()
    assert {"a", "b.c"} <= found.state_dict_metadata.keys()
