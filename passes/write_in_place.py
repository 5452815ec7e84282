"""Lets a matmul or an embedding compute its weight's gradient in the slot of the bucket, so that nothing copies it.

Stage 2, bucket 2 of a weight [64, 32] (slot 0) and a bias [64] (slot 1), padded to 2,176 elements::

    %t = aten.permute(%g, [1, 0])                       %t = aten.permute(%g, [1, 0])
    %mm = aten.mm(%t, %x)                          ->   %sum = aten.sum(%g, [0])
    %sum = aten.sum(%g, [0])                            flatten_cast(2, "flat_grad[0]", (1,), [%sum],
    flatten_cast(2, "flat_grad[0]", (0, 1),                          spans=((2048, 2176),))
                 [%mm, %sum])                           wgrad_into(2, "flat_grad[0]", 0, 0, 2048, %t, %x, how="mm")

``spans`` are the elements that flatten_cast still writes: the slots of its gradients, and zeros everywhere else. In
stage 1 the buffer is acc[2], accumulate_cast comes first (it empties or keeps the accumulator), and ``wgrad_into``
adds in fp32, or overwrites where the accumulator was empty.

``how``: "mm" for mm and bmm, whose result may pass through views that keep the order of its elements (a transpose of a
transpose, a reshape); "scatter" for the gradient of an embedding, whose slot is zeroed first. "rows" is for that of a
weight's rows by number (``weight[index]``), and of an embedding in torch 2.11 and 2.12::

    %rows = aten.where(%is_padding, 0.0, %g)
    %grad = aten.index_put(%zeros, [%index], %rows, True)    ->    wgrad_into(..., %index, %rows, how="rows")

Three results are copied as before: one with another user (%mm returned as well, or a sum of two: tied weights), one
whose elements come in another order than they lie in the slot, one of another dtype than the buffer. The last has two
exceptions, both in stage 1 alone, where they round less than the copy: a half-precision matmul on a GPU gives fp32
(``out_dtype``), and an fp32 scatter is not cast to half precision on its way into an fp32 accumulator. In stage 2 not a
bit changes on a CPU (docs/decisions.md says why a GPU can't promise that).

The writes come after the bucket's last producer and cut no segment. Their inputs (the gradient of the layer's output,
the saved activation) live until then: at most one bucket's layers at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from zc.passes.base import Pass, copy_graph
from zc.planning.layout import outside
from zc.planning.plan import Bucket, Plan
from zc.schedule.nodes import change, ops, put_after
from zc.schedule.spec import AccumulateCast, Cast, FlattenCast, WgradInto

_aten = torch.ops.aten
_MATMULS = (_aten.mm.default, _aten.bmm.default)
_VIEWS = (
    _aten.permute.default, _aten.t.default, _aten.transpose.int, _aten.view.default, _aten._unsafe_view.default,
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.alias.default, _aten.detach.default,
)  # fmt: skip
_CASTS = (_aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_SCATTER = _aten._unsafe_masked_index_put_accumulate.default  # what AOTAutograd makes of embedding_dense_backward
_ADD_ROWS = (_aten.index_put.default, _aten._unsafe_index_put.default)  # what 2.11 and 2.12 do, and ``weight[index]``
_HALF = (torch.bfloat16, torch.float16)
# Devices whose matmul of halves gives fp32. A CPU has to widen the inputs, and its bf16 matmul is 2 to 6 times faster
# than the fp32 one (measured, 1 thread with AVX512-BF16, 512 to 2048 wide).
_WIDENS = ("cuda",)


def run(graph: fx.Graph, plan: Plan) -> fx.Graph:
    new = copy_graph(graph)
    for node, op in list(ops(new)):
        if isinstance(op, Cast) and op.spans is None:
            _split(new, plan, node, op)
    return new


def _split(graph: fx.Graph, plan: Plan, write: fx.Node, op: Cast) -> None:
    """Takes the gradients that can be computed in their slots out of one write."""
    bucket = plan.buckets[op.bucket]
    makers = {}
    for slot, grad in zip(op.slots, op.grads, strict=True):
        maker = _maker(grad, bucket, slot, adds=isinstance(op, AccumulateCast))
        if maker is not None:
            makers[slot] = maker
    if not makers:
        return
    last = write
    for slot, maker in makers.items():
        at = bucket.slots[slot]
        wgrad = WgradInto(op.bucket, op.buffer, slot, at.offset, at.stop, maker.inputs, maker.how)
        last = put_after(graph, last, wgrad)
        last.meta["gradient_of"] = maker.chain[0].meta.get("gradient_of", ())
    copied = [(s, g) for s, g in zip(op.slots, op.grads, strict=True) if s not in makers]
    spans = outside(((bucket.slots[k].offset, bucket.slots[k].stop) for k in makers), bucket.numel)
    change(write, replace(op, slots=tuple(s for s, _ in copied), grads=tuple(g for _, g in copied), spans=spans))
    if isinstance(op, FlattenCast) and not spans:
        graph.erase_node(write)
    for maker in makers.values():
        for node in maker.chain:  # from the gradient back to the node that computed it
            graph.erase_node(node)


@dataclass(frozen=True)
class _Maker:
    how: str
    inputs: tuple[fx.Node, ...]
    chain: tuple[fx.Node, ...]


def _maker(grad: Any, bucket: Bucket, slot: int, *, adds: bool) -> _Maker | None:
    """How ``grad`` can be computed in its slot; None: it can't."""
    if bucket.slots[slot].order is not None:  # a matmul's result is row-major
        return None
    chain = []
    node, has_cast = grad, False
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        chain.append(node)
        if node.target in (*_MATMULS, *_ADD_ROWS, _SCATTER):
            break
        if node.target not in _VIEWS and node.target not in _CASTS:
            return None
        source = node.args[0]
        has_cast |= node.target in _CASTS and _dtype(source) != _dtype(node)
        node = source
    if not chain or chain[-1] is not node or bucket.slots[slot].numel == 0:
        return None
    result: Any = node.meta.get("val")
    val = grad.meta.get("val")
    if not _is_plain(result) or not _is_plain(val) or result.numel() != bucket.slots[slot].numel:
        return None
    wanted = bucket.acc_dtype if adds else bucket.grad_dtype
    same_dtype = result.dtype == wanted and (adds or not has_cast)
    if node.target not in _MATMULS:
        return _scatter(node, tuple(chain)) if same_dtype else None
    wider = adds and bucket.device.type in _WIDENS and result.dtype in _HALF and wanted == torch.float32
    inputs: Any = node.args[:2]
    return _Maker("mm", inputs, tuple(chain)) if same_dtype or wider else None


