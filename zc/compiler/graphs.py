"""One graph of AOTAutograd's, and the schedules that run it: one per block that it serves; a backward's at a boundary,
and the one for microbatches where that is another.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import fx

from zc import torch_private
from zc.engine.program import Program, Segment, build
from zc.errors import PassError, ZcError
from zc.log import log
from zc.passes import verify
from zc.passes.base import Pass, copy_graph, returned_by
from zc.planning.plan import Plan
from zc.schedule import codegen

if TYPE_CHECKING:
    from zc.compiler.blocks import Block
    from zc.engine.core import Core
    from zc.engine.runtime import Runtime


class Traced(NamedTuple):
    """A graph of AOTAutograd's, with the arguments of an inner compiler. Its values have the marks of `mark_storages`.
    ``written``: positions of the inputs of Dynamo's graph that it writes in place; ``returned``: of those of which it
    returns views."""

    gm: fx.GraphModule
    kwargs: dict[str, Any]
    written: tuple[int, ...]
    returned: tuple[int, ...]

    @property
    def is_backward(self) -> bool:
        return bool(self.kwargs.get("is_backward"))

    @property
    def is_inference(self) -> bool:
        return bool(self.kwargs.get("is_inference"))


Hook = Callable[[Traced], Any]  # returns a boxed callable


def as_traced(gm: fx.GraphModule, example_inputs: Sequence[Any], kwargs: dict[str, Any]) -> Traced:
    """From the arguments that AOTAutograd calls its inner compiler with."""
    is_backward = bool(kwargs.get("is_backward"))
    had_regions = torch_private.inline_regions(gm)
    if is_backward:
        torch_private.apply_strides(gm, example_inputs)
    donated = torch_private.take_donated_inputs() if is_backward else ()
    mark_storages(gm.graph, () if had_regions else donated)  # the forward's regions may have saved a weight's view
    # it is Inductor's default; as an argument it would be part of the cache's key
    kwargs = {key: item for key, item in kwargs.items() if key != "get_decomp_fn"}
    return Traced(gm, kwargs, tuple(torch_private.written_inputs()), tuple(torch_private.returned_inputs()))


@dataclass
class Origin:
    """The graph of Dynamo's that AOTAutograd has made a forward and a backward of. ``names``: of the parameters among
    its inputs. ``block``: the one that it was traced for; None: it belongs to the very parameters that it is guarded
    by. ``with_grad``: positions of inputs that have a gradient; ``untrained``: of all others but sharded weights."""

    runtime: Runtime
    names: Sequence[str | None]
    untrained: Collection[int]
    with_grad: Collection[int]
    block: Block | None
    guard_identity: Callable[[], None]
    returned: list[int] = field(default_factory=list)  # inputs that are sharded weights, of which it returns views
    copied: set[str] = field(default_factory=set)  # inputs of the backward that are copies

    def name_of(self, node: fx.Node) -> str | None:
        """The parameter that an input of a forward or backward is.

        Relies on AOTAutograd's descriptors of inputs: ``placeholder.meta["desc"]`` is ``PlainAOTInput(idx)``
        (torch >= 2.9).
        """
        index = torch_private.input_index(node.meta.get("desc")) if node.op == "placeholder" else None
        return None if index is None else self.names[index]

    def is_of_block(self, node: fx.Node) -> bool:
        """Whether an input is a parameter of the block."""
        return self.block is not None and self.block.path(self.name_of(node)) is not None


class CompiledGraph(ABC):
    """A forward or backward graph. The passes make its schedule for the block that it was traced for; each other block
    gets that schedule, moved to its own buckets and proved again there. ``weights``: the parameters whose reads the
    schedule knows.

    The runtime owns the programs, in `owned`, since Dynamo keeps this object. A *variant* is what the programs of one
    member differ in. AOTAutograd calls this object, boxed (`torch_private.boxed`).
    """

    def __init__(self, origin: Origin, traced: Traced, weights: Collection[str]) -> None:
        self.runtime, self.block = origin.runtime, origin.block
        self._kind = "backward" if traced.is_backward else "forward"
        kwargs = {**traced.kwargs, "is_backward": traced.is_backward}
        self._compile_segment = partial(compile_segment, self.runtime, kwargs, self.block)
        self.graph = copy_graph(traced.gm.graph)
        self.graph.owning_module = traced.gm
        self.params = mark_weights(self.graph, origin, weights)  # that its schedules name
        self._own_inputs = own_inputs(self.graph, origin)
        self._programs: WeakValueDictionary[tuple[str | None, Hashable], Program] = WeakValueDictionary()
        self._templates: WeakValueDictionary[tuple[str, Hashable], Program] = WeakValueDictionary()
        self._num_left = self.runtime.num_left  # when the programs were made

    @property
    @abstractmethod
    def owned(self) -> list[Program]:
        """The runtime's list."""

    @abstractmethod
    def build(self, member: str | None, variant: Any) -> Program:
        """The program that the passes make for a member; None: for the graph as it was traced."""

    @property
    def traced_for(self) -> str | None:
        """The member that the graph was traced for; None: it is of no block."""
        return None if self.block is None else self.block.name

    def name_in(self, member: str | None, name: str) -> str:
        """The name of a member's parameter that stands for one of the graph's; None: of the graph's own block."""
        return name if self.block is None or member is None else self.block.in_block(name, member)

    def get(self, member: str | None, variant: Hashable) -> Program:
        if self._num_left != self.runtime.num_left:  # a slot that they name may have lost its parameter
            self._programs.clear()
            self._templates.clear()
            self._num_left = self.runtime.num_left
        program = self._programs.get((member, variant))
        if program is None:
            self._programs[member, variant] = program = self._make(member, variant)
        return program

    def _make(self, member: str | None, variant: Hashable) -> Program:
        if member is None or self.block is None:
            return self._add(self.build(member, variant))
        for (source, of), template in list(self._templates.items()):
            moved = self._moved(template, source, member) if of == variant else None
            if moved is not None:
                return self._add(moved)
        template = self._add(self.build(member, variant))
        self._templates[member, variant] = template
        moved = self._moved(template, member, member)
        assert moved is not None, "a block lies where it lies"
        return self._add(moved)

    def _add(self, program: Program) -> Program:
        self.owned.append(program)
        return program

    def _moved(self, template: Program, source: str, member: str) -> Program | None:
        """The schedule of member ``source``, moved to ``member``, with the same compiled segments. None: the places of
        their parameters differ by more than a shift."""
        assert self.block is not None
        graph = self.block.moved(template, source, member, self.params)
        if graph is None:
            return None
        if verify.PASS.name in template.seconds:
            verify.verify(graph, template.plan, self.runtime.features.pipelines.parts)
        name, pieces = f"{template.name} of {member}", codegen.load(graph)
        operations, seconds = template.operations, template.seconds
        return Program(name, graph, template.plan, pieces, operations, seconds, block=member, like=template)

    def _copy_for(self, member: str | None, gone: Collection[str] = ()) -> fx.Graph:
        """A copy of the graph whose inputs name the weights that a member reads: ``meta["weight"]`` those that are
        sharded, ``meta["buffer"]`` the others. None of those in ``gone``, whose names others have."""
        graph, plan = copy_graph(self.graph), self.runtime.plan
        where = plan.slot_of
        for node in graph.nodes:
            name = node.meta.pop("param", None)
            if name is None or name in gone or (self.block is not None and member is None):
                continue
            place = where.get(self.name_in(member, name))
            if place is None:  # a frozen one that has left since it was traced
                continue
            if plan.is_sharded(plan.bucket(place[0])):
                node.meta["weight"] = place
            else:
                node.meta["buffer"] = plan.weights_buffer(place[0])
        return graph

    def _run_passes(self, graph: fx.Graph, plan: Plan, passes: Sequence[Pass]) -> Program:
        runtime = self.runtime
        name, dump_dir = f"{self._kind}_{len(self.owned)}", runtime.config.dump_dir
        return build(graph, plan, passes, runtime.operations(), self._compile_segment, name=name, dump_dir=dump_dir)


