"""What zc relies on in tensors, storages, modules and groups; contract.py says what a contract is."""

from __future__ import annotations

import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from contract import contract
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zc import torch_private
from zc.kernels import _private as kernels_private

pytestmark = pytest.mark.check

aten = torch.ops.aten


@contract("state_to_pickle", "torch.nn.Module.__getstate__")
def test_pickling_takes_a_modules_state_without_these_hooks() -> None:
    module = nn.Linear(2, 2)
    handles = [
        module.register_forward_pre_hook(print),
        module.register_state_dict_pre_hook(print),
        module.register_state_dict_post_hook(lambda *_: None),
        module.register_load_state_dict_pre_hook(print),
        module.register_load_state_dict_post_hook(print),
    ]
    other = module.register_forward_pre_hook(repr)
    state = torch_private.state_to_pickle(module, {handle.id for handle in handles})
    assert list(state["_forward_pre_hooks"]) == [other.id]
    assert not state["_state_dict_pre_hooks"] and not state["_state_dict_hooks"]
    assert not state["_load_state_dict_pre_hooks"] and not state["_load_state_dict_post_hooks"]
    assert state["_parameters"] is module._parameters
    assert len(module._forward_pre_hooks) == 2


@contract("caller_of_state_dict", "torch.nn.Module.state_dict runs its hooks itself")
def test_a_hook_learns_whose_code_asks_for_a_state() -> None:
    module, callers = nn.Sequential(nn.Linear(2, 2)), []
    module.register_state_dict_pre_hook(lambda *_: callers.append(torch_private.caller_of_state_dict()))
    module.state_dict()
    nn.ModuleList([module]).state_dict()
    assert callers == [__name__, nn.Module.__module__] and torch_private.caller_of_state_dict() == ""


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
    wrapper = torch_private.make_wrapper(_Wrapper, like)
    assert type(wrapper) is _Wrapper
    assert (wrapper.shape, wrapper.stride()) == (like.shape, like.stride())
    assert (wrapper.dtype, wrapper.device) == (like.dtype, like.device)
    assert torch_private.make_wrapper(_Wrapper, like, torch.bool).dtype == torch.bool


@contract("schema_of", "OpOverload._schema")
def test_the_arguments_of_a_function_of_aten() -> None:
    defaults, written = torch_private.schema_of(torch.ops.aten.addcmul_.default)
    assert defaults == {"self": None, "tensor1": None, "tensor2": None, "value": 1} and written == ("self",)
    assert torch_private.schema_of(torch.ops.aten.add.out)[1] == ("out",)
    assert torch_private.schema_of(torch.ops.aten.sum.default)[1] == ()


@contract("exact_norms", "norms are linalg_vector_norm and _foreach_norm")
@pytest.mark.parametrize("foreach", [True, False])
def test_norms_are_rounded_once(foreach: bool) -> None:
    """Outside, the norm of a million of them is 1e-5 off, and so is what is clipped by it."""
    param = nn.Parameter(torch.zeros(1 << 20))
    param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(0)) * 1e-4
    exact = float(param.grad.double().square().sum().sqrt())
    with torch_private.exact_norms():
        own = param.grad.norm()
        clipped = nn.utils.clip_grad_norm_([param], 1e-3, foreach=foreach)
    assert own.dtype == clipped.dtype == torch.float32 and own.shape == clipped.shape == ()
    assert [float(own), float(clipped)] == pytest.approx([exact, exact], rel=1e-7)


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


@contract("own_storage", "torch.utils.dlpack.to_dlpack and from_dlpack")
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
    """DLPack raises BufferError then, for a model on cuda:1 without torch.cuda.set_device, and in each thread of
    DCP's. And ``Tensor.__dlpack__`` knows no device that a package adds to torch."""
    current, plain = [0], torch.utils.dlpack.to_dlpack

    @contextlib.contextmanager
    def device_index(index: int | None) -> Iterator[None]:
        before, current[0] = current[0], 1
        yield
        current[0] = before

    def to_dlpack(tensor: Tensor) -> Any:
        if current[0] != 1:
            raise BufferError("Can't export tensors on a different CUDA device index. Expected: 1. Current device: 0.")
        return plain(tensor)

    def refuse(tensor: Tensor, **options: Any) -> None:
        raise ValueError("Unknown device type for Dlpack")

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(torch.utils.dlpack, "to_dlpack", to_dlpack)
    monkeypatch.setattr(Tensor, "__dlpack__", refuse)
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