def _scatter(node: fx.Node, chain: tuple[fx.Node, ...]) -> _Maker | None:
    """``full([V, D], 0)[index] += values``, where a mask is set or everywhere."""
    args: Any = node.args
    if node.target is _SCATTER:
        how, (zeros, mask, indices, values) = "scatter", args
    else:
        how, mask, (zeros, indices, values, *accumulate) = "rows", None, args
        if accumulate != [True]:
            return None
    if not isinstance(zeros, fx.Node) or zeros.target is not _aten.full.default or zeros.args[1] != 0:
        return None
    if not isinstance(indices, (list, tuple)) or len(indices) != 1:
        return None
    inputs = (indices[0], values) if how == "rows" else (indices[0], mask, values)
    rows = node.meta["val"]
    if rows.dim() != 2 or not all(isinstance(n, fx.Node) for n in inputs):
        return None
    index, grads = (n.meta.get("val") for n in (indices[0], values))
    if index is None or grads is None or grads.dtype != rows.dtype or index.dtype not in (torch.int64, torch.int32):
        return None
    if grads.shape != (*index.shape, rows.shape[1]):  # values that index_put would expand
        return None
    drop = (zeros,) if len(zeros.users) == 1 else ()
    return _Maker(how, inputs, (*chain, *drop))


def _dtype(node: Any) -> torch.dtype | None:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return val.dtype if isinstance(val, torch.Tensor) else None


def _is_plain(val: Any) -> bool:
    """A dense tensor of constant sizes whose elements lie in order: two such ones along a chain of views are in the
    same order."""
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided:
        return False
    return all(isinstance(size, int) for size in val.shape) and val.is_contiguous()


PASS = Pass("write_in_place", run, requires=frozenset({"writes"}))
