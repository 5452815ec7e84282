"""The Dynamo backend: a graph of the model in, compiled forward and backward schedules out.

Dynamo calls `make_backend`'s function with a graph; it calls Inductor's ``compile_fx`` with a hook in place of the
inner compiler. AOTAutograd traces, decomposes and partitions as always; where the hook gets the backward graph, that
goes through zc's passes, and only the segments between gradient operations go on to Inductor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from zc import torch_private
from zc.compiler.blocks import Blocks, Member, for_block
from zc.compiler.segments import interpret, segment_compiler
from zc.engine import param_grads
from zc.engine.program import Program, build
from zc.errors import PassError, ZcError
from zc.log import log
from zc.passes.base import copy_graph

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime


# the block (None: the one that was traced, or no block), whether it reduces, the gradients that autograd sees
_Key = tuple[str | None, bool, frozenset[str]]
MAX_SHARED = 6  # graphs of one kind of block, for other sizes or flags: further ones belong to one block each


def make_backend(runtime: Runtime, blocks: Blocks | None = None, kind: int | None = None) -> Callable[..., Any]:
    """A backend for ``torch.compile`` whose backward graphs reduce gradients as ``runtime``'s plan says. With ``kind``
    it compiles ``blocks`` of that kind, and one graph runs for all of them.

    Lifetime: the backend and everything that it compiles hold the runtime weakly, and own no program. Dynamo keeps
    compiled graphs by code object, in C, out of sight of Python's collector, so whatever they own would outlive the
    model. When a parameter dies, the graphs that are guarded by its identity die with it.
    """
    runtime = weakref.proxy(runtime)
    num_shared = 0

    def zc_backend(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        param_grads.refuse_compiled_autograd()
        runtime.ledger.graphs.append(torch_private.compile_id())
        name_of = {id(param): name for name, param in runtime.params.items()}  # zc.recompile may have added some
        names = [name_of.get(id(value)) for value in inputs]
        nonlocal num_shared
        inside = _one_block(blocks, names) if blocks is not None and num_shared < MAX_SHARED else None
        num_shared += inside is not None
        torch_private.guard_identity(gm, [None if inside is not None and inside.path(n) else n for n in names])
        compiling = _Compiling(runtime, names, inside, partial(torch_private.guard_identity, gm, names))
        return torch_private.compile_graph(gm, inputs, partial(_inner_compile, compiling), runtime.inductor_options)

    return zc_backend


@dataclass
class _Compiling:
    """One graph of Dynamo's. ``names``: of the parameters among its inputs. ``inside``: the block that it is traced
    for; None: it belongs to the very parameters that it is guarded by."""

    runtime: Runtime
    names: list[str | None]
    inside: Member | None
    guard_identity: Callable[[], None]


def _one_block(blocks: Blocks | None, names: Sequence[str | None]) -> Member | None:
    """The block whose parameters are among ``names``; None: there are none, or of several blocks."""
    assert blocks is not None
    parts = {parts[0] for name in names if (parts := blocks.split(name)) is not None}
    return Member(blocks, parts.pop()) if len(parts) == 1 else None


def _inner_compile(
    compiling: _Compiling, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Any:
    runtime, names = compiling.runtime, compiling.names
    kwargs = _without_cuda_graphs(runtime, kwargs)
    if not kwargs.get("is_backward"):
        is_differentiated = not kwargs.get("is_inference")
        if compiling.inside is not None and is_differentiated and not _saves_own(compiling, gm):
            compiling.guard_identity()
            compiling.inside = None
        if runtime.plan.overlap_gather:
            return _compile_forward(runtime, names, gm, example_inputs, kwargs)
        return _whole(runtime, gm, example_inputs, kwargs)
    torch_private.adopt_strides(gm, example_inputs)
    backward = CompiledBackward(runtime, names, gm, kwargs, compiling.inside)

    def run(args: list[Any]) -> tuple[Any, ...]:
        try:
            program = backward.program(args)
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


MAX_PROGRAMS = 8  # of one backward graph and block: for other sets of hooks all of its gradients go through hooks


def _saves_own(compiling: _Compiling, gm: fx.GraphModule) -> bool:
    """Whether the backward of this forward graph gets a parameter of its block."""
    assert compiling.inside is not None
    outputs: Any = gm.graph.output_node().args[0]
    returned = (n for n in outputs if isinstance(n, fx.Node) and n.op == "placeholder")
    indices = (torch_private.input_index(node.meta.get("desc")) for node in returned)
    return any(k is not None and compiling.inside.path(compiling.names[k]) is not None for k in indices)


class CompiledBackward:
    """One backward graph: its program at a boundary, and the one for microbatches where that is another; of a graph
    that runs for several blocks those of each."""

    def __init__(
        self,
        runtime: Runtime,
        names: Sequence[str | None],
        gm: fx.GraphModule,
        kwargs: dict[str, Any],
        inside: Member | None = None,
    ) -> None:
        self.runtime, self.gm, self.inside = runtime, gm, inside
        self.compile_segment = segment_compiler(runtime, kwargs, is_backward=True)
        self.graph = _annotate(gm, names)
        written = self.graph.output_node().meta["grad_of"]
        self.written = [name for name in written if name is not None]
        # owned by runtime.programs
        self._programs: WeakValueDictionary[_Key, Program] = WeakValueDictionary()
        self._own = _own_inputs(gm, names, inside)
        # by whether it reduces, what autograd sees and the block that the passes have made it for
        self._templates: WeakValueDictionary[tuple[bool, frozenset[str], str], Program] = WeakValueDictionary()
        self._get(None if inside is None else inside.name, frozenset())  # while Dynamo's context is open

    def program(self, args: Sequence[Any]) -> Program:
        """The one for the backward that runs now. A gradient that autograd has to see or to sum leaves the graph as
        PyTorch has it, and comes back, if at all, through the parameter's own hook. So do all of them where the block
        can't be told, since hooks on saved tensors have put copies in place of its parameters. And so may any other
        gradient: a block has at most `MAX_PROGRAMS`, and the two last ones are for all further sets."""
        member, written = None, self.written
        if self.inside is not None:
            member = self.inside.blocks.member_of([args[position] for position in self._own])
            if member is None:
                return self._get(None, frozenset(written))
            written = [self.inside.in_block(name, member) for name in written]
        kept = torch_private.kept_by_autograd({name: self.runtime.params[name] for name in written})
        visible = kept | self.runtime.summed_by_autograd.intersection(written)
        key = member, self.runtime.current_plan.reduces, visible
        if key not in self._programs and sum(name == member for name, _, _ in self._programs) >= MAX_PROGRAMS - 2:
            visible = frozenset(written)
            self.runtime.say_once(
                f"a backward graph met more than {MAX_PROGRAMS - 2} sets of parameters with hooks, or of inputs of "
                "torch.autograd.grad: for further sets all of its gradients come through hooks, without overlap"
            )
        return self._get(member, visible)

    def _get(self, member: str | None, visible: frozenset[str]) -> Program:
        key = member, self.runtime.current_plan.reduces, visible
        return self._programs.get(key) or self._make(*key)

    def _make(self, member: str | None, reduces: bool, visible: frozenset[str]) -> Program:
        inside = self.inside
        if inside is None or member is None:
            program = self._build(member, reduces, visible)
        else:
            own = frozenset(name for name in self.written if inside.in_block(name, member) in visible)
            templates = {block: p for (*key, block), p in self._templates.items() if key == [reduces, own]}
            moved = (self._moved(template, block, member) for block, template in templates.items())
            program = next((p for p in moved if p is not None), None) or self._first(member, reduces, own, visible)
            self.runtime.programs.append(program)
        self._programs[member, reduces, visible] = program
        return program

    def _first(self, member: str, reduces: bool, own: frozenset[str], visible: frozenset[str]) -> Program:
        """The first schedule of blocks that lie in their buckets like ``member``, made by the passes."""
        template = self._build(member, reduces, visible)
        self._templates[reduces, own, member] = template
        moved = self._moved(template, member, member)
        assert moved is not None, "a block lies where it lies"
        return moved

    def _moved(self, template: Program, block: str, member: str) -> Program | None:
        """The schedule that the passes have made for ``block``, for ``member``."""
        assert self.inside is not None
        in_block = self.inside.in_block
        names = {in_block(name, block): in_block(name, member) for name in self.written}
        return for_block(template, member, names, self.inside.blocks.num_after(member) * template.num_writes)

    def _build(self, member: str | None, reduces: bool, visible: frozenset[str]) -> Program:
        runtime = self.runtime
        graph, _ = copy_graph(self.graph)
        output = graph.output_node()
        if self.inside is not None and member is not None:
            inside, grad_of = self.inside, output.meta["grad_of"]
            output.meta["grad_of"] = tuple(name and inside.in_block(name, member) for name in grad_of)
        named = output.meta["grad_of"]
        output.meta["grad_of"] = tuple(None if name in visible else name for name in named)
        built = build(
            graph,
            runtime.plan if reduces else runtime.plan.microbatch(),
            runtime.passes,
            runtime.bind,
            self.compile_segment,
            name=f"backward_{len(runtime.programs)}",
            dump_dir=runtime.config.dump_dir,
        )
        runtime.programs.append(built)
        return built


def _own_inputs(gm: fx.GraphModule, names: Sequence[str | None], inside: Member | None) -> list[int]:
    """Positions among a backward graph's inputs of its block's trainable parameters."""
    if inside is None:
        return []
    found = []
    for position, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
        index = torch_private.input_index(node.meta.get("desc"))
        if index is not None and inside.path(names[index]) is not None:
            found.append(position)
    if not found:
        raise PassError(f"the backward graph of block {inside.name} gets none of its parameters")
    return found


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
