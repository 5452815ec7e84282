"""What zc relies on in profilers, autograd and optimizers; contract.py says what a contract is."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import contract
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from zc import torch_private

pytestmark = pytest.mark.check

aten = torch.ops.aten


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


@contract("copies_before_writes", "torch.autograd.graph._allow_mutation_on_saved_tensors_enabled")
def test_saved_tensors_are_copied_before_writes() -> None:
    weight, x = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    assert not torch_private.copies_before_writes()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert torch_private.copies_before_writes()
        loss = (weight * x).sum()
        with torch.no_grad():
            torch._foreach_mul_([weight], 3)
        loss.backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1] and not torch_private.copies_before_writes()


@contract("lacks_forward_mode", "torch.autograd.forward_ad")
def test_a_function_without_jvp_says_so() -> None:
    class NoJvp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError) as raised:
        NoJvp.apply(torch.autograd.forward_ad.make_dual(torch.ones(1), torch.ones(1)))
    assert torch_private.lacks_forward_mode(raised.value)
    assert not torch_private.lacks_forward_mode(NotImplementedError("of another kind"))


@contract("outside_of_func_transforms", "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
def test_a_write_inside_of_a_transform() -> None:
    kept = torch.zeros(2)

    def write(x: Tensor) -> Tensor:
        with torch_private.outside_of_func_transforms():
            kept.copy_(torch.ones(2))
        with pytest.raises(RuntimeError, match="would mutate a captured Tensor"):
            kept.copy_(torch.ones(2))
        return (x * kept).sum()

    assert torch.func.grad(write)(torch.ones(2)).equal(torch.ones(2)) and kept.equal(torch.ones(2))
    with torch_private.outside_of_func_transforms():
        kept.zero_()


class Reentrant(torch.autograd.Function):
    """Runs a backward in its backward, and ``Reentrant.look`` in both."""

    look: Callable[[], None]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Reentrant.look()
        inner = torch.ones(1, requires_grad=True)
        inner.register_hook(lambda _: Reentrant.look())
        with torch.enable_grad():
            inner.mul(2).sum().backward()
        return grad


@contract("outer_node", "every backward going through torch.autograd.graph._engine_run_backward")
def test_a_backward_inside_another_one() -> None:
    nodes: list[Any] = []
    Reentrant.look = lambda: nodes.append(torch_private.outer_node())
    Reentrant.look()
    output = Reentrant.apply(torch.ones(1, requires_grad=True))
    output.sum().backward()
    assert nodes == [None, None, output.grad_fn]


@contract("call_before_followers", "Node.register_prehook")
def test_a_call_where_the_outer_backward_goes_on() -> None:
    tasks: list[int] = []

    def look() -> None:
        tasks.append(torch_private.current_graph_task())
        node = torch_private.outer_node()
        if node is not None:
            torch_private.call_before_followers(node, lambda: tasks.append(torch_private.current_graph_task()))

    Reentrant.look = look
    x = torch.ones(1, requires_grad=True)
    output = Reentrant.apply(x.mul(2)).sum()
    for _ in range(2):  # the hook of the first one is gone
        tasks.clear()
        output.backward(retain_graph=True)
        outer, inner, after = tasks
        assert outer == after != inner


def in_backward(do: Callable[[], Any], *params: nn.Parameter, grad: bool = False) -> Any:
    """What ``do`` returns inside a backward to ``params``, or inside torch.autograd.grad."""
    seen: list[Any] = []
    total = torch.stack([p.sum() for p in params]).sum() * 1
    total.register_hook(lambda _: seen.append(do()))
    if grad:
        torch.autograd.grad(total, params)
    else:
        total.backward()
    return seen[0]


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
    assert torch_private.num_accumulate_hooks([param]) == [0]
    handle = param.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_private.num_accumulate_hooks([param]) == [1]
    handle.remove()
    assert torch_private.num_accumulate_hooks([param]) == [0]


@contract("needed_by_autograd", "torch._C._will_engine_execute_node, AccumulateGrad.variable or Tensor._backward_hooks")
def test_what_autograd_must_see() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))

    def kept(inputs: Sequence[nn.Parameter] | None = None, after: Callable[[], object] = int, **grad: Any) -> Any:
        """What autograd must see in a backward to ``inputs``, or in torch.autograd.grad. ``after``: the forward."""
        seen: list[frozenset[str]] = []

        class Compiled(torch.autograd.Function):  # as a compiled graph's node
            @staticmethod
            def forward(ctx: Any, *params: Tensor) -> Tensor:
                return torch.ones(1)

            @staticmethod
            def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
                seen.append(torch_private.needed_by_autograd({"a": a, "b": b, "c": nn.Parameter(torch.ones(1))}))
                return torch.zeros(2), torch.zeros(3), torch.zeros(2)

        total = Compiled.apply(a, b, a * 1)  # type: ignore[no-untyped-call]
        after()
        if grad:
            torch.autograd.grad(total, [a, b])
        else:
            total.backward(inputs=inputs)
        return seen[0] - {"c"} if "c" in seen[0] else "c is no input"

    assert kept() == frozenset()
    assert kept([a]) == {"b"}, "the backward does not reach b"
    assert kept(grad=True) == {"a", "b"}
    assert kept(after=lambda: a.requires_grad_(False)) == {"a"}
    a.requires_grad_()
    handle = a.register_hook(lambda g: g)
    assert kept() == {"a"}
    handle.remove()
    assert kept() == frozenset()
    node = torch.autograd.graph.get_gradient_edge(b).node
    assert kept() == frozenset(), "a node without hooks"
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        assert kept() == {"b"}
        handle.remove()
        assert kept() == frozenset()


@contract("compiled_autograd_is_on", "torch._dynamo.compiled_autograd's flags")
def test_compiled_autograd() -> None:
    from torch._dynamo import compiled_autograd

    assert not torch_private.compiled_autograd_is_on()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        assert torch_private.compiled_autograd_is_on()
    assert not torch_private.compiled_autograd_is_on()


@contract("surround_step", "torch's wrapper around step calling what values() of the hooks' dicts has")
@contract("has_step_pre_hooks", "Optimizer._optimizer_step_pre_hooks")
def test_order_of_step_hooks() -> None:
    """The three stand around all others, whose handles go on to remove them; ``step`` gets what the last has returned,
    and a class's super().step() on another object with hooks of its own runs none of these."""
    calls: list[Any] = []

    def hook(name: str) -> Any:
        return lambda *_: calls.append(name)

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            calls.append(type(closure).__name__)
            return super().step()

    torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)  # from now on its step is wrapped
    optimizer = Own([nn.Parameter(torch.ones(2))], lr=0.1)
    other = copy.copy(optimizer)
    early = optimizer.register_step_pre_hook(hook("early"))
    optimizer.register_step_post_hook(hook("post"))

    def last(optimizer: Any, args: Any, kwargs: Any) -> Any:
        calls.append("last")
        return (other, len), kwargs

    remove = torch_private.surround_step(optimizer, hook("begin"), last, hook("first"))
    late = optimizer.register_step_pre_hook(hook("late"))
    optimizer.step()
    assert calls == ["begin", "early", "late", "last", "builtin_function_or_method", "first", "post"]
    assert torch_private.has_step_pre_hooks(optimizer)
    early.remove()
    late.remove()
    assert not torch_private.has_step_pre_hooks(optimizer)
    remove()
    calls.clear()
    optimizer.step()
    assert calls == ["NoneType", "post", "post"], "torch runs them for super().step(), too"


