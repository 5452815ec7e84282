"""Segments: Inductor compiles each, and equal ones once."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from zc import torch_private
from zc.log import log

if TYPE_CHECKING:
    from zc.compiler.blocks import Block
    from zc.engine.core import Core
    from zc.engine.program import Segment


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
