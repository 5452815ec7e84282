"""Backward-like ATen graphs for the pass tests, made by make_fx: no compiler, no descriptors, no ranks."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from zc.config import Config
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Plan, flat


def plan_for(
    names: list[str], shape: tuple[int, ...] = (8, 8), *, stage: int = 2, world_size: int = 2, per_bucket: int = 2,
    num_buffers: int = 2, overlap: bool = True, reduce: str = "exact",
) -> Plan:  # fmt: skip
    """Parameters of one shape, ``per_bucket`` to a bucket; names in order of registration."""
    specs = [ParamSpec(n, shape, torch.float32, torch.device("cpu")) for n in names]
    nbytes = per_bucket * shape[0] * shape[1] * 4
    config = Config(stage=stage, reduce=reduce, bucket_nbytes=nbytes, num_buffers=num_buffers, overlap=overlap)
    return make_plan(specs, config, flat(world_size))


def chain(num_layers: int, *, side_output: bool = True) -> tuple[fx.Graph, list[str]]:
    """The backward of ``num_layers`` square matrices without bias: dW_k = x_k^T g_k, g_{k-1} = g_k W_k^T, last layer
    first."""

    def backward(grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        xs, weights = tensors[:num_layers], tensors[num_layers:]
        grads: list[Tensor] = []
        for x, w in zip(reversed(xs), reversed(weights), strict=True):
            grads.append(torch.mm(x.t(), grad))
            grad = torch.mm(grad, w.t()) * torch.cos(x)
        return (*reversed(grads), grad) if side_output else tuple(reversed(grads))

    args = [torch.randn(8, 8) for _ in range(2 * num_layers + 1)]
    gm = make_fx(backward, tracing_mode="fake")(*args)
    names = [f"layers.{k}.weight" for k in range(num_layers)]
    graph = gm.graph
    graph.owning_module = gm
    graph.output_node().meta["grad_of"] = (*names, *([None] if side_output else []))
    return graph, names