@contract("without_global_step_hooks", "_global_optimizer_pre_hooks and _global_optimizer_post_hooks of torch.optim")
def test_hooks_of_all_optimizers() -> None:
    calls: list[str] = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    before = register_optimizer_step_pre_hook(lambda *_: calls.append("before"))
    after = register_optimizer_step_post_hook(lambda *_: calls.append("after"))
    try:
        with torch_private.without_global_step_hooks():
            optimizer.step()
        assert calls == []
        optimizer.step()
        assert calls == ["before", "after"]
    finally:
        before.remove()
        after.remove()


@contract("let_unscale_fp16", "GradScaler._unscale_grads_ and its allow_fp16")
def test_a_scaler_takes_fp16_gradients_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    scaler_class: Any = torch.amp.GradScaler
    monkeypatch.setattr(scaler_class, "_unscale_grads_", inspect.unwrap(scaler_class._unscale_grads_))
    ours, other = (torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.float16))], lr=0.1) for _ in range(2))
    torch_private.let_unscale_fp16(lambda optimizer: optimizer is ours)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for optimizer in (ours, other):
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2, dtype=torch.float16)
    scaler.unscale_(ours)
    assert ours.param_groups[0]["params"][0].grad.tolist() == [0.25, 0.25]
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_(other)


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
    assert torch_private.bare_copy(optimizer).extra is optimizer.extra  # type: ignore[attr-defined]
    copied: Any = torch_private.bare_copy(optimizer, copied=lambda _, items: {**items, "extra": [*items["extra"], 2]})
    assert type(copied) is Own and copied.extra == [1, 2] and optimizer.extra == [1]
    assert copied.param_groups == [] and not copied.state
    copied.param_groups = [{**optimizer.param_groups[0], "params": [other]}]
    other.grad = torch.ones(2)
    copied.step()
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
            absent = torch.ones(2)
            absent.untyped_storage().resize_(0)
            absent.view(2, 1)
            with pytest.raises(RuntimeError, match="would read a tensor whose storage is empty"):
                absent + 1
    finally:
        dist.destroy_process_group()
    assert len(seen) == 2 and "allreduce" in seen[0] and "allgather" in seen[1]