class CompiledForward(CompiledGraph):
    """A forward graph whose weights come while it reads them, with one program for each member: sharded ones in
    windows, and under overlap_gather those that an update has gathered, where each bucket is first read."""

    def __init__(self, origin: Origin, traced: Traced) -> None:
        plan = origin.runtime.plan
        super().__init__(origin, traced, weights=plan.sharded_names or plan.slot_of)
        self.get(self.traced_for, None)  # while Dynamo's context is open

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        """A forward of the model has come to this graph: the program for the block whose parameters are among ``args``
        runs."""
        member = None
        if self.block is not None:
            member = self.block.member_of([args[position] for position in self._own_inputs])
            if member is None:
                raise ZcError(f"a forward of a block like {self.block.name} got parameters of several blocks")
        program = self.get(member, None)
        outputs = program(args, self.runtime.streams)
        self.runtime.weights.note_forward(program)
        return outputs

    @property
    def owned(self) -> list[Program]:
        return self.runtime.forwards

    def build(self, member: str | None, variant: None) -> Program:
        return self._run_passes(self._copy_for(member), self.runtime.plan, self.runtime.features.pipelines.forward)


class SavesAsEager:
    """Marks values of a joint graph that a backward may not derive again, since eager autograd saves them.

    It saves what an operation reads beside a value with a gradient. AOTAutograd may save an argument, a buffer or a
    frozen parameter instead, to derive such a value again, and code after a graph break or the loop may have written
    that by then (the next batch): a gradient would be made of the new values. Where the operation reads the input
    itself, eager autograd saves that, so its backward finds what was written, too, as does the compiled one.

    A clone of such an input (MoCo's ``queue.clone()``) is a value of its own. Inductor would put the input in its
    place: `keep_clones`, the first pass, gives it another name, which the marks take away again."""

    def __init__(self, origin: Origin) -> None:
        self._untrained, self._with_grad = frozenset(origin.untrained), frozenset(origin.with_grad)

    def keep_clones(self, graph: fx.Graph) -> None:
        inputs = graph.find_nodes(op="placeholder")
        indices = {node: torch_private.input_index(node.meta.get("desc")) for node in inputs}
        storages = {torch_private.storage_of(node) for node in inputs if indices[node] in self._untrained}
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
            if torch_private.storage_of(node.all_input_nodes[0]) in storages - {None}:
                node.target = torch.ops.prims.clone.default

    def __repr__(self) -> str:  # part of the keys of its passes
        return f"zc {sorted(self._untrained)} {sorted(self._with_grad)}"

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.prims.clone.default):
            node.target = torch.ops.aten.clone.default
        inputs = graph.find_nodes(op="placeholder")
        index_of = {node: torch_private.input_index(node.meta.get("desc")) for node in inputs}
        derived = {node for node, index in index_of.items() if index in self._untrained}  # of them alone, or not
        storages = {torch_private.storage_of(node) for node in derived}
        with_grad = {node for node, index in index_of.items() if index in self._with_grad}
        of_backward = {node for node, index in index_of.items() if index is None}
        for node in graph.nodes:
            reads = node.all_input_nodes
            if node.op == "output" or not of_backward.isdisjoint(reads):
                of_backward.add(node)
            elif not with_grad.isdisjoint(reads):
                with_grad.add(node)
                for read in reads:
                    number = torch_private.storage_of(read)
                    if read in derived and number is not None:
                        torch_private.keep_for_backward(node if number in storages else read)
            elif not derived.isdisjoint(reads):
                derived.add(node)


