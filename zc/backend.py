"""The one file that touches private torch APIs: the Dynamo backend, its guards, and compiled segments.

Dynamo calls `make_backend`'s function with a graph; it calls Inductor's ``compile_fx`` with a hook in place of the
inner compiler. AOTAutograd traces, decomposes and partitions as always; where the hook gets the backward graph, that
goes through zc's passes, and only the segments between gradient operations go on to Inductor.

Relied on, and looked up in the sources of torch 2.11, 2.13 and 2.15: see the comment at each use.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from zc.errors import PassError, ZcError
from zc.passes.base import copy_graph
from zc.passes.tag_gradients import slot_of
from zc.program import Program, build

if TYPE_CHECKING:
    from zc.ops import Segment
    from zc.runtime import Runtime

_T = TypeVar("_T", bound=torch.Tensor)
_NUMBERS = itertools.count()  # of the models compiled in this process: in every order of their lives another one


# --- autograd ---


def current_graph_task() -> int:
    """Id of the backward that runs in this thread, -1 outside of one. (torch._C: used by torch's own hooks since
    2.0.)"""
    return int(torch._C._current_graph_task_id())


def queue_callback(callback: Callable[[], None]) -> None:
    """Calls ``callback`` when the running backward ends without an error. (DDP and FSDP rely on the same call.)"""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_inside_another_backward() -> bool:
    """Whether the backward that runs was called by a backward (reentrant checkpointing).

    Relies on every backward going through ``torch.autograd.graph._engine_run_backward`` (2.11 to 2.15), whose frame is
    on this thread's stack: once for a thread of the caller's, not at all for one of the engine's own.
    """
    depth = 0 if isinstance(threading.current_thread(), threading._DummyThread) else -1
    frame = inspect.currentframe()
    while frame is not None:
        depth += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return depth > 0


def version(param: torch.nn.Parameter) -> int:
    """How often autograd has seen ``param`` written in place. (``Tensor._version``, since torch 0.4.)"""
    return int(param._version)


def num_accumulate_hooks(param: torch.nn.Parameter) -> int:
    """Post-accumulate-grad hooks on a parameter. (``Tensor._post_accumulate_grad_hooks``, since 2.1.)"""
    return len(getattr(param, "_post_accumulate_grad_hooks", None) or ())


class _Edges(torch.autograd.Function):
    """Its node in the graph knows the nodes of all its inputs: one call for all, where
    torch.autograd.graph.get_gradient_edge makes a view for each."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)


def kept_by_autograd(params: Mapping[str, torch.nn.Parameter]) -> frozenset[str]:
    """Those whose gradient the backward that runs must bring as PyTorch has it: a hook waits for it, or it is not added
    to ``param.grad``, under torch.autograd.grad and where ``backward(inputs=...)`` leaves it out.

    (``torch._C._will_engine_execute_node``, since 2.1; ``Tensor._backward_hooks``, a dict or None, since 0.4; the node
    of ``Function.apply`` lists its inputs' nodes in order.)
    """
    open_ones = {name: p for name, p in params.items() if p.requires_grad}  # not frozen since the forward
    with torch.enable_grad():
        edges: Any = _Edges.apply(*open_ones.values()) if open_ones else None  # type: ignore[no-untyped-call]
    nodes = [node for node, _ in edges.grad_fn.next_functions] if open_ones else []
    free = {n for (n, p), node in zip(open_ones.items(), nodes, strict=True) if not p._backward_hooks and _runs(node)}
    return frozenset(params.keys() - free)


def _runs(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined, unused-ignore]
    except RuntimeError:  # torch.autograd.grad has asked for this very gradient
        return False


def refuse_compiled_autograd() -> None:
    """Compiled autograd traces through the backward's side effects and would drop them, so it is refused, not
    ignored."""
    from torch._dynamo import compiled_autograd

    # a module flag, True while a region of compiled autograd is active
    if compiled_autograd.compiled_autograd_enabled or compiled_autograd.in_compiled_autograd_region:
        raise ZcError(
            "compiled autograd is on: it bypasses the compiled backward's schedule. Turn it off "
            "(torch._dynamo.config.compiled_autograd = False); zc compiles the backward itself"
        )


