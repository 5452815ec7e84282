"""One graph of AOTAutograd's, and the schedules that run it: one per block that it serves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from torch import fx

from zc import torch_private
from zc.compiler.blocks import Member
from zc.compiler.segments import segment_compiler
from zc.engine.program import Program, build
from zc.errors import PassError
from zc.passes import verify
from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule import codegen
from zc.schedule.rebase import rebased, shifts

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime


class Traced(NamedTuple):
    """A graph of AOTAutograd's, with the arguments of an inner compiler. Its values have the marks of `mark_storages`.
    ``written``: positions of the inputs of Dynamo's graph that it writes in place."""

    gm: fx.GraphModule
    kwargs: dict[str, Any]
    written: tuple[int, ...]

    @property
    def is_backward(self) -> bool:
        return bool(self.kwargs.get("is_backward"))

    @property
    def is_inference(self) -> bool:
        return bool(self.kwargs.get("is_inference"))


Hook = Callable[[Traced], Any]  # returns a boxed callable


def as_traced(gm: fx.GraphModule, example_inputs: Sequence[Any], kwargs: dict[str, Any]) -> Traced:
    """What AOTAutograd hands to its inner compiler."""
    is_backward = bool(kwargs.get("is_backward"))
    if is_backward:
        torch_private.adopt_strides(gm, example_inputs)
    mark_storages(gm.graph, torch_private.take_donated_inputs() if is_backward else ())
    # without it Inductor takes its default, which it is; as an argument it would be part of the cache's key
    kwargs = {key: item for key, item in kwargs.items() if key != "get_decomp_fn"}
    return Traced(gm, kwargs, tuple(torch_private.written_inputs()))


class CompiledGraph(ABC):
    """A forward or backward graph. The passes make its schedule for the block that it was traced for; each other block
    gets that schedule moved to its own buckets, and proved again there. ``weights``: the parameters whose reads the
    schedule knows.

    The runtime owns the programs, in `owned`, since Dynamo keeps this object. A *variant* is what the programs of one
    block differ in.
    """

    def __init__(
        self,
        runtime: Runtime,
        names: Sequence[str | None],
        gm: fx.GraphModule,
        kwargs: dict[str, Any],
        inside: Member | None,
        *,
        is_backward: bool,
        weights: Collection[str],
    ) -> None:
        self.runtime, self.inside = runtime, inside
        self._compile_segment = segment_compiler(runtime, kwargs, inside, is_backward=is_backward)
        self.graph, _ = copy_graph(gm.graph)
        self.graph.owning_module = gm
        self.read = mark_weights(self.graph, names, weights)
        self._own = own_inputs(gm, names, inside)
        self._programs: WeakValueDictionary[tuple[str | None, Hashable], Program] = WeakValueDictionary()
        self._templates: WeakValueDictionary[tuple[str, Hashable], Program] = WeakValueDictionary()

    @property
    @abstractmethod
    def owned(self) -> list[Program]:
        """The runtime's list."""

    @abstractmethod
    def build(self, member: str | None, variant: Any) -> Program:
        """The program that the passes make for a block; None: for the graph as it was traced."""

    @abstractmethod
    def names_moved(self) -> Iterable[str]:
        """The parameters that a schedule of this graph names."""

    def turn(self, template: Program, member: str) -> int:
        """How many buckets pass through the ring before this block's."""
        return 0

    def member_of(self, args: Sequence[Any]) -> str | None:
        """The block whose parameters are among ``args``; None: of none, or of several."""
        assert self.inside is not None
        return self.inside.blocks.member_of([args[position] for position in self._own])

    def num_variants(self, member: str | None) -> int:
        return sum(block == member for block, _ in self._programs)

    def has(self, member: str | None, variant: Hashable) -> bool:
        return (member, variant) in self._programs

    def get(self, member: str | None, variant: Hashable) -> Program:
        program = self._programs.get((member, variant))
        if program is None:
            self._programs[member, variant] = program = self._make(member, variant)
        return program

    def _make(self, member: str | None, variant: Hashable) -> Program:
        if member is None or self.inside is None:
            return self._add(self.build(member, variant))
        for (block, of), template in list(self._templates.items()):
            moved = self._moved(template, block, member) if of == variant else None
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

    def _moved(self, template: Program, block: str, member: str) -> Program | None:
        """The schedule that the passes have made for ``block``, for ``member``, with the same compiled segments. None:
        the places of their parameters differ by more than a shift."""
        assert self.inside is not None
        in_block = self.inside.in_block
        names = {in_block(name, block): in_block(name, member) for name in self.names_moved()}
        moves = shifts(template.plan, names)
        if moves is None:
            return None
        graph = rebased(template.graph, template.plan, names, moves, self.turn(template, member))
        if any(record.name == verify.PASS.name for record in template.records):
            verify.verify(graph, template.plan)
        name, run = f"{template.name} of {member}", codegen.load(graph)
        operations, records = template.operations, template.records
        return Program(name, graph, template.plan, run, operations, records, block=member, like=template)

    def _copy_for(self, member: str | None) -> fx.Graph:
        """A copy of the graph with the weights that a block reads: sharded ones by their places, any other by its
        buffer."""
        graph, _ = copy_graph(self.graph)
        plan = self.runtime.plan
        where = plan.slot_of()
        for node in graph.nodes:
            name = node.meta.pop("param", None)
            if name is None or (self.inside is not None and member is None):
                continue
            place = where[name if self.inside is None or member is None else self.inside.in_block(name, member)]
            if plan.is_sharded(plan.bucket(place[0])):
                node.meta["weight"] = place
            else:
                node.meta["buffer"] = plan.weights_buffer(place[0])
        return graph

    def _built(self, graph: fx.Graph, plan: Plan, passes: Sequence[Pass], kind: str) -> Program:
        runtime = self.runtime
        name, dump_dir = f"{kind}_{len(self.owned)}", runtime.config.dump_dir
        return build(graph, plan, passes, runtime.bind, self._compile_segment, name=name, dump_dir=dump_dir)


def own_inputs(gm: fx.GraphModule, names: Sequence[str | None], inside: Member | None) -> list[int]:
    """Positions among a graph's inputs of its block's parameters in buckets."""
    if inside is None:
        return []
    positions: list[int] = []
    for position, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
        index = torch_private.input_index(node.meta.get("desc"))
        if index is not None and inside.path(names[index]) is not None:
            positions.append(position)
    if not positions:
        raise PassError(f"a graph of block {inside.name} gets none of its parameters")
    return positions


def mark_weights(graph: fx.Graph, names: Sequence[str | None], weights: Collection[str]) -> list[str]:
    """``meta["param"]`` of each input that is one of the parameters ``weights``: its name. Returns these names.

    Relies on AOTAutograd's descriptors of inputs, forward and backward: ``placeholder.meta["desc"]`` is
    ``PlainAOTInput(idx)`` (torch >= 2.9).
    """
    marked: list[str] = []
    for node in graph.nodes:
        index = torch_private.input_index(node.meta.get("desc")) if node.op == "placeholder" else None
        name = names[index] if index is not None else None
        if name is not None and name in weights:
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