def keep_from_writes(origin: Origin, traced: Traced) -> Traced:
    """A forward graph whose backward gets copies of values in the memory of inputs that the graph writes before it
    reads them. AOTAutograd saves such an input to derive from it again what eager autograd has saved (torch 2.11 to
    2.15): a gradient would be made of the new values.

    `CompiledBackward` refuses a buffer that the backward writes, too: its write would go to the copy."""
    before = traced.gm.graph
    written = {
        node.meta["storage"]
        for node in before.find_nodes(op="placeholder")
        if "storage" in node.meta and torch_private.input_index(node.meta.get("desc")) in traced.written
    }
    first = torch_private.num_forward_outputs()
    saved = returned_by(before)[first:] if first is not None else []
    if not any(isinstance(node, fx.Node) and node.meta.get("storage") in written for node in saved):
        return traced
    graph = copy_graph(before)
    outputs = returned_by(graph)
    inputs = graph.find_nodes(op="placeholder")
    fresh = max(node.meta.get("storage", 0) for node in graph.nodes) + 1
    copies: dict[fx.Node, fx.Node] = {}
    for k, node in enumerate(outputs[first:], first or 0):
        if not (isinstance(node, fx.Node) and node.meta.get("storage") in written):
            continue
        if node not in copies:
            origin.copied.add(node.name)
            with graph.inserting_after(inputs[-1] if node.op == "placeholder" else node):
                copies[node] = graph.call_function(torch.ops.aten.clone.default, (node,))
            val = torch.ops.aten.clone.default(node.meta["val"])
            copies[node].meta = {"val": val, "storage": fresh + len(copies)}
        outputs[k] = copies[node]
    graph.output_node().args = (tuple(outputs),)
    return traced._replace(gm=fx.GraphModule(traced.gm, graph))


