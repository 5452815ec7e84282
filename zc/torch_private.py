"""Every private torch API that zc uses, one function each, with what it relies on; imports nothing of zc.

Looked up in the sources of torch 2.11, 2.13 and 2.15. tests/torch_private has a contract test for each: where a new
torch breaks one, that test says which, in under a second.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import inspect
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._guards import CompileContext, TracingContext, detect_fake_mode
from torch.autograd.graph import Node
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

_T = TypeVar("_T", bound=torch.Tensor)
_F = TypeVar("_F", bound=Callable[..., Any])


# no need to ask what these do: they read no element
NO_VALUE = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in (
            "grad", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim", "nbytes",
            "is_cuda", "is_meta", "itemsize", "_version",
        )),
        *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(getattr(torch.Tensor, name) for name in (
            "size", "numel", "nelement", "dim", "stride", "storage_offset", "element_size", "is_contiguous",
            "is_floating_point", "is_complex", "get_device", "requires_grad_", "__len__",
        )),
        torch.is_tensor, torch.is_floating_point, torch.is_complex, torch.numel,
        *(getattr(torch, f"{name}_like") for name in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")),
        *(getattr(torch.Tensor, f"new_{name}") for name in ("zeros", "ones", "empty", "empty_strided", "full")),
        torch.Tensor.new_tensor,
    }
)  # fmt: skip
_NUMBERS = itertools.count()  # of the functions compiled in this process; none comes twice


def serve_optimizer_states(
    get: Callable[[nn.Module, Sequence[torch.optim.Optimizer], Any], Any],
    put: Callable[[nn.Module, Sequence[torch.optim.Optimizer], Any, Any], bool],
) -> None:
    """torch.distributed.checkpoint.state_dict gets optimizers' states from ``get(model, optimizers, options)``, and
    loads them with ``put(model, optimizers, state, options)``. Where these return None and False, torch does it itself.
    The first call of a process counts.

    Relies on all public functions there going through two of the module, ``_get_optim_state_dict`` and
    ``_load_optim_state_dict``, with options that have the fields of StateDictOptions (2.11 to 2.15).
    """
    from torch.distributed.checkpoint import state_dict as stock

    plain_get, plain_put = stock._get_optim_state_dict, stock._load_optim_state_dict
    if plain_get.__module__ == __name__:
        return

    def get_first(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], info: Any) -> Any:
        state = get(model, optimizers, info) if info.handle_optim else None
        return plain_get(model, optimizers, info) if state is None else state  # type: ignore[arg-type]

    def put_first(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state: Any, info: Any) -> None:
        if not info.handle_optim or not put(model, optimizers, state, info):
            plain_put(model, optimizers, state, info)  # type: ignore[arg-type]

    module: Any = stock
    module._get_optim_state_dict, module._load_optim_state_dict = get_first, put_first


def current_graph_task() -> int:
    """Id of the backward that runs in this thread, -1 outside of one. (torch._C: used by torch's own hooks since
    2.0.)"""
    return int(torch._C._current_graph_task_id())


def queue_callback(callback: Callable[[], None]) -> None:
    """Calls ``callback`` when the running backward ends without an error. (DDP and FSDP rely on the same call.)"""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def outer_node() -> Node | None:
    """The node of the outer backward that has called the one in this thread (reentrant checkpointing). None where no
    backward is around this one, or where no Python function has called it.

    Relies on every backward going through ``torch.autograd.graph._engine_run_backward``, and on every Python function's
    through ``BackwardCFunction.apply`` (2.11 to 2.15). Reads the locals of that frame alone: of a caller's, this would
    keep tensors alive.
    """
    applied = torch.autograd.function.BackwardCFunction.apply.__code__
    frame, is_outside = inspect.currentframe(), False
    while frame is not None:
        if is_outside and frame.f_code is applied:
            node: Node = frame.f_locals["self"]
            return node
        is_outside = is_outside or frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return None


def call_before_followers(node: Node, callback: Callable[[], None]) -> None:
    """Calls ``callback`` once, in the backward that runs ``node`` now, before the first of the nodes that follow it.

    Relies on ``Node.register_prehook``, also of a node that the running backward has yet to come to (2.11 to 2.15).
    """
    handles: list[RemovableHandle] = []

    def once(_: object) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        callback()

    for follower, _ in node.next_functions:
        if follower is not None:
            handles.append(follower.register_prehook(once))


def version(param: torch.Tensor) -> int:
    """How often autograd has seen ``param`` written in place. (``Tensor._version``, since torch 0.4.)"""
    return int(param._version)


def copies_before_writes() -> bool:
    """Whether torch copies what autograd has saved before a function writes it, as it does inside
    ``torch.autograd.graph.allow_mutation_on_saved_tensors()``. (A flag of that module's, 2.11 to 2.15.)"""
    return torch.autograd.graph._allow_mutation_on_saved_tensors_enabled


def num_accumulate_hooks(params: Iterable[torch.nn.Parameter]) -> list[int]:
    """Post-accumulate-grad hooks on each parameter: one call for all, since each backward asks.
    (``Tensor._post_accumulate_grad_hooks``, since 2.1.)"""
    return [len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) for param in params]


def needed_by_autograd(params: Mapping[str, torch.nn.Parameter]) -> frozenset[str]:
    """The parameters whose gradients the node that runs now, of a compiled backward, must return as PyTorch has them: a
    hook waits for one, or it is not added to ``param.grad``, under torch.autograd.grad and where
    ``backward(inputs=...)`` leaves it out.

    A hook on the node that adds to ``param.grad`` lives as long as somebody holds that node, and one who does holds its
    Python object: a node that this function alone holds is not asked.

    (``torch._C._will_engine_execute_node``, since 2.1; ``Tensor._backward_hooks``, a dict or None, since 0.4;
    ``RemovableHandle.hooks_dict_ref``, since 0.4; ``torch._C._current_autograd_node``, ``AccumulateGrad.variable``,
    2.11 to 2.15.)
    """
    nodes = _leaves_below(torch._C._current_autograd_node())
    own = {name: nodes.pop(id(param)) for name, param in params.items() if id(param) in nodes}
    free = {name for name, runs in zip(own, _which_run(own.values()), strict=True) if runs}
    with without_torch_function():  # faster: parameters may be watched. One may have been frozen since the forward
        free = {name for name in free if (param := params[name]).requires_grad and not param._backward_hooks}
    counts = list(map(sys.getrefcount, own.values()))  # two loops in C, as each backward asks for all parameters
    if counts.count(_count_alone()) < len(counts):
        by_name = zip(own.items(), counts, strict=True)
        free -= {name for (name, node), count in by_name if count > _count_alone() and _has_hooks(node)}
    return frozenset(params.keys() - free)


def _leaves_below(node: Any) -> dict[int, Any]:
    """Of the parameters that this node of the graph has for inputs, by id: the nodes that add to their ``.grad``."""
    leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined, unused-ignore]
    return {id(below.variable): below for below, _ in node.next_functions if isinstance(below, leaf)}


@functools.cache
def _count_alone() -> int:
    """The reference count of a node that a dict and a graph alone hold. (A graph counts as one, in 2.13.)"""
    param = torch.zeros(1, requires_grad=True, device="cpu")
    with torch.enable_grad():
        graph = param * 1
    count = next(map(sys.getrefcount, _leaves_below(graph.grad_fn).values()))
    del graph  # until here it lives
    return count


