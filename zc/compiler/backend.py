"""The Dynamo backend: a graph of the model in, compiled forward and backward schedules out.

Dynamo calls `make_backend`'s function with a graph; it calls Inductor's ``compile_fx`` with a hook in place of the
inner compiler. AOTAutograd traces, decomposes and partitions as always; where the hook gets the backward graph, that
goes through zc's passes, and only the segments between gradient operations go on to Inductor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from zc import torch_private
from zc.compiler.segments import interpret, segment_compiler
from zc.engine import param_grads
from zc.engine.program import Program, build
from zc.errors import PassError, ZcError
from zc.log import log
from zc.passes.base import copy_graph

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime


def make_backend(runtime: Runtime) -> Callable[..., Any]:
    """A backend for ``torch.compile`` whose backward graphs reduce gradients as ``runtime``'s plan says.

    Lifetime: the backend and everything that it compiles hold the runtime weakly, and own no program. Dynamo keeps
    compiled graphs by code object, in C, out of sight of Python's collector, so whatever they own would outlive the
    model. When a parameter dies, the graphs that are guarded by its identity die with it.
    """
    runtime = weakref.proxy(runtime)

    def zc_backend(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        param_grads.refuse_compiled_autograd()
        runtime.ledger.graphs.append(torch_private.compile_id())
        name_of = {id(param): name for name, param in runtime.params.items()}  # zc.recompile may have added some
        names = [name_of.get(id(value)) for value in inputs]
        torch_private.guard_identity(gm, names)
        return torch_private.compile_graph(
            gm, inputs, partial(_inner_compile, runtime, names), runtime.inductor_options
        )

    return zc_backend


def _inner_compile(
    runtime: Runtime, names: Sequence[str | None], gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Any:
    kwargs = _without_cuda_graphs(runtime, kwargs)
    if not kwargs.get("is_backward"):
        if runtime.plan.overlap_gather:
            return _compile_forward(runtime, names, gm, example_inputs, kwargs)
        return _whole(runtime, gm, example_inputs, kwargs)
    torch_private.adopt_strides(gm, example_inputs)
    backward = CompiledBackward(runtime, names, gm, kwargs)

    def run(args: list[Any]) -> tuple[Any, ...]:
        try:
            program = backward.program()
        except ReferenceError:
            raise ZcError(
                "backward() through a model that is gone: keep the model or its optimizer until the last backward"
            ) from None
        return runtime.run_program(program, args)

    return torch_private.boxed(run)


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


def _whole(runtime: Runtime, gm: fx.GraphModule, example_inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A forward or inference graph: Inductor's as it is, or op by op."""
    if runtime.config.backend == "aot_eager":
        return interpret(gm)
    log.info("Inductor compiles a forward graph of %d operations", len(gm.graph.nodes))
    return torch_private.compile_inner(gm, example_inputs, runtime.inductor_options, **kwargs)


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
        run = runtime.weights.compile_forward(graph, segment_compiler(runtime, kwargs, is_backward=False))
    else:
        if not kwargs.get("is_inference"):
            runtime.say_once(f"a forward graph waits for all gathers before it starts: {why}")
        whole = _whole(runtime, gm, example_inputs, kwargs)

        def run(args: list[Any]) -> Any:
            runtime.weights.synchronize()
            return whole(args)

    return torch_private.boxed(run)


def _why_whole(gm: fx.GraphModule, kwargs: dict[str, Any]) -> str | None:
    """Why a forward graph can't be cut, or None."""
    if kwargs.get("is_inference"):
        return "it is not differentiated"
    for node in gm.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt):
            return "its sizes are symbolic"
        if (use := torch_private.use_of_streams(node)) is not None:
            return f"it uses {use}"
        if node.op == "call_function" and torch_private.mutates(node.target):
            return f"{node.target} changes an input"
    return None


def _name_buffers(runtime: Runtime, names: Sequence[str | None], gm: fx.GraphModule) -> fx.Graph:
    """A copy of a forward graph in which the parameters' placeholders say of which buffer they are a view."""
    graph, _ = copy_graph(gm.graph)
    graph.owning_module = gm
    where = runtime.plan.slot_of()
    for node in graph.nodes:
        index = torch_private.input_index(node.meta.get("desc")) if node.op == "placeholder" else None
        name = names[index] if index is not None else None
        if name is not None:
            node.meta["buffer"] = runtime.plan.weights_buffer(where[name][0])
    _mark_storages(graph, donated=())
    return graph