@contract("is_saved", "Tensor._use_count")
def test_saved_by_a_graph() -> None:
    trains, frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)
    names = {"another name": trains, "and": frozen}
    x = torch.ones(4, requires_grad=True)
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not any(map(torch_private.is_saved, names.values()))
    for param in (trains, frozen):
        loss = (param * x).sum()
        view = param.detach()
        assert torch_private.is_saved(param)
        loss.backward()
        assert not torch_private.is_saved(param), "a backward frees what was saved; views and graphs are no such thing"
        assert view.data_ptr() == param.data_ptr() and loss.grad_fn is not None
    graph = trains.view(2, 2) * 2
    assert not torch_private.is_saved(trains) and graph.grad_fn is not None


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


@contract("tell_ddp told_ddp", "_ddp_params_and_buffers_to_ignore, which DDP's constructor reads")
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
        assert ignored == {"weight"} and torch_private.told_ddp(model) == ["weight"]
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


@contract("cut", "gloo's answer to a receive that times out, or ProcessGroup.recv")
def test_a_group_that_is_cut_lets_all_who_wait_go() -> None:
    """A receive, and a collective, which a thread of the group's own runs."""
    groups, store, seconds = dict[int, Any](), torch.distributed.HashStore(), timedelta(seconds=60)
    cpu, kind = torch.device("cpu"), torch.distributed.ProcessGroup.BackendType.GLOO

    def make(rank: int) -> None:
        group: Any = torch.distributed.ProcessGroup(store, rank, 2)
        group._register_backend(cpu, kind, torch.distributed.ProcessGroupGloo(store, rank, 2, seconds))
        groups[rank] = group

    making = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in making:
        thread.start()
    for thread in making:
        thread.join()
    ends: list[str] = []

    def wait(start: Callable[[], Any]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            ends.append(str(error))

    starts = [lambda: groups[0].recv([torch.empty(1)], 1, 1), lambda: groups[0].allreduce([torch.ones(3)])]
    waiting = [threading.Thread(target=wait, args=(start,), daemon=True) for start in starts]
    for thread in waiting:
        thread.start()
    torch_private.cut(groups[0])
    for thread in waiting:
        thread.join(20)
    assert len(ends) == 2, ends
    torch_private.cut(groups[0])  # nothing is open any more


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
        connection, is_own = torch_private.own_store()
        connection.set("a key", "a value")
        assert is_own and store.get("a key") == b"a value"
    monkeypatch.setattr(torch_private, "default_store", type("OfTheProgram", (torch.distributed.Store,), {}))
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


@contract("add_all_", "torch._foreach_add_")
def test_sums_in_place() -> None:
    to = [torch.ones(2), torch.ones(2, 2)]
    kernels_private.add_all_(to, [torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()])
    assert [t.tolist() for t in to] == [[2.0, 3.0], [[2.0, 4.0], [3.0, 5.0]]]


@contract("views_of", "torch._utils._unflatten_dense_tensors")
def test_views_one_after_another() -> None:
    flat = torch.arange(8.0)
    views = kernels_private.views_of(flat, [torch.empty(2, 3), torch.empty(2)])
    assert [v.tolist() for v in views] == [[[0, 1, 2], [3, 4, 5]], [6, 7]]
    assert all(v.untyped_storage().data_ptr() == flat.data_ptr() for v in views)


@contract("storage_number", "UntypedStorage._cdata")
def test_a_storage_without_bytes_is_still_one() -> None:
    tensor, other = torch.ones(4), torch.ones(4)
    tensor.untyped_storage().resize_(0)
    other.untyped_storage().resize_(0)
    assert torch_private.storage_number(tensor) == torch_private.storage_number(tensor.detach())
    assert torch_private.storage_number(tensor) != torch_private.storage_number(other)


@contract("tensors_in", "torch.utils._pytree.tree_leaves")
def test_leaves_of_nested_values() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert torch_private.tensors_in([a, {"b": (b, 3)}]) == [a, b, 3]


@contract("map_tensors", "torch.utils._pytree.tree_map_only")
def test_tensors_of_nested_values_are_exchanged() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert torch_private.map_tensors(torch.Tensor.numel, [a, {"b": (b, 3)}]) == [1, {"b": (2, 3)}]


@contract("hook_functions", "Tensor._backward_hooks, Tensor._post_accumulate_grad_hooks")
def test_what_a_subclass_is_asked_for_hooks() -> None:
    asked = []

    class Asked(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            with torch_private.without_torch_function():
                return func(*args, **(kwargs or {}))

    param = torch.nn.Parameter(torch.ones(2))
    param.__class__ = Asked
    param.register_post_accumulate_grad_hook(lambda p: None)
    param.register_hook(lambda grad: None)
    assert param._backward_hooks and asked and set(asked) <= torch_private.hook_functions()