def own_inputs(graph: fx.Graph, origin: Origin) -> list[int]:
    """Positions among a graph's inputs of its block's parameters in buckets."""
    if origin.block is None:
        return []
    placeholders = graph.find_nodes(op="placeholder")
    positions = [k for k, node in enumerate(placeholders) if origin.is_of_block(node)]
    if not positions:
        raise PassError(f"a graph of block {origin.block.name} gets none of its parameters")
    return positions


def mark_weights(graph: fx.Graph, origin: Origin, weights: Collection[str]) -> list[str]:
    """``meta["param"]`` of each input that is one of the parameters ``weights``: its name. Returns these names."""
    names: list[str] = []
    for node in graph.find_nodes(op="placeholder"):
        name = origin.name_of(node)
        if name is not None and name in weights:
            node.meta["param"] = name
            names.append(name)
    return names


def mark_storages(graph: fx.Graph, donated: Sequence[int]) -> None:
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


MAX_PROGRAMS = 8  # of one backward graph and block: for other sets of hooks all of its gradients go through hooks


class _Variant(NamedTuple):
    """``visible``: the gradients that autograd has to see, named as in the block that was traced. ``keeps_graph``:
    another backward may read what this one gets, so it overwrites none of it. ``gone``: the parameters that others have
    replaced since the forward (`zc.recompile`), plain ones with memory of their own."""

    reduces: bool
    visible: frozenset[str]
    keeps_graph: bool
    gone: frozenset[str] = frozenset()


