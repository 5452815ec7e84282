"""The Dynamo backend: a graph of the model in, compiled forward and backward schedules out.

Dynamo calls `make_backend`'s function with a graph; it calls Inductor's ``compile_fx`` with a hook in place of the
inner compiler. AOTAutograd traces, decomposes and partitions as always; where the hook gets the backward graph, that
goes through zc's passes, and only the segments between gradient operations go on to Inductor.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from zc import torch_private
from zc.compiler.graphs import CompiledBackward, CompiledForward
from zc.compiler.segments import interpret
from zc.compiler.traced import Hook, Origin, SavesAsEager, Traced, as_traced, keep_from_writes
from zc.engine import param_checks
from zc.errors import ZcError
from zc.log import log, tell
from zc.passes.base import returned_by

if TYPE_CHECKING:
    from zc.compiler.blocks import Block
    from zc.engine.runtime import Runtime


MAX_SHARED = 6  # graphs of one kind of block, for other sizes or flags: further ones belong to one block each


FindBlock = Callable[[Sequence[str | None]], "Block | None"]  # by the parameters that a graph gets; None: of no block


def make_backend(runtime: Runtime, find_block: FindBlock = lambda _: None) -> Callable[..., Any]:
    """A backend for ``torch.compile`` whose backward graphs reduce gradients as ``runtime``'s plan says. Where
    ``find_block`` finds one, it compiles blocks of one kind, and one graph runs for all of them.

    Lifetime: the backend and everything that it compiles hold the runtime weakly, and own no program. Dynamo keeps
    compiled graphs by code object, in C, out of sight of Python's collector, so anything they own would outlive the
    model. When a parameter dies, the graphs that are guarded by its identity die with it.
    """
    on_cpu = runtime.plan.buckets[0].device.type == "cpu"
    if on_cpu and runtime.config.backend == "inductor":
        torch_private.probe_vector_units()  # while the model is prepared and traced
    runtime = weakref.proxy(runtime)
    num_shared = 0

    def zc_backend(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        param_checks.refuse_compiled_autograd()
        runtime.backwards.go_on()
        if not runtime.ledger.graphs and runtime.config.backend == "inductor" and runtime.group.rank == 0:
            tell("compiles in the first step; ZC_LOG=info shows what is compiled, ZC_LOG=error hides this line")
        runtime.ledger.graphs.append(torch_private.compile_id())
        name_of = {id(param): name for name, param in runtime.placed.items()}  # zc.recompile may have added some
        names = [name_of.get(id(value)) for value in inputs]
        runtime.weights.note_graph(names)
        nonlocal num_shared
        block = find_block(names) if num_shared < MAX_SHARED else None
        num_shared += block is not None
        torch_private.guard_absent_hooks()
        torch_private.guard_requires_grad(gm)
        torch_private.guard_identity(gm, [None if block is not None and block.path(n) else n for n in names])
        with_grad = [k for k, value in enumerate(inputs) if getattr(value, "requires_grad", False)]
        untrained = [k for k in range(len(inputs)) if k not in with_grad and names[k] not in runtime.plan.sharded_names]
        origin = Origin(runtime, names, untrained, with_grad, block, partial(torch_private.guard_identity, gm, names))
        hook, saves = partial(_compile, origin), SavesAsEager(origin)
        passes: Any = {"first_pass": saves.keep_clones, "joint_pass": saves}
        options = runtime.inductor_options
        if runtime.config.backend == "aot_eager":
            # op by op, Inductor's own random numbers know no seed: what checkpointing runs again would draw others
            options = {**options, "fallback_random": True}
            compiled = torch_private.compile_graph(gm, inputs, _inner_compiler(hook), options, **passes)
            return _with_returned_weights(origin, compiled)
        from zc.compiler.saved import cached  # imports Inductor, which takes seconds

        together = torch_private.compiling_kernels_together if on_cpu else contextlib.nullcontext
        with cached(hook) as saving_hook, together():
            compiler, kept_as = _inner_compiler(saving_hook), _kind_of_forward(runtime)
            compiled = torch_private.compile_graph(gm, inputs, compiler, options, kept_as=kept_as, **passes)
        return _with_returned_weights(origin, compiled)

    return zc_backend


def _kind_of_forward(runtime: Runtime) -> str:
    """What the strides that a backward graph is traced with depend on, beside the graph: Inductor chooses those that a
    whole forward saves, and a schedule saves them as traced."""
    if runtime.plan.sharded:
        return "windows"
    return "cut" if runtime.plan.overlap_gather and not runtime.plan.kinds else "whole"


def _inner_compiler(hook: Hook) -> Callable[..., Any]:
    return lambda gm, example_inputs, **kwargs: hook(as_traced(gm, example_inputs, kwargs))


def _compile(origin: Origin, traced: Traced) -> Any:
    runtime = origin.runtime
    traced = _without_cuda_graphs(runtime, traced)
    if traced.is_backward:
        return torch_private.boxed(CompiledBackward(origin, traced))
    if not traced.is_inference:
        traced = keep_from_writes(origin, traced)
    if origin.block is not None and not traced.is_inference and not _saves_own_params(origin, traced):
        origin.guard_identity()  # its backward can't tell the block by what it gets, so the graph is of this one alone
        origin.block = None
    if runtime.plan.sharded:
        return _compile_in_windows(origin, traced)
    if runtime.plan.overlap_gather:
        return _compile_after_gathers(origin, traced)
    return _compile_whole(origin, traced)


def _without_cuda_graphs(runtime: Runtime, traced: Traced) -> Traced:
    """A CUDA graph's outputs are overwritten by its next replay. A segment's are gradients, which wait for their bucket
    and cross streams, and layers of one shape share one compiled segment. A forward whose backward is no CUDA graph
    would be taken for one with a backward pending, and never replay.

    Relies on the argument ``cudagraphs`` of ``compile_fx_inner``, a box with a truth value made from
    ``torch._inductor.config.triton.cudagraphs`` (2.11 to 2.15).
    """
    box = traced.kwargs.get("cudagraphs")
    if not box:
        return traced
    runtime.say_once("torch._inductor.config.triton.cudagraphs is on: zc compiles without CUDA graphs")
    return traced._replace(kwargs={**traced.kwargs, "cudagraphs": type(box)(False)})


def _compile_whole(origin: Origin, traced: Traced) -> Any:
    """A forward or inference graph: Inductor's as it is, or op by op."""
    runtime, gm = origin.runtime, traced.gm
    if runtime.config.backend == "aot_eager":
        return interpret(gm)
    where = "" if origin.block is None else f"{origin.block}: "
    log.info("%sInductor compiles a forward graph of %d operations", where, len(gm.graph.nodes))
    inputs = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    return torch_private.compile_inner(gm, inputs, runtime.inductor_options, **traced.kwargs)


