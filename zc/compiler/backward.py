"""A backward graph: its program at a boundary, and the one for microbatches where that is another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from zc import torch_private
from zc.compiler.graphs import CompiledGraph, Origin, Traced
from zc.engine.program import Program
from zc.errors import PassError
from zc.passes.base import returned_by

MAX_PROGRAMS = 8  # of one backward graph and block: for other sets of hooks all of its gradients go through hooks


class _Variant(NamedTuple):
    """``visible``: the gradients that autograd has to see, named as in the block that was traced. ``keeps_graph``:
    another backward may read what this one gets, so it overwrites none of it."""

    reduces: bool
    visible: frozenset[str]
    keeps_graph: bool


class CompiledBackward(CompiledGraph):
    """A backward graph, with its programs by member and variant."""

    def __init__(self, origin: Origin, traced: Traced) -> None:
        super().__init__(origin, traced, weights=origin.runtime.plan.sharded_names)
        self.grad_of = _grad_of(self.graph, origin)
        self.written = [name for name in self.grad_of if name is not None]
        self.params += self.written
        self._has_donated = any(node.meta.get("donated") for node in self.graph.nodes)
        self.get(self.traced_for, self._variant(frozenset(), keeps_graph=False))  # while Dynamo's context is open

    def program(self, args: Sequence[Any]) -> Program:
        """The program for the backward that runs now.

        Some gradients leave the graph as PyTorch has them, and come back, if at all, through the parameter's own hook:

        - those that autograd has to see, or to sum with others of the parameter;
        - all, where the block can't be told, since hooks on saved tensors have put copies in place of its parameters.
          Stage 3 reads these copies;
        - all, where the block has programs for `MAX_PROGRAMS` - 2 other sets of such gradients: the two last programs
          are for all further sets.
        """
        runtime, every = self.runtime, frozenset(self.written)
        keeps_graph = self._has_donated and torch_private.keeps_graph()
        member = None
        if self.block is not None:
            member = self.member_of(args)
            if member is None:
                return self.get(None, self._variant(every, keeps_graph))
        names = {self.name_in(member, name): name for name in self.written}
        seen = torch_private.needed_by_autograd({name: runtime.params[name] for name in names})
        visible = frozenset(names[name] for name in seen | runtime.summed_by_autograd.intersection(names))
        variant = self._variant(visible, keeps_graph)
        if not self.has(member, variant) and self.num_variants(member) >= MAX_PROGRAMS - 2:
            variant = self._variant(every, keeps_graph)
            runtime.say_once(
                f"a backward graph met more than {MAX_PROGRAMS - 2} sets of parameters with hooks, or of inputs of "
                "torch.autograd.grad: for further sets all of its gradients come through hooks, without overlap"
            )
        return self.get(member, variant)

    def _variant(self, visible: frozenset[str], keeps_graph: bool) -> _Variant:
        return _Variant(self.runtime.current_plan.reduces, visible, keeps_graph)

    @property
    def owned(self) -> list[Program]:
        return self.runtime.programs

    def build(self, member: str | None, variant: _Variant) -> Program:
        runtime, graph = self.runtime, self._copy_for(member)
        graph.output_node().meta["grad_of"] = tuple(
            None if name is None or name in variant.visible else self.name_in(member, name) for name in self.grad_of
        )
        if variant.keeps_graph:
            for node in graph.find_nodes(op="placeholder"):
                node.meta["donated"] = False
        plan = runtime.plan if variant.reduces else runtime.plan.microbatch()
        return self._run_passes(graph, plan, runtime.features.pipelines.backward)


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
