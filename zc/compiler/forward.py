"""One forward graph of stage 3, and the schedules that run it: one per block that it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import fx

from zc.compiler.backward import for_block, mark_storages, mark_weights, own_inputs
from zc.compiler.blocks import Member
from zc.compiler.segments import segment_compiler
from zc.engine.program import Program, build
from zc.errors import ZcError
from zc.passes import insert_events, outline_segments, place_on_streams, verify, window_weights
from zc.passes.base import copy_graph

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime

_PASSES = (window_weights.PASS, outline_segments.PASS, place_on_streams.PASS, insert_events.PASS, verify.PASS)


class CompiledForward:
    """A forward graph whose weights come in windows. Of a graph that runs for several blocks each has its program."""

    def __init__(
        self,
        runtime: Runtime,
        names: Sequence[str | None],
        gm: fx.GraphModule,
        kwargs: dict[str, Any],
        inside: Member | None = None,
    ) -> None:
        self.runtime, self.inside = runtime, inside
        self._compile_segment = segment_compiler(runtime, kwargs, is_backward=False)
        self._graph, _ = copy_graph(gm.graph)
        self._graph.owning_module = gm
        mark_storages(self._graph, donated=())
        self._read = mark_weights(self._graph, names)
        self._own = own_inputs(gm, names, inside)
        # by block; owned by runtime.forwards, since Dynamo keeps this object
        self._programs: WeakValueDictionary[str | None, Program] = WeakValueDictionary()
        self._templates: WeakValueDictionary[str, Program] = WeakValueDictionary()
        self._get(None if inside is None else inside.name)  # while Dynamo's context is open

    def program(self, args: Sequence[Any]) -> Program:
        """The one for the block whose parameters are among ``args``."""
        if self.inside is None:
            return self._get(None)
        member = self.inside.blocks.member_of([args[position] for position in self._own])
        if member is None:
            raise ZcError(f"a forward of a block like {self.inside.name} got parameters of several blocks")
        return self._get(member)

    def _get(self, member: str | None) -> Program:
        program = self._programs.get(member)
        if program is None:
            self._programs[member] = program = self._make(member)
            self.runtime.forwards.append(program)
        return program

    def _make(self, member: str | None) -> Program:
        if self.inside is not None and member is not None:
            in_block = self.inside.in_block
            for block, template in self._templates.items():
                names = {in_block(name, block): in_block(name, member) for name in self._read}
                moved = for_block(template, member, names, turn=0)
                if moved is not None:
                    return moved
        program = self._build(member)
        if member is not None:
            self._templates[member] = program
        return program

    def _build(self, member: str | None) -> Program:
        runtime, inside = self.runtime, self.inside
        graph, _ = copy_graph(self._graph)
        where = runtime.plan.slot_of()
        for node in graph.nodes:
            name = node.meta.pop("param", None)
            if name is not None:
                own = inside.in_block(name, member) if inside is not None and member is not None else name
                node.meta["weight"] = where[own]
        passes = [p._replace(requires=frozenset()) for p in _PASSES if runtime.config.verify or p.name != "verify"]
        number = len(runtime.forwards)
        built = build(
            graph, runtime.plan, passes, runtime.bind, self._compile_segment, name=f"forward_{number}",
            dump_dir=runtime.config.dump_dir,
        )  # fmt: skip
        built.block = member
        return built