def _has_hooks(node: Any) -> bool:
    """Whether hooks are registered on a node of the graph. A new handle knows the dict of them all."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _which_run(nodes: Collection[Any]) -> list[bool]:
    """Whether the running backward runs each of these nodes. A loop in C: each backward asks for all parameters."""
    try:
        return list(map(torch._C._will_engine_execute_node, nodes))  # type: ignore[attr-defined, unused-ignore]
    except RuntimeError:  # for one of them
        return [_runs(node) for node in nodes]


def _runs(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined, unused-ignore]
    except RuntimeError:  # torch.autograd.grad has asked for this very gradient
        return False


def make_wrapper(
    cls: type[_T], like: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> _T:
    """A tensor subclass's instance with the sizes of ``like``, its dtype and device unless others are given, and no
    storage. (DTensor is made this way.)"""
    wrapper: _T = torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=dtype or like.dtype, device=device or like.device
    )
    return wrapper


@functools.cache
def schema_of(func: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The arguments of an overload of aten in their order, with their defaults, and those that it writes.

    Relies on ``OpOverload._schema`` (2.11 to 2.15), which torch's own dispatch modes read.
    """
    arguments = func._schema.arguments
    written = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return {a.name: a.default_value for a in arguments}, written


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Inside, a subclass's ``__torch_function__`` is not called (torch's notes on extending it name this class; 2.11 to
    2.15)."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def own_storage(part: torch.Tensor) -> torch.Tensor:
    """The memory of ``part``, 1-D and contiguous, under a storage of its own that has no other element. Code that tells
    tensors apart by their storage, or saves a tensor with its whole storage, then sees this part alone.

    Relies on ``from_dlpack`` making a new storage, whose deleter holds ``part``, so the memory lives as long as either
    (the standard's ownership; 2.11 to 2.15). ``Tensor.__dlpack__`` refuses a tensor of a CUDA device that is not the
    current one, and one of a device that a package adds to torch: ``to_dlpack`` takes all. The tensor is passed as
    bytes, because DLPack lacks some dtypes.
    """
    with torch.accelerator.device_index(None if part.device.type == "cpu" else part.device.index):
        capsule = torch.utils.dlpack.to_dlpack(part.detach().view(torch.uint8))  # type: ignore[attr-defined]
        content: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return content.view(part.dtype)


def tensors_in(values: object) -> list[Any]:
    """The leaves of nested lists, tuples, dicts and registered classes. (``torch.utils._pytree.tree_leaves``, 2.11 to
    2.15.)"""
    return _pytree.tree_leaves(values)


def map_tensors(function: Callable[[torch.Tensor], object], values: object) -> Any:
    """The same nested lists, tuples, dicts and registered classes, with ``function`` of each tensor in its place.
    (``torch.utils._pytree.tree_map_only``, 2.11 to 2.15.)"""
    return _pytree.tree_map_only(torch.Tensor, function, values)


def hook_functions() -> frozenset[Any]:
    """The functions that ``__torch_function__`` gets when code reads or sets a tensor's hooks.
    (``Tensor._backward_hooks`` and ``Tensor._post_accumulate_grad_hooks``, 2.11 to 2.15.)"""
    of_class: Any = torch.Tensor
    attributes = of_class._backward_hooks, of_class._post_accumulate_grad_hooks
    accessors = [accessor for each in attributes for accessor in (each.__get__, each.__set__)]
    return frozenset([*accessors, of_class.register_hook, of_class.register_post_accumulate_grad_hook])


def lacks_forward_mode(error: NotImplementedError) -> bool:
    """Whether dual numbers met an autograd function without a ``jvp``, such as all of AOTAutograd's. (The text of the
    error in torch/csrc/autograd/custom_function.cpp, 2.11 to 2.15.)"""
    return "implement the jvp function" in str(error)


def outside_of_func_transforms() -> contextlib.AbstractContextManager[object]:
    """Inside, no grad, jvp or vmap of torch.func runs: they refuse writes to tensors that they do not know.
    (torch._functorch.pyfunctorch: what torch itself uses to look at tensors inside of a transform; 2.11 to 2.15.)"""
    from torch._functorch import pyfunctorch

    context: contextlib.AbstractContextManager[object] = pyfunctorch.temporarily_clear_interpreter_stack()
    return context