def make_wrapper(cls: type[_T], like: torch.Tensor) -> _T:
    """A tensor subclass's instance with the sizes, dtype and device of ``like`` and no storage. (DTensor is made this
    way.)"""
    made: _T = torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )
    return made


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Inside, a subclass's ``__torch_function__`` is not asked (torch's notes on extending it name this class; 2.11 to
    2.15)."""
    found: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return found


def num_sharing(tensor: torch.Tensor) -> int:
    """How many tensors, arrays and the like hold the memory of ``tensor``, itself and one more counted. (torch._C:
    what torch's CUDA-graph trees ask before they reuse memory; 2.11 to 2.15.)"""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def default_store() -> Any:
    """The store of the default process group: torchrun's agent holds it, so it outlives a rank. (FSDP's and
    torch.distributed.checkpoint's own tests and elastic code take it the same way; 2.11 to 2.15.)"""
    return torch.distributed.distributed_c10d._get_default_store()


def new_group(ranks: Sequence[int], backend: str, name: str) -> torch.distributed.ProcessGroup:
    """A process group of ``ranks`` under ``name``; its members call it, nobody else need.

    What torch.distributed.new_group does, which takes no name and, with ``use_local_synchronization``, makes one of
    the number of groups that there are: after one has been closed it comes again, and the store still has the old
    addresses under it. (``_new_process_group_helper``, ``_world.pg_group_ranks``: frameworks that add workers to a
    running program make theirs this way; 2.11 to 2.15.)
    """
    from torch.distributed import distributed_c10d as c10d

    made: torch.distributed.ProcessGroup
    rank, chosen = ranks.index(torch.distributed.get_rank()), torch.distributed.Backend(backend)
    timeout = c10d._get_default_timeout(chosen)
    make: Any = c10d._new_process_group_helper
    made, _ = make(len(ranks), rank, list(ranks), chosen, default_store(), name, timeout=timeout)
    c10d._world.pg_group_ranks[made] = {member: k for k, member in enumerate(ranks)}
    return made


# --- the Dynamo backend ---


def make_backend(runtime: Runtime) -> Callable[..., Any]:
    """A backend for ``torch.compile`` whose backward graphs reduce gradients as ``runtime``'s plan says.

    Lifetime: it and all that it compiles know the runtime weakly, and own no program. Dynamo keeps compiled graphs by
    code object, in C, where Python's collector does not look: what they own would outlive the model. A parameter that
    dies takes the graphs guarded by its identity with it.
    """
    runtime = weakref.proxy(runtime)

    def zc_backend(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        from torch._functorch import config as functorch_config
        from torch._inductor.compile_fx import compile_fx

        refuse_compiled_autograd()
        runtime.ledger.graphs.append(_compile_id())
        name_of = {id(param): name for name, param in runtime.params.items()}  # zc.recompile may have added some
        names = [name_of.get(id(value)) for value in inputs]
        _guard_identity(gm, names)
        # The AOTAutograd cache's key ignores inner_compile: an entry of a plain run would replace our schedule
        # (functorch config, all of 2.11 to 2.15). The FX graph cache below it stays on.
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(gm, list(inputs), inner_compile=partial(_inner_compile, runtime, names))

    return zc_backend


def _compile_id() -> str:
    """Dynamo's id of the graph that is being compiled, frame / how often that frame was compiled before."""
    from torch._guards import CompileContext

    found = CompileContext.current_compile_id()
    return f"{found.frame_id}/{found.frame_compile_id}" if found is not None else "?"


def graph_breaks() -> dict[str, int]:
    """Why Dynamo broke graphs in this process, and how often; under "skipped frames" those that it left uncompiled.

    Relies on ``torch._dynamo.utils.counters``, which TORCH_LOGS and Dynamo's own tests read (2.11 to 2.15).
    """
    from torch._dynamo.utils import counters

    found = {str(reason): int(times) for reason, times in counters["graph_break"].items()}
    frames = counters["frames"]
    if frames["total"] > frames["ok"]:
        found["skipped frames"] = int(frames["total"] - frames["ok"])
    return found


def compile_in_place(model: nn.Module, backend: Callable[..., Any], before: Callable[[], None] | None = None) -> None:
    """``model(...)`` runs compiled from now on, ``before`` first; class, state_dict keys and ``model.forward`` stay.

    Not ``model.compile()``: Dynamo skips the forward of torch.nn's own classes (a bare nn.Sequential), and would
    compile nothing without a word. Called from a function of ours it is inlined. Relies on
    ``Module._compiled_call_impl``, which ``Module.__call__`` prefers and pickling leaves out (2.11 to 2.15).

    What Dynamo learns, it keeps by code object (compiled graphs, their limit) and by the file, line and name of one
    (``pgo.CodeId``: the sizes it has seen, from which it takes the dynamic ones). Both are a model's own here, or the
    second model's sizes would be dynamic ones of the first.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    call.__code__ = call.__code__.replace(co_name=f"call_{next(_NUMBERS)}")
    compiled = torch.compile(call, backend=backend)
    if before is None:
        model._compiled_call_impl = compiled
        return
    ahead = torch.compiler.disable(before)  # type: ignore[no-untyped-call]

    def start(*args: Any, **kwargs: Any) -> Any:
        ahead()
        return compiled(*args, **kwargs)

    model._compiled_call_impl = start


def call_first(model: nn.Module, before: Callable[[], None]) -> None:
    """``before`` runs ahead of each ``model(...)``, compiled or not, and is not compiled itself. Not a hook: copies
    and pickles of the module don't have it. Relies on what `compile_in_place` does."""
    call = model._compiled_call_impl or model._call_impl
    ahead = torch.compiler.disable(before)  # type: ignore[no-untyped-call]

    def start(*args: Any, **kwargs: Any) -> Any:
        ahead()
        return call(*args, **kwargs)

    model._compiled_call_impl = start


def run_eagerly(model: nn.Module) -> None:
    """Takes back what `compile_in_place` and `call_first` did."""
    model._compiled_call_impl = None


def raise_recompile_limit(model: nn.Module) -> None:
    """Identity guards compile one graph for each module instance: 8, the default, would leave the rest eager. Models of
    one class share the code of its methods, which Dynamo compiles apart behind a graph break: each model raises the
    limits by what it needs."""
    needed = 2 * sum(1 for _ in model.modules())
    dynamo_config: Any = torch._dynamo.config
    dynamo_config.recompile_limit += needed
    dynamo_config.accumulated_recompile_limit += 8 * needed


def _guard_identity(gm: fx.GraphModule, names: Sequence[str | None]) -> None:
    """One compiled graph may serve several module instances; ours belongs to these very parameters.

    Relies on ``meta["grapharg"].source`` of Dynamo's placeholders and on the guards still being open while the backend
    runs (TracingContext.guards_context): both as in 2.11 to 2.15.
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._guards import TracingContext

    guards = TracingContext.get().guards_context.dynamo_guards
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, names, strict=True):
        if name is not None:
            guards.add(node.meta["grapharg"].source.make_guard(GuardBuilder.ID_MATCH))


def _inner_compile(
    runtime: Runtime, names: Sequence[str | None], gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Any:
    kwargs = _without_cuda_graphs(runtime, kwargs)
    if not kwargs.get("is_backward"):
        if runtime.plan.overlap_gather:
            return _compile_forward(runtime, names, gm, example_inputs, kwargs)
        return _whole(runtime, gm, example_inputs, kwargs)
    _adopt_strides(gm, example_inputs)
    backward = CompiledBackward(runtime, names, gm, kwargs)

    def run(args: list[Any]) -> tuple[Any, ...]:
        try:
            program = backward.program()
        except ReferenceError:
            raise ZcError(
                "backward() through a model that is gone: keep the model or its optimizer until the last backward"
            ) from None
        return runtime.run_program(program, args)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd passes a list that we may empty
    return run


def _without_cuda_graphs(runtime: Runtime, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A CUDA graph's outputs are overwritten by its next replay. A segment's are gradients, which wait for their bucket
    and cross streams, and layers of one shape share one compiled segment. A forward whose backward is no CUDA graph
    would be taken for one with a backward pending, and never replay.

    Relies on the argument ``cudagraphs`` of ``compile_fx_inner``, a box with a truth value made from
    ``torch._inductor.config.triton.cudagraphs`` (2.11 to 2.15).
    """
    asked = kwargs.get("cudagraphs")
    if not asked:
        return kwargs
    runtime.say_once("torch._inductor.config.triton.cudagraphs is on: zc compiles without CUDA graphs")
    return {**kwargs, "cudagraphs": type(asked)(False)}


def _adopt_strides(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Inductor may give a saved activation other strides than it was traced with (channels last around convolutions).
    AOTAutograd hands them in with ``example_inputs``; the graph's own values learn of them here, before it is cut into
    segments, each of which asserts the strides of its inputs.

    A view was traced for the old strides and may not exist for the new ones: those become copies, as Inductor has it.
    The others stay views, which share memory (`_mark_storages`, write_in_place).

    Relies on AOTAutograd restriding the example inputs by what the compiled forward reports, and else passing the
    placeholders' own values; on ``view_to_reshape`` and ``fake_tensor_prop``, by which compile_fx does the same to a
    whole graph (2.11 to 2.15).
    """
    from torch._inductor.compile_fx import fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if all(node.meta.get("val") is given for node, given in zip(placeholders, example_inputs, strict=True)):
        return
    views = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
    view_to_reshape(gm)  # type: ignore[no-untyped-call]
    fake_tensor_prop(gm, example_inputs)
    for node in views:
        if _storage_of(node) == _storage_of(node.args[0]):
            node.target = torch.ops.aten.view.default


def _whole(runtime: Runtime, gm: fx.GraphModule, example_inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A forward or inference graph: Inductor's as it is, or op by op."""
    if runtime.config.backend == "aot_eager":
        return _interpret(gm)
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner(gm, example_inputs, **kwargs)


def _compile_forward(
    runtime: Runtime,
    names: Sequence[str | None],
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """A forward graph under overlap_gather: a schedule that waits for each bucket where it first reads it; where that
    can't be had, the whole graph, behind all gathers.

    Relies on AOTAutograd's descriptors of a forward's inputs: ``placeholder.meta["desc"]`` is ``PlainAOTInput(idx)``
    (torch >= 2.9).
    """
    why = _why_whole(gm, kwargs)
    if why is None:
        graph = _name_buffers(runtime, names, gm)
        run = runtime.weights.compile_forward(graph, _segment_compiler(runtime, kwargs, is_backward=False))
    else:
        if not kwargs.get("is_inference"):
            runtime.say_once(f"a forward graph waits for all gathers before it starts: {why}")
        whole = _whole(runtime, gm, example_inputs, kwargs)

        def run(args: list[Any]) -> Any:
            runtime.weights.synchronize()
            return whole(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _why_whole(gm: fx.GraphModule, kwargs: dict[str, Any]) -> str | None:
    """Why a forward graph can't be cut, or None."""
    if kwargs.get("is_inference"):
        return "it is not differentiated"
    for node in gm.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt):
            return "its sizes are symbolic"
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            return f"{node.target} changes an input"
    return None


def _name_buffers(runtime: Runtime, names: Sequence[str | None], gm: fx.GraphModule) -> fx.Graph:
    """A copy of a forward graph in which the parameters' placeholders say of which buffer they are a view."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    graph, _ = copy_graph(gm.graph)
    graph.owning_module = gm
    where = slot_of(runtime.plan)
    for node in graph.nodes:
        desc = node.meta.get("desc")
        name = names[desc.idx] if node.op == "placeholder" and isinstance(desc, PlainAOTInput) else None
        if name is not None:
            node.meta["buffer"] = runtime.plan.weights_buffer(where[name][0])
    _mark_storages(graph, donated=())
    return graph


class CompiledBackward:
    """One backward graph: its program at a boundary, and the one for microbatches where that is another."""

    def __init__(
        self, runtime: Runtime, names: Sequence[str | None], gm: fx.GraphModule, kwargs: dict[str, Any]
    ) -> None:
        self.runtime, self.gm = runtime, gm
        self.compile_segment = _segment_compiler(runtime, kwargs, is_backward=True)
        self.graph = _annotate(gm, names)
        written = self.graph.output_node().meta["grad_of"]
        self.written = [name for name in written if name is not None]
        # owned by runtime.programs
        self._programs: WeakValueDictionary[tuple[bool, frozenset[str]], Program] = WeakValueDictionary()
        self._build(runtime.current_plan.reduces, frozenset())  # while Dynamo's context is open

    def program(self) -> Program:
        """The one for the backward that runs now. A gradient that autograd itself has to see leaves the graph as
        PyTorch has it, and comes back, if at all, through the parameter's own hook."""
        params = {name: self.runtime.params[name] for name in self.written}
        key = self.runtime.current_plan.reduces, kept_by_autograd(params)
        return self._programs.get(key) or self._build(*key)

    def _build(self, reduces: bool, shown: frozenset[str]) -> Program:
        runtime = self.runtime
        graph, _ = copy_graph(self.graph)
        output = graph.output_node()
        output.meta["grad_of"] = tuple(None if name in shown else name for name in output.meta["grad_of"])
        built = build(
            graph,
            runtime.plan if reduces else runtime.plan.microbatch(),
            runtime.passes,
            runtime.ops,
            self.compile_segment,
            name=f"backward_{len(runtime.programs)}",
            dump_dir=runtime.config.dump_dir,
        )
        runtime.programs.append(built)
        self._programs[reduces, shown] = built
        return built


def _annotate(gm: fx.GraphModule, names: Sequence[str | None]) -> fx.Graph:
    """A copy of the graph whose output node says which parameter's gradient each output is.

    Relies on AOTAutograd's descriptors: ``output.meta["desc"][i]`` is ``GradAOTOutput(grad_of=PlainAOTInput(idx))``
    with idx an index into the inputs of the backend call (torch >= 2.9).
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    graph, _ = copy_graph(gm.graph)
    graph.owning_module = gm
    output = graph.output_node()
    grad_of: list[str | None] = []
    for desc in output.meta.get("desc", ()):
        source = desc.grad_of if isinstance(desc, GradAOTOutput) else None
        grad_of.append(names[source.idx] if isinstance(source, PlainAOTInput) else None)
    if len(grad_of) != len(output.args[0]):  # type: ignore[arg-type]
        raise PassError(f"the backward graph has {len(output.args[0])} outputs and {len(grad_of)} descriptors")  # type: ignore[arg-type]
    output.meta["grad_of"] = tuple(grad_of)
    _mark_storages(graph, _donated_inputs())
    return graph


def _mark_storages(graph: fx.Graph, donated: Sequence[int]) -> None:
    """``meta["storage"]`` of every value, and ``meta["donated"]`` of the inputs that AOTAutograd lets the backward
    overwrite.

    Relies on fake tensors sharing a storage where the real ones do.
    """
    numbers: dict[int, int] = {}
    placeholders = 0
    for node in graph.nodes:
        storage = _storage_of(node)
        if storage is not None:
            node.meta["storage"] = numbers.setdefault(storage, len(numbers))
        if node.op == "placeholder":
            node.meta["donated"] = placeholders in donated
            placeholders += 1


def _storage_of(node: fx.Node) -> int | None:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided:
        return None
    return int(val.untyped_storage()._cdata)


def _donated_inputs() -> list[int]:
    """``TracingContext.fw_metadata.bw_donated_idxs``: positions among the backward's inputs."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return list(context.fw_metadata.bw_donated_idxs or ()) if context is not None and context.fw_metadata else []


@contextlib.contextmanager
def _apart_from_the_whole(donated: Sequence[int]) -> Iterator[None]:
    """Inductor reads from the tracing context which inputs it may overwrite, by position in the *whole* backward. For a
    segment those positions mean other tensors, a parameter perhaps: they must never be left standing here. And it
    writes the strides of its outputs there (``output_strides``), which would be taken for the whole graph's; segments
    keep the strides that were traced."""
    from torch._guards import TracingContext

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


# --- segments ---


def _interpret(gm: fx.GraphModule) -> Segment:
    def run(args: list[Any]) -> Any:
        taken = list(args)
        args.clear()
        return gm.forward(*taken)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _segment_compiler(
    runtime: Runtime, kwargs: dict[str, Any], *, is_backward: bool
) -> Callable[[fx.GraphModule], Segment]:
    if runtime.config.backend == "aot_eager":
        return _interpret
    return partial(_compile_segment, runtime, {**kwargs, "is_backward": is_backward})


def _compile_segment(runtime: Runtime, kwargs: dict[str, Any], gm: fx.GraphModule) -> Segment:
    """Inductor on one segment. Identical segments (layers of one shape) are compiled once.

    Relies on ``compile_fx_inner(gm, example_inputs, **kwargs)``; on its returning a boxed callable; and on
    ``output.meta["user_visible_output_idxs"]`` and ``["original_output_strides"]``, by which Inductor keeps the strides
    that the next segment was traced with (2.11 to 2.15).
    """
    from torch._inductor.compile_fx import compile_fx_inner

    key = _canonical_key(gm)
    if key is not None and key in runtime.compiled_segments:
        return runtime.compiled_segments[key]
    output = gm.graph.output_node()
    outputs: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    output.meta["original_output_strides"] = [_strides_of(n.meta.get("val")) for n in outputs]
    example_inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    accepted = inspect.signature(compile_fx_inner).parameters
    passed = {k: v for k, v in kwargs.items() if k in accepted or "kwargs" in accepted}
    passed.update(static_input_idxs=())
    passed.pop("boxed_forward_device_index", None)  # tells a forward about its device; no segment is one
    with _apart_from_the_whole(gm.meta["donated"]):
        compiled: Segment = compile_fx_inner(gm, example_inputs, **passed)
    if key is not None:
        runtime.compiled_segments[key] = compiled  # pure code, no state: layers of one shape can share it
    return compiled


def _strides_of(val: Any) -> Any:
    return val.stride() if isinstance(val, torch.Tensor) and val.layout == torch.strided else None


def _canonical_key(gm: fx.GraphModule) -> str | None:
    """Hash of a segment's text and of every value's shape, stride, dtype and device; None where sizes are symbolic or
    constants are attached (the FX graph cache knows how to compare those)."""
    lines = []
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if node.op == "get_attr":
            return None
        for item in val if isinstance(val, (list, tuple)) else (val,):
            if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return None
            if isinstance(item, torch.Tensor):
                if any(isinstance(size, torch.SymInt) for size in item.shape):
                    return None
                strides = item.stride() if item.layout == torch.strided else ()
                lines.append(f"{tuple(item.shape)} {strides} {item.dtype} {item.device}")
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def has_later_step_hook(optimizer: torch.optim.Optimizer, own: RemovableHandle) -> bool:
    """Whether a step pre-hook of the optimizer was registered after ``own``, and so sees the gradients after it. The
    hooks' dict is private (torch 2.11 to 2.15: an OrderedDict by handle id); where it is gone, True."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return hooks is None or next(reversed(hooks), own.id) != own.id