class CompiledBackward(CompiledGraph):
    """A backward graph, with its programs by member and variant."""

    def __init__(self, origin: Origin, traced: Traced) -> None:
        super().__init__(origin, traced, weights=origin.runtime.plan.sharded_names)
        _refuse_writes_to_copies(self.graph, origin)
        inputs = enumerate(self.graph.find_nodes(op="placeholder"))
        self._reads = [(k, node.meta["param"]) for k, node in inputs if "param" in node.meta]  # sharded weights
        self.grad_of = _grad_of(self.graph, origin)
        self.written = [name for name in self.grad_of if name is not None]
        self._all_written = frozenset(self.written)
        self.params += self.written
        # by member: the names of its parameters whose gradients the graph makes -> the names in `written`
        self._names: dict[str | None, dict[str, str]] = {}
        self._has_donated = any(node.meta.get("donated") for node in self.graph.nodes)
        variant = _Variant(self.runtime.current_plan.reduces, frozenset(), keeps_graph=False)
        self.get(self.traced_for, variant)  # while Dynamo's context is open

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        """A backward of autograd's has come to this graph."""
        try:
            program = self.program(args)
        except ReferenceError:
            raise ZcError(
                "backward() through a model that is gone: keep the model or its optimizer until the last backward"
            ) from None
        if torch_private.keeps_graph() and torch_private.before_double_backward(_refuse_double_backward):
            self.runtime.with_graph.update(self.runtime.params)
        return self.runtime.run_program(program, args)

    def program(self, args: Sequence[Any]) -> Program:
        """The program for the backward that runs now.

        Some gradients leave the graph as PyTorch has them, and come back, if at all, through the parameter's own hook:

        - those that autograd has to see, or to sum with others of the parameter;
        - all, where the block can't be told, since hooks on saved tensors have put copies in place of its parameters.
          Stage 3 reads these copies;
        - all, where the block has programs for `MAX_PROGRAMS` - 2 other sets of such gradients: the two last programs
          are for all further sets.
        """
        runtime = self.runtime
        keeps_graph = self._has_donated and torch_private.keeps_graph()
        variant, member = _Variant(runtime.current_plan.reduces, self._all_written, keeps_graph), None
        if self.block is not None:
            member = self.block.member_of([args[position] for position in self._own_inputs])
            if member is None:
                return self.get(None, variant)
        if member not in self._names:
            self._names[member] = {self.name_in(member, name): name for name in self.written}
        names = self._names[member]
        params, written = runtime.params, names.keys()
        trained = written & params.keys() if runtime.num_left else written  # frozen ones may have the others' names now
        seen = torch_private.needed_by_autograd({name: params[name] for name in trained}) | (written - trained)
        visible = frozenset(names[name] for name in seen | (written & runtime.summed_by_autograd))
        gone = self._gone(member, args) if runtime.num_left else frozenset[str]()
        variant = variant._replace(visible=visible, gone=gone)
        is_new = (member, variant) not in self._programs
        if is_new and sum(other == member for other, _ in self._programs) >= MAX_PROGRAMS - 2:
            variant = variant._replace(visible=self._all_written)
            runtime.say_once(
                f"a backward graph met more than {MAX_PROGRAMS - 2} sets of parameters with hooks, or of inputs of "
                "torch.autograd.grad: for further sets all of its gradients come through hooks, without overlap"
            )
        return self.get(member, variant)

    def _gone(self, member: str | None, args: Sequence[Any]) -> frozenset[str]:
        """The weights that the graph reads, and that have left the plan since its forward: others have their names."""
        placed = self.runtime.placed
        return frozenset(name for k, name in self._reads if args[k] is not placed.get(self.name_in(member, name)))

    @property
    def owned(self) -> list[Program]:
        return self.runtime.programs

    def build(self, member: str | None, variant: _Variant) -> Program:
        runtime, graph = self.runtime, self._copy_for(member, variant.gone)
        graph.output_node().meta["grad_of"] = tuple(
            None if name is None or name in variant.visible else self.name_in(member, name) for name in self.grad_of
        )
        if variant.keeps_graph:
            for node in graph.find_nodes(op="placeholder"):
                node.meta["donated"] = False
        plan = runtime.plan if variant.reduces else runtime.plan.microbatch()
        return self._run_passes(graph, plan, runtime.features.pipelines.backward)