def storage_number(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage, while it lives, whether or not it has bytes. (``UntypedStorage._cdata``,
    the address of the C++ object, 2.11 to 2.15.)"""
    with without_torch_function():
        return int(tensor.untyped_storage()._cdata)


def num_sharing(tensor: torch.Tensor) -> int:
    """How many tensors, arrays and the like hold the storage of ``tensor``, itself and one more counted. (torch._C:
    what torch's CUDA-graph trees ask before they reuse memory; 2.11 to 2.15.)"""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def is_saved(param: torch.nn.Parameter) -> bool:
    """Whether an autograd graph has saved ``param`` itself, not a view of it, for a backward that has not freed it.

    Relies on ``Tensor._use_count``, the references of C++: one for all of Python's, one of the node that accumulates
    its gradient, and one for each operation that has saved it (2.11 to 2.15).
    """
    with torch.inference_mode(False), without_torch_function():
        node = torch.autograd.graph.get_gradient_edge(param).node if param.requires_grad else None
        return bool(param._use_count() > 1 + (node is not None))  # type: ignore[attr-defined, unused-ignore]


_CUT_TAG = 0x7A64  # of a receive that no rank answers


def default_store() -> Any:
    """The store of the default process group: torchrun's agent holds it, so it outlives a rank. (FSDP's and
    torch.distributed.checkpoint's own tests and elastic code take it the same way; 2.11 to 2.15.)"""
    return torch.distributed.distributed_c10d._get_default_store()


def own_store() -> tuple[Any, bool]:
    """`default_store` through a connection of its own, and True: a wait for a key blocks all others of its client. A
    store that can't do that comes as it is, with False. (``Store.clone``, which ProcessGroupNCCL's own threads use.)"""
    store = default_store()
    try:
        return store.clone(), True
    except RuntimeError:  # a class in Python without the method
        return store, False


def new_group(
    ranks: Sequence[int],
    backend: str,
    name: str,
    timeout: timedelta | None = None,
    *,
    high_priority: bool = False,
    like: torch.distributed.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> torch.distributed.ProcessGroup:
    """A process group of ``ranks`` under ``name``; only its members call it.

    ``timeout``: None means the backend's own. With NCCL, ``high_priority`` runs its kernels before others that wait,
    ``like`` is the group whose NCCL configuration it copies, and ``device`` the one that its tensors will be on.

    torch.distributed.new_group takes no name. With ``use_local_synchronization`` it derives one from the number of
    groups, so a name comes back after a group was closed, and the store still has the old addresses under it.
    (``_new_process_group_helper``, ``_world.pg_group_ranks``: frameworks that add workers to a running program use
    them; 2.11 to 2.15.) If the default group is bound to a device, torch splits a new NCCL group from it, and all its
    ranks must call that. A group of some ranks is therefore made as if nothing were bound.
    (``ProcessGroup.bound_device_id``, which torch sets; ``ProcessGroupNCCL.Options`` and its ``config``.)

    Since 2.15 ``nccl`` is ProcessGroupNCCL2, with the same options. It binds each group to a device when it makes it,
    and without one guesses it by the rank. (``_nccl2_device``, ``device_id`` of the helper.)
    """
    from torch.distributed import distributed_c10d as c10d

    group: torch.distributed.ProcessGroup
    rank, chosen = ranks.index(torch.distributed.get_rank()), torch.distributed.Backend(backend)
    make: Any = c10d._new_process_group_helper
    options: dict[str, Any] = {"timeout": timeout or c10d._get_default_timeout(chosen)}
    if high_priority and chosen == "nccl":
        options["backend_options"] = of_nccl = c10d.ProcessGroupNCCL.Options()
        of_nccl.is_high_priority_stream, of_nccl._timeout = True, options["timeout"]
        config = getattr(_backend_options(like, "cuda"), "config", None)
        if config is not None:
            of_nccl.config = config
    default: Any = c10d._get_default_group()
    bound = default.bound_device_id
    if chosen == "nccl" and hasattr(c10d, "_nccl2_device"):
        options["device_id"] = device or bound
    try:
        if len(ranks) < default.size():
            default.bound_device_id = None
        group, _ = make(len(ranks), rank, list(ranks), chosen, default_store(), name, **options)
    finally:
        default.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {member: k for k, member in enumerate(ranks)}
    return group


def cut(group: torch.distributed.ProcessGroup) -> bool:
    """Ends, with an error, every wait of this process in ``group``, if its backend for host memory is gloo. The group
    can't be used any more. Waits for some milliseconds itself. Returns whether all of the group is gloo's, so that its
    end waits for nothing.

    gloo's works have no abort, and ``ProcessGroup.abort`` does nothing there. Relies on gloo, which closes the
    connections of a group in which a receive has timed out (``UnboundBuffer::waitRecv`` of its TCP transport), and on
    ``ProcessGroup.recv``, which also takes a group that the program has destroyed (``ProcessGroup._get_backend``,
    ``Backend.name``; 2.11 to 2.15). With ``TORCH_GLOO_LAZY_INIT`` a receive may wait for a connection that its rank
    never makes, so nothing is cut.
    """
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none
        return False
    if backend.name() != "gloo" or os.environ.get("TORCH_GLOO_LAZY_INIT") == "1":
        return False
    for peer in range(group.size()):
        if peer != group.rank():
            # RuntimeError: the time is over, and that cuts; or the connection to this rank is closed already
            with contextlib.suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                group.recv([nothing], peer, _CUT_TAG).wait(timedelta(milliseconds=1))
    return all(group._get_backend(device).name() == "gloo" for device in group._device_types)


def timeout_of(group: torch.distributed.ProcessGroup, device_type: str) -> timedelta | None:
    """The timeout of ``group`` for collectives of such tensors; None where its backend does not say.
    (``ProcessGroup._get_backend``, the backends' ``options._timeout``, which torch sets; 2.11 to 2.15.)"""
    timeout = getattr(_backend_options(group, device_type), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def _backend_options(group: torch.distributed.ProcessGroup | None, device_type: str) -> Any:
    """None without a group, and for a backend that has no options, as one that a program has registered may."""
    try:
        return None if group is None else group._get_backend(torch.device(device_type)).options
    except (AttributeError, RuntimeError):
        return None


def compile_id() -> str:
    """Dynamo's id of the graph that is being compiled, frame / how often that frame was compiled before."""
    current = CompileContext.current_compile_id()
    return f"{current.frame_id}/{current.frame_compile_id}" if current is not None else "?"


SKIPPED = "skipped frames"


def graph_breaks() -> dict[str, int]:
    """Why Dynamo broke graphs in this process, and how often; under `SKIPPED` the frames that it left uncompiled.

    Relies on ``torch._dynamo.utils.counters``, which TORCH_LOGS and Dynamo's own tests read (2.11 to 2.15).
    """
    from torch._dynamo.utils import counters

    breaks = counters["graph_break"].items()
    times_of = {str(reason): int(times) for reason, times in breaks if BLOCK not in str(reason)}
    frames = counters["frames"]
    if frames["total"] > frames["ok"]:
        times_of[SKIPPED] = int(frames["total"] - frames["ok"])
    return times_of


@contextlib.contextmanager
def before_compiling(call: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
    """Inside, ``call()`` runs before Dynamo compiles a frame in this thread, and ``after()`` after it, before that code
    runs. What one of them raises ends the compilation.

    Relies on ``torch._dynamo.callback``, whose callbacks run around the compilation of a frame, also one that fails,
    and on its count of compilations under way (``__pending_callbacks_counter``). An end callback that raises leaves
    that count one too high: no later compilation of the process would call back, and ``torch._dynamo.reset`` would
    raise. (2.11 to 2.15.)
    """
    from torch._dynamo.callback import callback_handler

    thread = threading.get_ident()

    def start() -> None:
        if threading.get_ident() == thread:
            call()

    def end() -> None:
        try:
            if threading.get_ident() == thread:
                after()
        except BaseException:
            vars(callback_handler)["_CompilationCallbackHandler__pending_callbacks_counter"] -= 1
            raise

    first = callback_handler.register_start_callback(lambda _: start())
    last = callback_handler.register_end_callback(lambda _: end())
    try:
        yield
    finally:
        callback_handler.remove_start_callback(first)
        callback_handler.remove_end_callback(last)


def saved_tensors_are_copied() -> bool:
    """Whether hooks of the caller's may read what autograd saves now. Those of activation checkpointing read nothing.

    Relies on ``torch._C._autograd._top_saved_tensors_default_hooks``, of which autograd applies the innermost pair
    alone, and on checkpointing's hooks being defined in ``torch.utils.checkpoint`` (2.11 to 2.15).
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint"


def class_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``Module._call_impl`` of the module's class, whatever `set_call` has set."""
    return type(module)._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]


def object_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``Module._call_impl``: the forward with its hooks, or what `set_call` has set (2.11 to 2.15)."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


_MOST_FORWARDS = 8  # of a class, whose graphs are kept: as many as Dynamo keeps of one function


def compiled_call(
    call: Callable[..., Any], backend: Callable[..., Any], *, dynamic: bool | None = None, fullgraph: bool = False
) -> Callable[..., Any]:
    """``call(module, *args, **kwargs)``, `class_call` or `object_call`, under torch.compile, for modules of one class.

    ``model.compile()`` does not do: Dynamo skips the forward of torch.nn's own classes (a bare nn.Sequential), and
    silently compiles nothing. It inlines a forward that a function outside of torch calls.

    Dynamo keeps compiled graphs and their number by code object, and the sizes that it has seen by the file, line and
    name of one (``pgo.CodeId``). Each result has a code object and a name of its own; otherwise the second model's
    sizes would be dynamic sizes of the first. It has one for each forward that the class has had: Dynamo inlines it and
    guards a forward that is set on the module, but not the class's own (2.11 to 2.15).

    Dynamo wraps what a backend or a callback of `before_compiling` raises; an error that the backend's own package
    defines comes through as it is. (``BackendCompilerFailed.inner_exception``, and the context of an
    ``InternalTorchDynamoError``, which is raised "from None"; 2.11 to 2.15.)
    """
    from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError

    def compile_anew() -> Callable[..., Any]:
        code = call.__code__.replace(co_name=f"call_{next(_NUMBERS)}")
        copied = types.FunctionType(code, call.__globals__, code.co_name, call.__defaults__, call.__closure__)
        return torch.compile(copied, backend=backend, dynamic=dynamic, fullgraph=fullgraph)

    own = backend.__module__.partition(".")[0]
    compiled, forward = compile_anew(), None
    by_forward: dict[int, tuple[object, Callable[..., Any]]] = {}  # by the id of one that the entry keeps alive

    def choose(now: object) -> None:
        """``compiled`` is of this forward, which the class has now."""
        nonlocal compiled, forward
        if id(now) not in by_forward:
            if len(by_forward) == _MOST_FORWARDS:
                del by_forward[next(iter(by_forward))]
            by_forward[id(now)] = now, compile_anew() if by_forward else compiled
        forward, compiled = by_forward[id(now)]

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # the caller's torch.compile around the model goes through
            now = next(vars(base)["forward"] for base in type(module).__mro__ if "forward" in vars(base))
            if now is not forward:
                choose(now)
        try:
            return compiled(module, *args, **kwargs)
        except (BackendCompilerFailed, InternalTorchDynamoError) as failed:
            error = failed.inner_exception if isinstance(failed, BackendCompilerFailed) else failed.__context__
            if error is not None and type(error).__module__.partition(".")[0] == own:
                raise error from None
            raise

    return run


BLOCK = "zc compiles this block on its own"  # why Dynamo leaves it out of the graph around it


def set_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """``module(...)`` calls ``call``, for this module object alone, also where Dynamo traces the call. (Both ask the
    object for ``_call_impl``, 2.11 to 2.15; Dynamo does not look at ``_compiled_call_impl``.)"""
    vars(module)["_call_impl"] = call


def places_of_params(module: nn.Module) -> list[tuple[dict[str, Any], str, nn.Parameter]]:
    """Where a module and its children have their parameters: a dict, the name in it, and the parameter.
    (``Module._parameters``, in which torch.func.functional_call puts others, 1.0 to 2.15.)"""
    return [
        (child._parameters, name, param)
        for child in module.modules()
        for name, param in child._parameters.items()
        if param is not None
    ]


def registered_in(model: nn.Module) -> list[dict[str, Any]]:
    """The dicts in which a module and its children have children and parameters by name, without empty ones.
    (``Module._modules`` and ``Module._parameters``, each one object for the module's life; 1.0 to 2.15. Those of a
    ScriptModule are no dicts, and left out.)"""
    dicts = (part for module in model.modules() for part in (module._modules, module._parameters))
    return [part for part in dicts if part and isinstance(part, dict)]


@functools.cache
def before_func_wraps(ask: Callable[[Any], None], classes: tuple[type, ...]) -> None:
    """From now on ``ask(tensor)`` is called before torch.func (``vmap``, ``grad``, ...) wraps an argument of one of
    these classes. What is done with the wrapper reads its memory, and asks no ``__torch_function__``.

    Relies on the C functions that wrap, as ``torch._functorch.eager_transforms`` and ``torch._functorch.predispatch``
    find them among their globals. Dynamo goes through what stands in their places (2.11 to 2.15).
    """
    from torch._functorch import eager_transforms, predispatch

    def asking(wrap: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(tensor: Any, *args: Any) -> Any:
            if type(tensor) in classes:
                ask(tensor)
            return wrap(tensor, *args)

        return wrapped

    for module, name in (
        (eager_transforms, "_wrap_for_grad"),
        (eager_transforms, "_wrap_functional_tensor"),
        (predispatch, "_add_batch_dim_impl"),
    ):
        setattr(module, name, asking(vars(module)[name]))


def not_compiled_alone(function: _F) -> _F:
    """Dynamo does not compile a call of ``function`` as a frame of its own, as it does with each call inside a frame
    that it skips. Where it traces a caller, it goes through as ever. (``torch._dynamo.decorators.skip_code``, which
    leaves inlining alone; 2.11 to 2.15.)"""
    from torch._dynamo import decorators

    skip_code: Any = vars(decorators)["skip_code"]
    skip_code(function.__code__)
    return function


def only_eager(action: Callable[[nn.Module], None]) -> Callable[..., None]:
    """A hook on modules that calls ``action(module)`` where the module runs eagerly, and is nothing where Dynamo traces
    it. Compiled as a frame of its own it would do nothing, since `torch.compiler.is_compiling` is True there."""
    act = torch.compiler.disable(action)  # type: ignore[no-untyped-call]

    def hook(module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            act(module)

    return not_compiled_alone(hook)


def is_fake_quant(module: nn.Module) -> bool:
    """Whether it is one of torch's observers or fake quantizers, which have no parameter. Dynamo skips their forwards,
    but compiles one that has a hook. That fails, since it resizes a buffer ("size of tensor a (0) must match"). So they
    get no hook of ours. (``torch.ao.quantization``, in Dynamo's MOD_SKIPLIST; 2.11 to 2.15.)"""
    return type(module).__module__.startswith("torch.ao.quantization.")


def state_to_pickle(module: nn.Module, hooks: Collection[int]) -> dict[str, Any]:
    """The state that pickling writes of ``module``, without the hooks of these handles. (``Module.__getstate__``, and
    ``RemovableHandle.id``, the key of a hook in the module's dicts of them; 2.11 to 2.15.)"""
    state: dict[str, Any] = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
    loads = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    for name in ("_forward_pre_hooks", "_state_dict_pre_hooks", "_state_dict_hooks", *loads):
        state[name] = type(state[name])((key, hook) for key, hook in state[name].items() if key not in hooks)
    return state


def caller_of_state_dict() -> str:
    """The module whose code called ``Module.state_dict``; asked in one of its hooks. "" outside of any. (It runs its
    hooks itself; 2.11 to 2.15.)"""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not torch.nn.Module.state_dict.__code__:
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    return "" if caller is None else str(caller.f_globals.get("__name__", ""))


def call_instead(model: nn.Module, call: Callable[..., Any] | None) -> None:
    """``model(...)`` is ``call(...)`` from now on; class, state_dict's keys and ``model.forward`` stay. None restores
    the model's own call. Copies and pickles of the module have their own. (``Module._compiled_call_impl``,
    which ``Module.__call__`` prefers and pickling leaves out; 2.11 to 2.15.)"""
    model._compiled_call_impl = call


def set_apply(module: nn.Module, call: Callable[..., nn.Module]) -> None:
    """``module.to(...)``, ``.half()``, ``.cpu()`` and whatever else applies a function to each tensor of a module calls
    ``call(function, recurse=True)``, for this module object alone. (``Module._apply``, read of the object, since 0.4.)
    """
    vars(module)["_apply"] = call


def plain_apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> nn.Module:
    """``Module._apply`` of the module's class, whatever `set_apply` has set."""
    return type(module)._apply(module, function, recurse)  # type: ignore[no-any-return, no-untyped-call]


def tell_ddp(module: nn.Module, names: Iterable[str]) -> None:
    """DistributedDataParallel's constructor ignores ``names``; it iterates over them before it changes anything.
    (``_ddp_params_and_buffers_to_ignore``, which it reads of the module since 1.7.)"""
    vars(module)["_ddp_params_and_buffers_to_ignore"] = names


def told_ddp(module: nn.Module) -> Iterable[str]:
    """What `tell_ddp` or the program has told it; empty for nothing."""
    names: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return names


def guard_identity(gm: fx.GraphModule, names: Sequence[str | None]) -> None:
    """Without it one compiled graph may serve several module instances. Ours belongs to the very parameters in
    ``names``, and so do the modules through which the compiled function reaches them.

    Dynamo compiles a function at most ``recompile_limit`` times for the same modules among its local variables, as long
    as it guards their identity (torch/_dynamo/cache_size.py). Many instances of one class are then no recompiles.

    Relies on ``meta["grapharg"].source`` of Dynamo's placeholders. Its chain of ``base`` ends at the local variable,
    below an UnspecializedNNModuleSource if that is a module. Relies also on the guards being open while the backend
    runs (TracingContext.guards_context). All as in 2.11 to 2.15.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import LocalSource, UnspecializedNNModuleSource
    _print_no_elements()
    guards = TracingContext.get().guards_context.dynamo_guards
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, names, strict=True):
        if name is None:
            continue
        source = node.meta["grapharg"].source
        guards.add(source.make_guard(GuardBuilder.ID_MATCH))
        while (base := getattr(source, "base", None)) is not None:
            if isinstance(source, UnspecializedNNModuleSource) and isinstance(base, LocalSource):
                guards.add(base.make_guard(GuardBuilder.ID_MATCH))
            source = base


@functools.cache
def _print_no_elements() -> None:
    """Up to 2.12 the text of an ID_MATCH guard has the ``repr`` of its object: of a parameter all elements, also of one
    that has no bytes in stage 3, which ends the process.

    Relies on ``id_match_unchecked`` looking ``repr`` up in its module (2.11, 2.12; 2.13 has the type's).
    """
    from torch._dynamo import guards

    def without_elements(value: object) -> str:
        return f"<{type(value).__name__}>" if isinstance(value, torch.Tensor) else repr(value)

    if "repr" in guards.GuardBuilder.id_match_unchecked.__code__.co_names:
        vars(guards)["repr"] = without_elements


def guard_requires_grad(gm: fx.GraphModule) -> None:
    """The graph that is being compiled runs only while each parameter that it reads is frozen, or trains, as now. torch
    2.11 skips guards on tensors of a module whose dicts have not changed, so a layer that is thawed got no gradient.

    Relies on ``meta["grapharg"]`` and on open guards, as `guard_identity` does; guards on attributes are not skipped.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    if torch.__version__ >= "2.12":
        return
    guards = TracingContext.get().guards_context.dynamo_guards
    for node in gm.graph.find_nodes(op="placeholder"):
        read = node.meta.get("grapharg")
        if read is not None and isinstance(read.example, nn.Parameter):
            guards.add(AttrSource(read.source, "requires_grad").make_guard(GuardBuilder.CONSTANT_MATCH))


def guard_absent_hooks() -> None:
    """The graph that is being compiled runs only for modules without hooks where it was traced without. By default
    Dynamo guards no empty dict of hooks, so one that comes later, or is on another block of a kind, would never run.

    Relies on an ``EMPTY_NN_MODULE_HOOKS_DICT`` guard for each such dict, which adds nothing while
    ``torch._dynamo.config.skip_nnmodule_hook_guards`` is set; on a guard, of their type alone, for the dicts of hooks
    of all modules, the attributes ``_global_..._hooks`` of ``torch.nn.modules.module``; and on the guards being open
    (2.11 to 2.15), as `guard_identity` does.
    """
    from torch._dynamo.guards import GuardBuilder
    guards = TracingContext.get().guards_context.dynamo_guards
    for guard in list(guards):
        source = guard.originating_source
        is_of_all = getattr(source, "member", "").startswith("_global_")
        if guard.create_fn is GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT or is_of_all:
            guards.add(source.make_guard(GuardBuilder.SEQUENCE_LENGTH))


def apply_strides(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Inductor may give a saved activation other strides than it was traced with (channels last around convolutions).
    AOTAutograd hands them in with ``example_inputs``; the graph's own values learn of them here, before it is cut into
    segments, each of which asserts the strides of its inputs.

    A view was traced for the old strides and may not exist for the new ones: those become copies, as Inductor has it.
    The others stay views, which share memory (`mark_storages`, write_in_place).

    Relies on AOTAutograd restriding the example inputs by what the compiled forward reports, and else passing the
    placeholders' own values; on ``view_to_reshape`` and ``fake_tensor_prop``, by which compile_fx does the same to a
    whole graph (2.11 to 2.15).
    """
    from torch._inductor.compile_fx import fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if all(node.meta.get("val") is value for node, value in zip(placeholders, example_inputs, strict=True)):
        return
    views = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    view_to_reshape(gm)  # type: ignore[no-untyped-call]
    fake_tensor_prop(gm, example_inputs)
    for node in views:
        if storage_of(node) == storage_of(node.args[0]):
            node.target = torch.ops.aten.view.default


def inline_regions(gm: fx.GraphModule) -> bool:
    """Puts the operations of each region (``torch.compiler.nested_compile_region``) in the place of its call. Returns
    whether there was one.

    A region's call hides that some of its results are one tensor, or views of what it gets (``(tanh, tanh, x.t())``):
    Inductor writes into one and reads the other (2.13), and AOTAutograd takes both for the backward's to overwrite.

    Relies on ``invoke_subgraph(subgraph, identifier, *operands)``, whose first argument is a ``get_attr`` (2.13).
    """
    regions = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    for call in regions:
        inner: Any = getattr(gm, call.args[0].target)
        inline_regions(inner)
        operands, copies = iter(call.args[2:]), dict[fx.Node, Any]()
        with gm.graph.inserting_before(call):
            for node in inner.graph.nodes:
                if node.op == "placeholder":
                    copies[node] = next(operands)
                elif node.op != "output":
                    copies[node] = copied = gm.graph.node_copy(node, copies.__getitem__)
                    if node.op == "get_attr":
                        copied.target = f"{call.name}_{node.target}"
                        setattr(gm, copied.target, getattr(inner, str(node.target)))
                    else:
                        _value_anew(copied)
        results = fx.map_arg(inner.graph.output_node().args[0], copies.__getitem__)
        for item in list(call.users):
            result = results[item.args[1]]
            for user in list(item.users):
                swap = functools.partial(_swapped, item, result)
                user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), swap)
            gm.graph.erase_node(item)
        gm.graph.erase_node(call)
    return bool(regions)


def _swapped(old: fx.Node, new: Any, node: fx.Node) -> Any:
    return new if node is old else node


def _value_anew(node: fx.Node) -> None:
    """``meta["val"]`` of an operation, from the values that it reads: it shares their storages where it is a view."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    mode = detect_fake_mode([used.meta["val"] for used in node.all_input_nodes])
    if mode is not None and isinstance(node.target, torch._ops.OpOverload):
        with mode:
            node.meta = {**node.meta, "val": node.target(*args, **kwargs)}


def storage_of(node: fx.Node) -> int | None:
    """`storage_number` of a node's value, which may be fake; None: it has no storage."""
    val = node.meta.get("val")
    return storage_number(val) if isinstance(val, torch.Tensor) and val.layout == torch.strided else None


def take_donated_inputs() -> list[int]:
    """Positions among the backward's inputs of those that it may overwrite. AOTAutograd is told that there are none,
    and so lets backward(retain_graph=True) through: the caller sees to it that such a backward overwrites none.

    Relies on ``TracingContext.fw_metadata.bw_donated_idxs``, which AOTAutograd empties itself where the first backward
    keeps the graph (2.11 to 2.15).
    """
    metadata = forward_metadata()
    if metadata is None:
        return []
    donated, metadata.bw_donated_idxs = list(metadata.bw_donated_idxs or ()), []
    return donated


def keeps_graph() -> bool:
    """Inside a backward: whether it was called with retain_graph=True or create_graph=True.
    (``torch._C._autograd._get_current_graph_task_keep_graph``, 2.11 to 2.15.)"""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def before_double_backward(call: Callable[[], None]) -> bool:
    """Calls ``call`` before autograd differentiates the compiled backward that runs now, which AOTAutograd refuses. To
    be called inside it, if it keeps its graph. Returns whether that may come: whether it runs with ``create_graph``.

    Relies on AOTAutograd running a backward with ``create_graph`` in the forward of an autograd function, whose node is
    its local variable ``double_ctx`` (2.11 to 2.15).
    """
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_name != "forward" or "double_ctx" not in frame.f_code.co_varnames):
        frame = frame.f_back
    if frame is None:
        return False
    frame.f_locals["double_ctx"].register_prehook(lambda _: call())
    return True


def forward_metadata() -> Any:
    """AOTAutograd's metadata of the forward that is compiled, or None. (``TracingContext.fw_metadata``, 2.11 to
    2.15.)"""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


@contextlib.contextmanager
def with_forward_metadata(metadata: Any) -> Iterator[None]:
    """Inside, `forward_metadata` is this: for a graph out of AOTAutograd's cache, which sets none."""
    context = TracingContext.get()
    before, context.fw_metadata = context.fw_metadata, metadata
    try:
        yield
    finally:
        context.fw_metadata = before


def written_inputs() -> list[int]:
    """Positions among the inputs of a backend's graph that the graph writes in place, inside an inner compiler.

    Relies on ``TracingContext.fw_metadata.input_info[i].mutates_data`` and ``mutates_storage_metadata`` (``param.data =
    ...``), whose inputs are in the order of ``PlainAOTInput`` (2.11 to 2.15).
    """
    metadata = forward_metadata()
    inputs = [] if metadata is None else enumerate(metadata.input_info)
    return [k for k, info in inputs if info.mutates_data or info.mutates_storage_metadata]


def num_forward_outputs() -> int | None:
    """How many outputs of a forward graph come before those that its backward gets, inside an inner compiler.
    (``TracingContext.fw_metadata.num_forward``, 2.11 to 2.15.)"""
    metadata = forward_metadata()
    return None if metadata is None else int(metadata.num_forward)


def returned_inputs() -> list[int]:
    """Positions among the inputs of a backend's graph of which it returns views, inside an inner compiler. AOTAutograd
    makes these views anew of what the graph is called with.

    Relies on ``TracingContext.fw_metadata.output_info[i]``: ``output_type.name`` and ``base_idx`` (2.11 to 2.15).
    """
    metadata = forward_metadata()
    outputs = [] if metadata is None else metadata.output_info
    return sorted({info.base_idx for info in outputs if info.output_type.name in ("alias_of_input", "is_input")})


@contextlib.contextmanager
def apart_from_the_whole(donated: Sequence[int]) -> Iterator[None]:
    """Inductor reads from the tracing context which inputs it may overwrite, by position in the *whole* backward. For a
    segment those positions mean other tensors, a parameter perhaps: they must never be left standing here. And it
    writes the strides of its outputs there (``output_strides``), which would be taken for the whole graph's; segments
    keep the strides that were traced."""
    context = TracingContext.try_get()
    metadata: Any = context.fw_metadata if context is not None else None
    if metadata is None:
        yield
        return
    before, metadata.bw_donated_idxs = metadata.bw_donated_idxs, list(donated)
    strides, context.output_strides = context.output_strides, None  # type: ignore[union-attr]
    try:
        yield
    finally:
        metadata.bw_donated_idxs = before
        context.output_strides = strides  # type: ignore[union-attr]


def bare_copy(
    optimizer: torch.optim.Optimizer,
    cls: type[torch.optim.Optimizer] | None = None,
    copied: Callable[[torch.optim.Optimizer, dict[str, Any]], dict[str, Any]] | None = None,
) -> torch.optim.Optimizer:
    """The same class (or ``cls``) and options without parameters, state and hooks, to try an update. It shares the
    object's other attributes, or has what ``copied(bare, attributes)`` makes of them.

    Relies on hooks standing in attributes that begin with ``_optimizer_``, and on ``Optimizer.__setstate__`` making
    what is missing (torch 2.11 to 2.15). Methods that zc and schedulers have set on the object are left out.
    """
    cls, left_out = cls or type(optimizer), {"state", "param_groups", "_opt_called"}
    attributes = {
        key: value
        for key, value in vars(optimizer).items()
        if key not in left_out and not key.startswith("_optimizer_")
        and not (callable(value) and callable(getattr(cls, key, None)))
    }
    bare = object.__new__(cls)
    if copied is not None:
        attributes = copied(bare, attributes)
    bare.__setstate__({**attributes, "state": collections.defaultdict(dict), "param_groups": []})
    return bare


class _Running(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator as ``run(operator, its arguments, its keywords)``."""

    def __init__(self, run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


def _lacks_bytes(tensor: Any) -> bool:
    """Of a tensor whose class runs no operators itself, as those that wrap other tensors do."""
    is_plain = isinstance(tensor, torch.Tensor) and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not is_plain or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    return bool(tensor.untyped_storage().nbytes() == 0)


def watching_collectives(call: Callable[[str], None]) -> contextlib.AbstractContextManager[Any]:
    """Inside, each collective calls ``call`` with its operator's name before it starts; that may raise. Any operator
    that would read a tensor without its bytes raises RuntimeError: it would end the process. Relies on
    torch.distributed's collectives being operators of the namespace c10d, which dispatch modes see (2.11 to 2.15)."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace == "c10d":
            call(func.name().split("::")[-1].split(".")[0])
        if not func.is_view and any(map(_lacks_bytes, tensors_in((args, kwargs)))):
            raise RuntimeError(f"{func.name()} would read a tensor whose storage is empty")
        return func(*args, **kwargs)

    return _Running(run)


def seeing_operators(call: Callable[[str, Any, Any], None]) -> contextlib.AbstractContextManager[Any]:
    """Inside, each operator calls ``call`` with its name (``aten::mm``), its arguments and its result, after it ran. A
    tensor among the arguments says whether it requires a gradient. Relies on dispatch modes being called below autograd
    with the tensors that the program has given, in its grad mode (2.11 to 2.15)."""

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        call(func.name().partition(".")[0], args, result)
        return result

    return _Running(run)


def exact_norms() -> contextlib.AbstractContextManager[Any]:
    """Inside, norms of real tensors are computed in float64 and rounded once. On a CPU torch adds up squares of fp32
    one after the other: 1e-5 off for 1 M elements, 9e-5 for 4 M (AVX2, 2.13). Relies on norms, those of clip_grad_norm_
    too, being the operators linalg_vector_norm and _foreach_norm (2.11 to 2.15)."""
    one, several = torch.ops.aten.linalg_vector_norm.default, torch.ops.aten._foreach_norm.Scalar

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        values = args[0] if func is several else args[:1]
        is_norm = func in (one, several) and kwargs.get("dtype") is None
        if not is_norm or not all(value.is_floating_point() for value in values):
            return func(*args, **kwargs)
        exact = [value.double() for value in values]
        norms = [func(*exact, *args[1:], **kwargs)] if func is one else func(exact, *args[1:], **kwargs)
        rounded = [norm.to(value.dtype) for norm, value in zip(norms, values, strict=True)]
        return rounded[0] if func is one else rounded

    return _Running(run)


# attributes of an Optimizer: its hooks around step, each an OrderedDict by handle id (2.11 to 2.15)
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class _HooksBetween(collections.OrderedDict[int, Any]):
    """An optimizer's step hooks, with one before and one after all others, whenever those are registered. Handles from
    before remove their hooks from ``earlier``, later ones from this dict."""

    def __init__(self, earlier: Any, first: Any, last: Any) -> None:
        super().__init__()
        self.earlier, self.first, self.last = earlier, first, last

    def others(self) -> list[Any]:
        return [*self.earlier.values(), *super().values()]

    def values(self) -> list[Any]:  # type: ignore[override]  # torch iterates over it
        return [hook for hook in (self.first, *self.others(), self.last) if hook is not None]


def surround_step(optimizer: torch.optim.Optimizer, begin: Any, last: Any, first: Any) -> Callable[[], None]:
    """Registers three step hooks: ``begin`` before all other pre-hooks, ``last`` after them, and ``first`` before all
    other post-hooks, whenever those others are registered. Returns a function that removes them.

    Relies on torch's wrapper around ``step`` calling what ``values()`` of `STEP_HOOKS` has, with the optimizer itself,
    and passing to ``step`` the arguments that the last pre-hook has returned (2.11 to 2.15).
    """
    around = [(begin, last), (first, None)]
    for name, (before, after) in zip(STEP_HOOKS, around, strict=True):
        setattr(optimizer, name, _HooksBetween(getattr(optimizer, name), before, after))

    def remove() -> None:
        for name in STEP_HOOKS:
            hooks = getattr(optimizer, name)
            if isinstance(hooks, _HooksBetween):
                hooks.first = hooks.last = None

    return remove


def has_step_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has pre-hooks other than those of `surround_step`."""
    hooks = getattr(optimizer, STEP_HOOKS[0])
    return bool(hooks.others() if isinstance(hooks, _HooksBetween) else hooks)


@contextlib.contextmanager
def without_global_step_hooks() -> Iterator[None]:
    """Inside, steps run none of the hooks of all optimizers. (The dicts ``_global_optimizer_pre_hooks`` and
    ``_global_optimizer_post_hooks`` of ``torch.optim.optimizer``, 2.11 to 2.15.)"""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    dicts: tuple[Any, Any] = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    hooks = [dict(each) for each in dicts]
    for each in dicts:
        each.clear()
    try:
        yield
    finally:
        for each, before in zip(dicts, hooks, strict=True):
            each.update(before)


def compiled_autograd_is_on() -> bool:
    """Whether a backward would be traced by compiled autograd. (Two flags of the module
    ``torch._dynamo.compiled_autograd``, 2.11 to 2.15.)"""
    from torch._dynamo import compiled_autograd

    return bool(compiled_autograd.compiled_autograd_enabled or compiled_autograd.in_compiled_autograd_region)


def global_state_check() -> Callable[[], bool]:
    """A function that says whether the global state is still the same in everything that Dynamo guards on for each
    frame: grad mode, autocast, deterministic algorithms, matmul precision, default dtype, number of threads.
    (``torch._C._dynamo.guards.GlobalStateGuard``, 2.11 to 2.15.)"""
    check: Callable[[], bool] = torch._C._dynamo.guards.GlobalStateGuard().check
    return check


def inductor_options(mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    """The settings of Inductor's configuration that torch.compile(mode=, options=) makes. Raises RuntimeError for an
    unknown mode or option, and for a value of the wrong type. (``torch._TorchCompileInductorWrapper``, 2.11 to 2.15.)
    """
    return dict(torch._TorchCompileInductorWrapper(mode, options, dynamic).config)  # type: ignore[no-untyped-call]


_TAG = "zc 3"  # in the key of what AOTAutograd's cache keeps of ours; another format has another number


def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    options: Mapping[str, Any] | None = None,
    *,
    first_pass: Callable[[fx.Graph], None] | None = None,
    joint_pass: Callable[[fx.Graph], None] | None = None,
    kept_as: str | None = None,
) -> Any:
    """Inductor's backend with ``inner_compile`` in place of the compiler of the forward's and the backward's graph, and
    with ``options`` set in Inductor's configuration meanwhile. The backward is compiled along with its forward.
    ``joint_pass`` sees both as one graph, before they are parted, and ``first_pass`` sees it before Inductor's own
    passes, which take clones out. Their ``str()`` is part of the cache's key.

    The AOTAutograd cache's key ignores inner_compile: an entry of a plain run would replace our schedule. So that cache
    is off, or with ``kept_as`` has our tag and this word in its keys, and ``inner_compile`` returns an
    `output_code_class`. Where the program has turned the cache off, it stays off. The FX graph cache below it stays on.

    Relies on ``torch.compiler.config.cache_key_tag`` being part of the key, on ``bundled_autograd_cache`` keeping what
    inner compilers return, and on ``force_non_lazy_backward_lowering``: AOTAutograd writes an entry once it has both
    directions, and these settings hold inside of this function. The passes are ``joint_custom_pre_pass`` and
    ``joint_custom_post_pass``, each a ``CustomGraphPass`` (2.11 to 2.15).
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class JointPass(CustomGraphPass):
        def __init__(self, option: str, own: Callable[[fx.Graph], None] | None) -> None:
            users_pass: Any = (options or {}).get(option, getattr(config, option))
            users_passes = users_pass if isinstance(users_pass, (list, tuple)) else [users_pass]
            self.passes, self.own = [each for each in users_passes if each is not None], own

        def __call__(self, graph: fx.Graph) -> None:
            for each in (*self.passes, self.own):
                if each is not None:
                    each(graph)

        def uuid(self) -> Any:  # None: one of the user's passes has no key, and nothing is cached
            keys = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes]
            return None if None in keys else (str(self.own), *keys)

    is_cached = kept_as is not None and functorch_config.enable_autograd_cache
    settings = functorch_config.patch(
        enable_autograd_cache=is_cached, bundled_autograd_cache=is_cached, force_non_lazy_backward_lowering=True
    )
    shared: Any = torch.compiler.config
    tag = shared.cache_key_tag
    with settings, shared.patch(cache_key_tag=f"{_TAG} {kept_as}:{tag}" if is_cached else tag):
        both = {"joint_custom_pre_pass": first_pass, "joint_custom_post_pass": joint_pass}
        patches = {**(options or {}), **{option: JointPass(option, own) for option, own in both.items()}}
        return compile_fx(gm, list(inputs), inner_compile=inner_compile, config_patches=patches)


def keep_for_backward(node: fx.Node) -> None:
    """Where a backward needs this value of a joint graph, it is saved or made of values that are, not derived again.
    A value inside of torch.utils.checkpoint is derived again in eager PyTorch, too, and stays so.

    Relies on ``node.meta["recompute"]`` and ``CheckpointPolicy.MUST_SAVE`` (2.11 to 2.15)."""
    node.meta.setdefault("recompute", torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE)


def output_code_class() -> Any:
    """The base class of compiled graphs that AOTAutograd's cache can keep. (``torch._inductor.output_code.OutputCode``,
    with ``prepare_for_serialization`` and ``post_compile``, 2.11 to 2.15.)"""
    from torch._inductor.output_code import OutputCode

    return OutputCode


def dump_graph(gm: fx.GraphModule, value: Any) -> bytes:
    """``value``, which belongs to a graph module, as bytes. AOTAutograd leaves out an entry with symbolic sizes, whose
    environment would replace that of the program which loads them, and one that can't be pickled.
    (``torch.fx._graph_pickler.GraphPickler`` and ``BypassAOTAutogradCache``, 2.11 to 2.15.)"""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch.fx._graph_pickler import GraphPickler, Options

    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in gm.graph.nodes):
        raise BypassAOTAutogradCache("zc: its sizes are symbolic")
    try:
        return GraphPickler.dumps(value, Options(ops_filter=None))
    except Exception as error:
        raise BypassAOTAutogradCache(f"zc: {error}") from error


def load_graph(content: bytes) -> Any:
    """The value that `dump_graph` has dumped, with fake tensors of the current mode."""
    from torch.fx._graph_pickler import GraphPickler

    fake_mode: Any = TracingContext.get().fake_mode
    return GraphPickler.loads(content, fake_mode)


@functools.cache
def probe_vector_units() -> None:
    """Starts Inductor's probes of this machine's vector instructions beside what the program does. Inductor then waits
    for them where it first asks.

    Before its first C++ kernel Inductor compiles a test program for each set of instructions, one after another: some
    6 s, and 1 s where the programs are in its cache. Ranks of a host share them by its file locks.

    A fork waits for these threads: a child would keep the pipes open by which they read what the compiler says.

    Relies on ``torch._inductor.cpu_vec_isa``: ``valid_vec_isa_list`` is called there by its name, and asks for the
    truth, which is kept, of those of ``supported_vec_isa_list`` that ``x86_isa_checker`` names (2.11 to 2.15).
    """
    from torch._inductor import compile_fx, cpu_vec_isa  # the first for what the threads import: once, and here

    del compile_fx
    plain, names = cpu_vec_isa.valid_vec_isa_list, cpu_vec_isa.x86_isa_checker()

    def probe(unit: Any, context: contextvars.Context) -> None:
        with contextlib.suppress(Exception):  # a full disk, for example: Inductor meets it, too, and says so
            context.run(bool, unit)

    def wait() -> None:
        for thread in threads:
            thread.join()

    @functools.wraps(plain)
    def valid_vec_isa_list() -> Any:
        wait()
        return plain()

    # each in a copy of this context: torch keeps what the program has configured in context variables
    threads = [
        threading.Thread(target=probe, args=(unit, contextvars.copy_context()), name="zc vector units", daemon=True)
        for unit in cpu_vec_isa.supported_vec_isa_list
        if all(name in names for name in str(unit).split())
    ]
    for thread in threads:
        thread.start()
    cpu_vec_isa.valid_vec_isa_list = valid_vec_isa_list  # type: ignore[assignment]
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=wait)


_waits: contextvars.ContextVar[contextlib.ExitStack | None] = contextvars.ContextVar("waits", default=None)


@contextlib.contextmanager
def compiling_kernels_together() -> Iterator[None]:
    """Inside, Inductor goes on to the next graph while the C++ compiler works on the kernels of the one before. On the
    way out waits for all of them. Nothing that is compiled inside may run inside.

    Waits after an error as well: Inductor keeps the modules that it has loaded, for other graphs of equal code.
    """
    _put_off_waits()
    with contextlib.ExitStack() as waits:
        token = _waits.set(waits)
        try:
            yield
        finally:
            _waits.reset(token)


@functools.cache
def _put_off_waits() -> None:
    """Inductor's modules wait for their kernels at the end of `compiling_kernels_together`, where they are loaded
    inside of it; elsewhere at once, as always.

    Relies on generated modules calling ``torch._inductor.async_compile.AsyncCompile.wait(scope)``, which replaces the
    futures in ``scope``, the module's globals, by kernels (2.11 to 2.15).
    """
    from torch._inductor.async_compile import AsyncCompile

    plain = AsyncCompile.wait

    @functools.wraps(plain)
    def wait(self: Any, scope: dict[str, Any]) -> None:
        waits = _waits.get()
        if waits is None:
            plain(self, scope)
        else:
            waits.callback(plain, self, scope)

    AsyncCompile.wait = wait  # type: ignore[method-assign]


def compile_inner(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Compiles one graph with Inductor, under ``options``. Returns a boxed callable.
    (``compile_fx_inner(gm, example_inputs, **kwargs)``, 2.11 to 2.15.)

    Every segment of a graph gets the arguments that AOTAutograd passes for the graph, but for those that describe the
    graph's own inputs. 2.12, unlike 2.11, has ``compile_region_name``, for logs, and ``get_decomp_fn``, Inductor's
    decompositions; both hold for a segment as well. ``placeholder.meta["is_static_input"]`` (2.15) removes an input
    from ``static_input_idxs``, of which a segment has none.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    # what `compile_graph` sets for AOTAutograd's cache is not for Inductor's own
    apart = functorch_config.patch(bundled_autograd_cache=False)
    shared: Any = torch.compiler.config
    tag = shared.cache_key_tag
    if tag.startswith(_TAG):
        tag = tag.partition(":")[2]
    without_joint = {**(options or {}), "joint_custom_post_pass": None}  # it is done, and would be part of the key
    with config.patch(without_joint), apart, shared.patch(cache_key_tag=tag):
        return compile_fx_inner(gm, example_inputs, **kwargs)


def input_index(desc: Any) -> int | None:
    """Which input of the backend call an AOTAutograd descriptor (``placeholder.meta["desc"]``) stands for.
    (``PlainAOTInput(idx)``, torch >= 2.9.)"""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    return int(desc.idx) if isinstance(desc, PlainAOTInput) else None


def grad_of_index(desc: Any) -> int | None:
    """Of which input an output of the backward graph (``output.meta["desc"][i]``) is the gradient.
    (``GradAOTOutput(grad_of=PlainAOTInput(idx))``, torch >= 2.9.)"""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput

    return input_index(desc.grad_of) if isinstance(desc, GradAOTOutput) else None


def boxed(run: _F) -> _F:
    """Marks a compiled callable: AOTAutograd passes it one list, which it may empty. (``_boxed_call``, 2.0 to 2.15.)"""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def mutates(target: Any) -> bool:
    """Whether an operator writes into an argument. (``OpOverload._schema.is_mutable``, since 2.0.)"""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def use_of_streams(node: fx.Node) -> str | None:
    """A node's use of streams of the program's own: the operator that it calls, by itself or in a graph that it hands
    on, or the stream that it runs on. None: it has none.

    Relies on the namespace ``streams`` of torch's operators for them; on AOTAutograd, since 2.13, putting each into a
    graph of its own, an attribute that goes to ``control_deps``; and on Dynamo's ``meta["custom"]["stream"]`` at what
    stands under ``torch.cuda.stream``, which autograd's nodes inherit (2.11 to 2.15).
    """
    if node.op == "get_attr":
        module = getattr(node.graph.owning_module, str(node.target), None)
        inner = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
        return next((use for use in map(use_of_streams, inner) if use is not None), None)
    if node.op != "call_function":
        return None
    if getattr(node.target, "namespace", None) == "streams":
        return str(node.target)
    stream = (node.meta.get("custom") or {}).get("stream")
    return None if stream is None else f"stream {stream}"


def unscale_(grads: list[torch.Tensor], found_inf: torch.Tensor, inverse: torch.Tensor) -> None:
    """Gradients times ``inverse``; ``found_inf`` becomes 1 where one is infinite or NaN. (GradScaler's own call, since
    1.6.)"""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)


def multiply_all_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Each tensor times ``factor``, 0-d, of their dtype and device; on a GPU one launch. (``torch._foreach_mul_``,
    as torch.nn.utils.clip_grad_norm_ uses it, since 2.1.)"""
    torch._foreach_mul_(tensors, factor)


def let_unscale_fp16(is_ours: Callable[[torch.optim.Optimizer], bool]) -> None:
    """GradScaler.unscale_ takes optimizers of ours with fp16 parameters: their gradients are fp32 in the accumulators.
    It refuses fp16 gradients of other optimizers, as before. The first call of a process counts.

    Relies on ``GradScaler._unscale_grads_(optimizer, inverse, found_inf, allow_fp16)`` (2.11 to 2.15).
    """
    scaler: Any = torch.amp.GradScaler
    plain = scaler._unscale_grads_
    if plain.__module__ == __name__:
        return

    def unscale(self: Any, optimizer: Any, inverse: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return plain(self, optimizer, inverse, found_inf, allow_fp16 or is_ours(optimizer))

    vars(unscale)["__wrapped__"] = plain  # for inspect.unwrap; functools.wraps would take the name of its module, too
    scaler._unscale_grads_ = unscale


def is_profiling() -> bool:
    """Whether torch.profiler, torch.autograd.profiler or its emit_nvtx runs, in any thread.

    Relies on ``torch.autograd.profiler._is_profiler_enabled``, the flag that torch's own optimizers and DataLoader ask
    before they name a range (2.11 to 2.15).
    """
    return bool(torch.autograd.profiler._is_profiler_enabled)