def _compile_after_gathers(origin: Origin, traced: Traced) -> Any:
    """A forward graph under overlap_gather. That of a model without blocks is a schedule that waits for each bucket
    where it first reads it. Any other one is as without overlap_gather: what it reads is there before it starts."""
    runtime, names = origin.runtime, None
    if not runtime.plan.kinds:
        why = _why_whole(traced)
        if why is None:
            return torch_private.boxed(CompiledForward(origin, traced))
        if not traced.is_inference:
            runtime.say_once(f"a forward graph waits for all gathers before it starts: {why}")
    elif origin.block is None:
        names = [name for name in origin.names if name is not None]
    whole = _compile_whole(origin, traced)
    if origin.block is not None:  # `OverlappedWeights.block` runs around it
        return whole
    wait = runtime.weights.waiting_for(names)

    def run(args: list[Any]) -> Any:
        wait()
        return whole(args)

    return torch_private.boxed(run)


def _compile_in_windows(origin: Origin, traced: Traced) -> Any:
    """A forward graph whose sharded weights come while it reads them."""
    plan = origin.runtime.plan
    for index in traced.written:
        if origin.names[index] in plan.sharded_names:
            raise ZcError(
                f"compiled code of the forward writes parameter {origin.names[index]} (an embedding with max_norm "
                f"does), and with {plan.why_sharded} such a write reaches no shard. Write it in a function under "
                "@torch.compiler.disable, all ranks the same; or between two forwards inside `with "
                f"zc.whole_parameters(model):`; or train without {plan.why_sharded}"
            )
    origin.returned[:] = [k for k in traced.returned if origin.names[k] in plan.sharded_names]
    return torch_private.boxed(CompiledForward(origin, traced))


def _with_returned_weights(origin: Origin, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, with whole weights where it returns views of them: those are of the parameter's own memory."""
    runtime, positions = origin.runtime, tuple(origin.returned)
    if not positions:
        return compiled

    def run(*args: Any) -> Any:
        runtime.weights.read([args[k] for k in positions], "a forward returns a view of")
        return compiled(*args)

    return run


def _why_whole(traced: Traced) -> str | None:
    """Why a forward graph can't be cut, or None."""
    if traced.is_inference:
        return "it is not differentiated"
    for node in traced.gm.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt):
            return "its sizes are symbolic"
        if (use := torch_private.use_of_streams(node)) is not None:
            return f"it uses {use}"
        if node.op == "call_function" and torch_private.mutates(node.target):
            return f"{node.target} changes an input"
    return None


def _saves_own_params(origin: Origin, traced: Traced) -> bool:
    """Whether the backward of this forward graph gets a parameter of its block."""
    return any(isinstance(node, fx.Node) and origin.is_of_block(node) for node in returned_by(traced.gm.graph))