MAX_PROGRAMS = 8  # of one backward graph: for other sets of hooks all gradients of the graph go through hooks


class CompiledBackward:
    """One backward graph and its programs: at a boundary, for microbatches if that is another, and with the gradients
    that autograd has to see among its outputs."""

    def __init__(
        self, runtime: Runtime, names: Sequence[str | None], gm: fx.GraphModule, kwargs: dict[str, Any]
    ) -> None:
        self.runtime, self.gm = runtime, gm
        self.compile_segment = segment_compiler(runtime, kwargs, is_backward=True)
        self.graph = _annotate(gm, names)
        written = self.graph.output_node().meta["grad_of"]
        self.written = [name for name in written if name is not None]
        # owned by runtime.programs
        self._programs: WeakValueDictionary[tuple[bool, frozenset[str]], Program] = WeakValueDictionary()
        self._build(runtime.current_plan.reduces, frozenset())  # while Dynamo's context is open

    def program(self) -> Program:
        """The one for the backward that runs now. A gradient that autograd itself has to see leaves the graph as
        PyTorch has it, and comes back, if at all, through the parameter's own hook. So may any other gradient: there
        are at most `MAX_PROGRAMS`, and the two last ones are for all further sets."""
        params = {name: self.runtime.params[name] for name in self.written}
        reduces, visible = self.runtime.current_plan.reduces, torch_private.kept_by_autograd(params)
        if (reduces, visible) not in self._programs and len(self._programs) >= MAX_PROGRAMS - 2:
            visible = frozenset(self.written)
            self.runtime.say_once(
                f"a backward graph met more than {MAX_PROGRAMS - 2} sets of parameters with hooks, or of inputs of "
                "torch.autograd.grad: for further sets all of its gradients come through hooks, without overlap"
            )
        return self._programs.get((reduces, visible)) or self._build(reduces, visible)

    def _build(self, reduces: bool, visible: frozenset[str]) -> Program:
        runtime = self.runtime
        graph, _ = copy_graph(self.graph)
        output = graph.output_node()
        output.meta["grad_of"] = tuple(None if name in visible else name for name in output.meta["grad_of"])
        program = build(
            graph,
            runtime.plan if reduces else runtime.plan.microbatch(),
            runtime.passes,
            runtime.ops,
            self.compile_segment,
            name=f"backward_{len(runtime.programs)}",
            dump_dir=runtime.config.dump_dir,
        )
        runtime.programs.append(program)
        self._programs[reduces, visible] = program
        return program


def _annotate(gm: fx.GraphModule, names: Sequence[str | None]) -> fx.Graph:
    """A copy of the graph whose output node says which parameter's gradient each output is.

    Relies on AOTAutograd's descriptors: ``output.meta["desc"][i]`` is ``GradAOTOutput(grad_of=PlainAOTInput(idx))``
    with idx an index into the inputs of the backend call (torch >= 2.9).
    """
    graph, _ = copy_graph(gm.graph)
    graph.owning_module = gm
    output = graph.output_node()
    grad_of: list[str | None] = []
    for desc in output.meta.get("desc", ()):
        index = torch_private.grad_of_index(desc)
        grad_of.append(names[index] if index is not None else None)
    if len(grad_of) != len(output.args[0]):  # type: ignore[arg-type]
        raise PassError(f"the backward graph has {len(output.args[0])} outputs and {len(grad_of)} descriptors")  # type: ignore[arg-type]
    output.meta["grad_of"] = tuple(grad_of)
    _mark_storages(graph, torch_private.donated_inputs())
    return graph


def _mark_storages(graph: fx.Graph, donated: Sequence[int]) -> None:
    """``meta["storage"]`` of every value, and ``meta["donated"]`` of the inputs that AOTAutograd lets the backward
    overwrite.

    Relies on fake tensors sharing a storage where the real ones do.
    """
    numbers: dict[int, int] = {}
    placeholders = 0
    for node in graph.nodes:
        storage = torch_private.storage_of(node)
        if storage is not None:
            node.meta["storage"] = numbers.setdefault(storage, len(numbers))
        if node.op == "placeholder":
            node.meta["donated"] = placeholders in donated
            placeholders += 1
