"""One backward graph of AOTAutograd's, and the schedules that run it: one per block that it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import fx

from zc import torch_private
from zc.compiler.blocks import Member
from zc.compiler.segments import segment_compiler
from zc.engine.program import Program, build
from zc.errors import PassError
from zc.passes import verify
from zc.passes.base import copy_graph
from zc.schedule import codegen
from zc.schedule.rebase import rebased, shifts

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime

# the block (None: the one that was traced, or no block), whether it reduces, the gradients that autograd sees
_Key = tuple[str | None, bool, frozenset[str]]
MAX_PROGRAMS = 8  # of one backward graph and block: for other sets of hooks all of its gradients go through hooks


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
        # a frozen parameter that asks for a gradient: it comes through autograd, and zc.recompile is named
        self.graph = _annotate(gm, [name if name in runtime.params else None for name in names])
        self._read = mark_weights(self.graph, names) if runtime.plan.placement.shards_weights else []
        written = self.graph.output_node().meta["grad_of"]
        self.written = [name for name in written if name is not None]
        # owned by runtime.programs
        self._programs: WeakValueDictionary[_Key, Program] = WeakValueDictionary()
        self._own = own_inputs(gm, names, inside)
        # by whether it reduces, what autograd sees and the block that the passes have made it for
        self._templates: WeakValueDictionary[tuple[bool, frozenset[str], str], Program] = WeakValueDictionary()
        self._get(None if inside is None else inside.name, frozenset())  # while Dynamo's context is open

    def program(self, args: Sequence[Any]) -> Program:
        """The one for the backward that runs now. A gradient that autograd has to see or to sum leaves the graph as
        PyTorch has it, and comes back, if at all, through the parameter's own hook. So do all of them where the block
        can't be told, since hooks on saved tensors have put copies in place of its parameters; stage 3 reads these
        copies. And so may any other gradient: a block has at most `MAX_PROGRAMS`, and the two last ones are for all
        further sets."""
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
        names = {in_block(name, block): in_block(name, member) for name in (*self.written, *self._read)}
        return for_block(template, member, names, self.inside.blocks.num_after(member) * template.num_writes)

    def _build(self, member: str | None, reduces: bool, visible: frozenset[str]) -> Program:
        runtime = self.runtime
        graph, _ = copy_graph(self.graph)
        output = graph.output_node()
        if self.inside is not None and member is not None:
            inside, grad_of = self.inside, output.meta["grad_of"]
            output.meta["grad_of"] = tuple(name and inside.in_block(name, member) for name in grad_of)
        where = runtime.plan.slot_of()
        for node in graph.nodes:
            name = node.meta.pop("param", None)
            if name is not None and self.inside is None:
                node.meta["weight"] = where[name]
            elif name is not None and self.inside is not None and member is not None:
                node.meta["weight"] = where[self.inside.in_block(name, member)]
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


def for_block(template: Program, block: str, names: Mapping[str, str], turn: int) -> Program | None:
    """The program of another block, whose parameters ``names`` has by those of the template's, with the template's
    compiled segments. None: the places of its parameters differ by more than a shift."""
    moves = shifts(template.plan, names)
    if moves is None:
        return None
    graph = rebased(template.graph, template.plan, names, moves, turn)
    if any(record.name == verify.PASS.name for record in template.records):
        verify.verify(graph, template.plan)
    name, run = f"{template.name} of {block}", codegen.load(graph)
    return Program(name, graph, template.plan, run, template.operations, template.records, block=block, like=template)


def own_inputs(gm: fx.GraphModule, names: Sequence[str | None], inside: Member | None) -> list[int]:
    """Positions among a backward graph's inputs of its block's parameters in buckets."""
    if inside is None:
        return []
    found: list[int] = []
    for position, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
        index = torch_private.input_index(node.meta.get("desc"))
        if index is not None and inside.path(names[index]) is not None:
            found.append(position)
    if not found:
        raise PassError(f"a graph of block {inside.name} gets none of its parameters")
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
    mark_storages(graph, torch_private.donated_inputs())
    return graph


def mark_weights(graph: fx.Graph, names: Sequence[str | None]) -> list[str]:
    """``meta["param"]`` of each input that is a parameter in a bucket: its name. Returns these names.

    Relies on AOTAutograd's descriptors of inputs, forward and backward: ``placeholder.meta["desc"]`` is
    ``PlainAOTInput(idx)`` (torch >= 2.9).
    """
    marked: list[str] = []
    for node in graph.nodes:
        index = torch_private.input_index(node.meta.get("desc")) if node.op == "placeholder" else None
        name = names[index] if index is not None else None
        if name is not None:
            node.meta["param"] = name
            marked.append(name)
    return marked


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