@contract("seeing_operators", "dispatch modes being called below autograd with the program's tensors, in its grad mode")
def test_operators_are_seen(tmp_path: Path) -> None:
    import torch.distributed as dist

    seen: list[tuple[str, bool, bool]] = []

    def call(name: str, args: Any, result: Any) -> None:
        tensors = [leaf for arg in args for leaf in (arg if isinstance(arg, list) else [arg])]
        requires = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tensors)
        seen.append((name, requires, torch.is_grad_enabled()))

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with torch_private.seeing_operators(call):
            own = torch.ones(2, requires_grad=True) * 2
            dist.all_gather([torch.ones(2)], own)
            dist.all_gather([torch.ones(2)], own.detach())
            with torch.no_grad():
                dist.all_gather([torch.ones(2)], own)
    finally:
        dist.destroy_process_group()
    assert ("aten::mul", True, True) in seen
    gathers = [(requires, enabled) for name, requires, enabled in seen if name.startswith("c10d::")]
    assert gathers == [(True, True), (False, True), (True, False)]


class _Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@contract("multiply_all_", "torch._foreach_mul_ taking one factor as a tensor")
def test_multiply_all() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]]), torch.empty(0)]
    torch_private.multiply_all_(tensors, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 1.0], [[1.5]], []]


@contract("unscale_", "torch._amp_foreach_non_finite_check_and_unscale_, which GradScaler calls")
def test_unscale() -> None:
    grads, found_inf = [torch.tensor([2.0, 4.0]), torch.tensor([6.0])], torch.zeros(1)
    torch_private.unscale_(grads, found_inf, torch.tensor([0.5]))
    assert [g.tolist() for g in grads] == [[1.0, 2.0], [3.0]] and found_inf.item() == 0
    torch_private.unscale_([torch.tensor([float("inf")])], found_inf, torch.tensor([0.5]))
    assert found_inf.item() == 1
    param = nn.Parameter(torch.ones(2))
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([param], lr=0.1)
    scaler.scale(param.sum()).backward()
    with _Watching() as watching:
        scaler.unscale_(optimizer)
    assert aten._amp_foreach_non_finite_check_and_unscale_.default in watching.seen


@contract("saved_tensors_are_copied", "torch._C._autograd._top_saved_tensors_default_hooks")
def test_hooks_on_saved_tensors_are_seen_but_those_of_checkpointing() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.saved_tensors_are_copied())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    look(x)
    with torch.autograd.graph.save_on_cpu():
        look(x)
        torch.utils.checkpoint.checkpoint(look, x, use_reentrant=False).sum().backward()
    assert seen == [False, True, False, False]


@contract("before_func_wraps", "torch._functorch's _wrap_for_grad, _wrap_functional_tensor, _add_batch_dim_impl")
def test_torch_func_asks_before_it_wraps_an_argument() -> None:
    class Watched(Tensor):
        pass

    asked: list[Any] = []
    torch_private.before_func_wraps(lambda tensor: asked.append(tensor), (Watched,))
    argument = torch.ones(2).as_subclass(Watched)
    for transform in (torch.func.vmap, torch.func.grad, torch.func.functionalize, torch.func.jacrev):
        before = len(asked)
        transform(lambda a: a.sum())(argument)
        assert len(asked) > before, transform
    assert all(each is argument for each in asked)
    gradients = torch.func.vmap(torch.func.grad(lambda a: a.pow(2).sum()))
    compiled = torch.compile(gradients, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2, 3)).equal(torch.full((2, 3), 2.0))