def _refuse_writes_to_copies(graph: fx.Graph, origin: Origin) -> None:
    """Relies on AOTAutograd writing inputs by ``copy_`` alone (2.11 to 2.15)."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        buffer = node.args[0]
        if isinstance(buffer, fx.Node) and buffer.name in origin.copied:
            raise ZcError(
                f"a buffer of shape {list(buffer.meta['val'].shape)} is written by the compiled forward and by its "
                "backward too: the backward has a copy, so its write would be lost. Let each write a buffer of its "
                'own, or put one of them under @torch.compiler.disable; or zc.compile(..., backend="eager")'
            )


def _refuse_double_backward() -> None:
    raise ZcError(
        "the backward of this model is differentiated (create_graph=True: a gradient penalty, forces, MAML), and "
        'torch.compile makes no graph for that: zc.compile(..., backend="eager") trains it'
    )


def _grad_of(graph: fx.Graph, origin: Origin) -> tuple[str | None, ...]:
    """Which parameter's gradient each output of the graph is. That of a frozen parameter, which something else asks
    for, goes through autograd, and zc.recompile is named there.

    Relies on AOTAutograd's descriptors: ``output.meta["desc"][i]`` is ``GradAOTOutput(grad_of=PlainAOTInput(idx))``
    with idx an index into the inputs of the backend call (torch >= 2.9).
    """
    returned = returned_by(graph)
    indices = [torch_private.grad_of_index(desc) for desc in graph.output_node().meta.get("desc", ())]
    if len(indices) != len(returned):
        raise PassError(f"the backward graph has {len(returned)} outputs and {len(indices)} descriptors")
    names = [origin.names[index] if index is not None else None for index in indices]
    return tuple(name if name in origin.runtime.params else None for name in names)


# --- segments: Inductor compiles each, and equal ones once ---


def interpret(gm: fx.GraphModule) -> Segment:
    """Runs the graph op by op."""

    def run(args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        return gm.forward(*inputs)

    return torch_private.boxed(run)


def compile_segment(core: Core, kwargs: dict[str, Any], block: Block | None, gm: fx.GraphModule) -> Segment:
    """Compiles one segment with Inductor, or with backend="aot_eager" runs it op by op. Layers of one shape have
    identical segments, which are compiled once for each global state that Dynamo guards on: under another one Inductor
    may choose other kernels. ``block``: that of the segment, for the log.

    Relies on ``compile_fx_inner(gm, example_inputs, **kwargs)``; on its returning a boxed callable; and on
    ``output.meta["user_visible_output_idxs"]`` and ``["original_output_strides"]``, by which Inductor keeps the strides
    that the next segment was traced with (2.11 to 2.15).
    """
    if core.config.backend == "aot_eager":
        return interpret(gm)
    key = canonical_key(gm)
    for is_same_state, segment in core.compiled_segments.get(key, ()) if key is not None else ():
        if is_same_state():
            return segment
    log.info(
        "%sInductor compiles segment %d, of %d operations (%s)",
        "" if block is None else f"{block}: ",
        len(core.compiled_segments),
        len(gm.graph.nodes),
        "backward" if kwargs["is_backward"] else "forward",
    )
    output = gm.graph.output_node()
    outputs: Any = output.args[0]
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    output.meta["original_output_strides"] = [_strides_of(n.meta.get("val")) for n in outputs]
    example_inputs = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    kwargs = {**kwargs, "static_input_idxs": ()}
    kwargs.pop("boxed_forward_device_index", None)  # by which a whole forward reports its device
    with torch_private.apart_from_the_whole(gm.meta["donated"]):
        compiled: Segment = torch_private.compile_inner(gm, example_inputs, core.inductor_options, **kwargs)
    if key is not None:
        core.compiled_segments.setdefault(key, []).append((torch_private.global_state_check(), compiled))
    return compiled


def canonical_key(gm: fx.GraphModule) -> str | None:
    """Hash of a segment's text and of every value's shape, stride, dtype and device. None if sizes are symbolic or
    constants are attached: Inductor's own cache compares those."""
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


def _strides_of(val: Any) -> Any:
    return val.stride() if isinstance(val, torch.Tensor) and val.layout == torch.strided else None


def naming_limits(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, whose compiled code has no forward-mode derivative: the error names the backend that has one."""

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except NotImplementedError as error:
            if not torch_private.lacks_forward_mode(error):
                raise
            raise ZcError(
                "torch.autograd.forward_ad through this model: what torch.compile has compiled has no forward-mode "
                'derivative. Give zc.compile backend="eager", or use torch.func.jvp, which runs the model uncompiled'
            ) from error

    return run
