"""The Dynamo backend: a graph of the model in, compiled forward and backward schedules out.

Dynamo calls `make_backend`'s function with a graph; it calls Inductor's ``compile_fx`` with a hook in place of the
inner compiler. AOTAutograd traces, decomposes and partitions as always; where the hook gets the backward graph, that
goes through zc's passes, and only the segments between gradient operations go on to Inductor.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from zc import torch_private
from zc.compiler.backward import CompiledBackward
from zc.compiler.blocks import Blocks, Member
from zc.compiler.forward import CompiledForward
from zc.compiler.graphs import Hook, Traced, as_traced
from zc.compiler.segments import interpret
from zc.engine import param_grads
from zc.engine.overlap_gather import WeightGather
from zc.errors import ZcError
from zc.log import log, tell

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime


MAX_SHARED = 6  # graphs of one kind of block, for other sizes or flags: further ones belong to one block each


def make_backend(runtime: Runtime, blocks: Blocks | None = None) -> Callable[..., Any]:
    """A backend for ``torch.compile`` whose backward graphs reduce gradients as ``runtime``'s plan says. With
    ``blocks`` it compiles those of one kind, and one graph runs for all of them.

    Lifetime: the backend and everything that it compiles hold the runtime weakly, and own no program. Dynamo keeps
    compiled graphs by code object, in C, out of sight of Python's collector, so whatever they own would outlive the
    model. When a parameter dies, the graphs that are guarded by its identity die with it.
    """
    on_cpu = runtime.plan.buckets[0].device.type == "cpu"
    if on_cpu and runtime.config.backend == "inductor":
        torch_private.probe_vector_units()  # while the model is prepared and traced
    runtime = weakref.proxy(runtime)
    num_shared = 0

    def zc_backend(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        param_grads.refuse_compiled_autograd()
        if not runtime.ledger.graphs and runtime.config.backend == "inductor" and runtime.group.rank == 0:
            tell("compiles in the first step; ZC_LOG=info in the environment says what, ZC_LOG=error nothing")
        runtime.ledger.graphs.append(torch_private.compile_id())
        name_of = {id(param): name for name, param in runtime.placed.items()}  # zc.recompile may have added some
        names = [name_of.get(id(value)) for value in inputs]
        if isinstance(runtime.weights, WeightGather) and runtime.plan.overlap_gather:
            runtime.weights.waits.is_compiled(names)
        nonlocal num_shared
        inside = _one_block(blocks, names) if blocks is not None and num_shared < MAX_SHARED else None
        num_shared += inside is not None
        torch_private.guard_identity(gm, [None if inside is not None and inside.path(n) else n for n in names])
        compiling = _Compiling(runtime, names, inside, partial(torch_private.guard_identity, gm, names))
        hook = partial(_compile, compiling)
        options = runtime.inductor_options
        if runtime.config.backend == "aot_eager":
            return torch_private.compile_graph(gm, inputs, _inner_compiler(hook), options)
        from zc.compiler.saved import cached  # imports Inductor, which takes seconds

        together = torch_private.compiling_kernels_together if on_cpu else contextlib.nullcontext
        with cached(hook) as kept, together():
            return torch_private.compile_graph(gm, inputs, _inner_compiler(kept), options, is_cached=True)

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


def _inner_compiler(hook: Hook) -> Callable[..., Any]:
    return lambda gm, example_inputs, **kwargs: hook(as_traced(gm, example_inputs, kwargs))


def _compile(compiling: _Compiling, traced: Traced) -> Any:
    runtime, names = compiling.runtime, compiling.names
    gm, kwargs = traced.gm, _without_cuda_graphs(runtime, traced.kwargs)
    if not traced.is_backward:
        if compiling.inside is not None and not traced.is_inference and not _saves_own(compiling, gm):
            compiling.guard_identity()
            compiling.inside = None
        if runtime.plan.sharded:
            return _compile_in_windows(compiling, gm, kwargs, traced.written)
        if runtime.plan.overlap_gather:
            return _compile_after_gathers(compiling, gm, kwargs)
        return _whole(runtime, gm, kwargs, compiling.inside)
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


def _whole(
    runtime: Runtime,
    gm: fx.GraphModule,
    kwargs: dict[str, Any],
    inside: Member | None = None,
) -> Any:
    """A forward or inference graph: Inductor's as it is, or op by op."""
    if runtime.config.backend == "aot_eager":
        return interpret(gm)
    where = "" if inside is None else f"{inside}: "
    log.info("%sInductor compiles a forward graph of %d operations", where, len(gm.graph.nodes))
    inputs = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    return torch_private.compile_inner(gm, inputs, runtime.inductor_options, **kwargs)


def _scheduled(compiling: _Compiling, gm: fx.GraphModule, kwargs: dict[str, Any]) -> Any:
    forward = CompiledForward(compiling.runtime, compiling.names, gm, kwargs, compiling.inside)
    return torch_private.boxed(lambda args: forward(args))


def _compile_after_gathers(compiling: _Compiling, gm: fx.GraphModule, kwargs: dict[str, Any]) -> Any:
    """A forward graph under overlap_gather. That of a model without blocks is a schedule that waits for each bucket
    where it first reads it. Any other one is as without overlap_gather: what it reads is there before it starts."""
    runtime, weights = compiling.runtime, compiling.runtime.weights
    assert isinstance(weights, WeightGather)
    first = 0
    if not runtime.plan.kinds:
        why = _why_whole(gm, kwargs)
        if why is None:
            return _scheduled(compiling, gm, kwargs)
        if not kwargs.get("is_inference"):
            runtime.say_once(f"a forward graph waits for all gathers before it starts: {why}")
    elif compiling.inside is None:
        first = weights.waits.order.first_of(runtime.placed[name] for name in compiling.names if name is not None)
    whole = _whole(runtime, gm, kwargs, compiling.inside)
    if compiling.inside is not None:  # `ForwardWaits.block` runs around it
        return whole
    gather = weakref.proxy(weights)  # Dynamo keeps `run`, see `make_backend`

    def run(args: list[Any]) -> Any:
        gather.arrive(first)
        return whole(args)

    return torch_private.boxed(run)


def _compile_in_windows(
    compiling: _Compiling, gm: fx.GraphModule, kwargs: dict[str, Any], written: Sequence[int]
) -> Any:
    """A forward graph: its sharded weights come while it reads them."""
    runtime = compiling.runtime
    for index in written:
        if compiling.names[index] in runtime.plan.sharded_names:
            raise ZcError(
                f"the forward writes parameter {compiling.names[index]} in place (an embedding with max_norm does), "
                f"and with {runtime.plan.why_sharded} such a write reaches no shard. Write inside `with "
                f"zc.whole_parameters(model):` on all ranks, or train without {runtime.plan.why_sharded}"
            )
    return _scheduled(compiling, gm, kwargs)


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


def _saves_own(compiling: _Compiling, gm: fx.GraphModule) -> bool:
    """Whether the backward of this forward graph gets a parameter of its block."""
    assert compiling.inside is not None
    outputs: Any = gm.graph.output_node().args[0]
    returned = (n for n in outputs if isinstance(n, fx.Node) and n.op == "placeholder")
    indices = (torch_private.input_index(node.meta.get("desc")) for node in returned)
    return any(k is not None and compiling.inside.path(compiling.names[k]) is not None for k in indices)
