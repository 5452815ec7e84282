"""One graph of AOTAutograd's, and the schedules that run it: one per block that it serves; a backward's at a boundary,
and the one for microbatches where that is another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import fx

from zc import torch_private
from zc.compiler.segments import compile_segment
from zc.compiler.traced import Origin, Traced, grad_of, mark_weights, own_inputs, refuse_writes_to_copies
from zc.engine.program import Program, build
from zc.errors import ZcError
from zc.passes import verify
from zc.passes.base import Pass, copy_graph
from zc.planning.plan import Plan
from zc.schedule import codegen


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
        refuse_writes_to_copies(self.graph, origin)
        inputs = enumerate(self.graph.find_nodes(op="placeholder"))
        self._reads = [(k, node.meta["param"]) for k, node in inputs if "param" in node.meta]  # sharded weights
        self.grad_of = grad_of(self.graph, origin)
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


def _refuse_double_backward() -> None:
    raise ZcError(
        "the backward of this model is differentiated (create_graph=True: a gradient penalty, forces, MAML), and "
        'torch.compile makes no graph for that: zc.compile(..., backend="eager") trains it'
    )


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
