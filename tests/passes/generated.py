"""The Triton kernels that Inductor makes of a graph, without a GPU: its values are said to be on one, and code is
generated and not compiled.

A fake tensor's device is only a name. What Inductor asks of the device itself (its processors, Triton's backend) is
answered as an H100 would.
"""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils._triton as its_triton
from torch import fx
from torch._dynamo import device_interface
from torch._inductor import config, scheduler
from torch._inductor.graph import GraphLowering
from torch.utils._pytree import tree_map

from zc import torch_private

H100 = types.SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32, gcnArchName="",
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    L2_cache_size=50 << 20, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472, is_integrated=0, is_multi_gpu_board=0, uuid="stand-in",
)  # fmt: skip


class _GeneratedError(Exception):
    """Raised with the source, in place of compiling it."""


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    """A GPU as far as generating code for it goes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    answers: dict[str, Any] = {
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: 1,
        "get_device_properties": lambda device=None: H100, "is_bf16_supported": lambda *args, **kwargs: True,
    }  # fmt: skip
    about = {
        "get_compute_capability": lambda device=None: 90, "raise_if_triton_unavailable": lambda device=None: None,
        "is_triton_capable": lambda device=None: True,
    }  # fmt: skip
    interface, patch = device_interface.CudaInterface, mock.patch.object
    with contextlib.ExitStack() as stack:
        for name, answer in {**answers, **about}.items():
            stack.enter_context(patch(interface, name, staticmethod(answer)))
            for owner in (interface.Worker, torch.cuda):
                if hasattr(owner, name) and name in answers:
                    stack.enter_context(patch(owner, name, staticmethod(answer)))
        stack.enter_context(patch(torch.cuda, "get_device_capability", return_value=(9, 0)))
        for name in ("_lazy_init", "set_rng_state"):
            stack.enter_context(patch(torch.cuda, name, return_value=None))
        for name in ("_exchange_device", "_maybe_exchange_device"):
            stack.enter_context(patch(torch.cuda, name, return_value=0))
        stack.enter_context(patch(torch.cuda, "get_rng_state", return_value=torch.zeros(16, dtype=torch.uint8)))
        target = make_backend(GPUTarget("cuda", 90, 32))
        stack.enter_context(patch(its_triton, "triton_hash_with_backend", return_value="stand-in"))
        stack.enter_context(patch(its_triton, "triton_backend", return_value=target))
        stack.enter_context(patch(scheduler, "has_triton", return_value=True))
        yield


def relabelled(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose values, and the devices that its operations name, are on the GPU."""

    def on_gpu(item: Any) -> Any:
        if isinstance(item, torch.device):
            return torch.device("cuda", 0)
        if not isinstance(item, torch.Tensor):
            return item
        with item.fake_mode:
            return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="cuda:0")

    graph = fx.Graph(owning_module=gm)
    where: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        where[node] = graph.node_copy(node, lambda n: where[n])
        where[node].args, where[node].kwargs = tree_map(on_gpu, (where[node].args, where[node].kwargs))
        where[node].meta = {"val": tree_map(on_gpu, node.meta["val"])} if "val" in node.meta else {}
    return fx.GraphModule(gm, graph)


def kernels(gm: fx.GraphModule) -> list[str]:
    """The Triton kernels that Inductor's code for a backward graph launches, in order."""
    gm = relabelled(gm)
    output = gm.graph.output_node()
    returned: Any = output.args[0]
    visible = [i for i, item in enumerate(returned) if isinstance(item, fx.Node)]
    output.meta["user_visible_output_idxs"] = visible
    output.meta["original_output_strides"] = [
        item.meta["val"].stride() if isinstance(item, fx.Node) else None for item in returned
    ]
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    generate = GraphLowering.codegen

    def stop(self: GraphLowering) -> Any:
        raise _GeneratedError(generate(self)[0].value)

    options = {"fx_graph_cache": False, "compile_threads": 1, "triton.autotune_at_compile_time": False}
    with stand_in(), mock.patch.object(GraphLowering, "codegen", stop), config.patch(options):
        try:
            torch_private.compile_inner(gm, inputs, is_backward=True, static_input_idxs=())
        except Exception as raised:
            error: BaseException | None = raised
            while error is not None and not isinstance(error, _GeneratedError):  # Inductor wraps what is raised in it
                error = error.__cause__ or error.__context__
            if error is None:
                raise
            return re.findall(r"^\s+(triton_\w+)\.run\(", error.args[0], re.MULTILINE)
    raise AssertionError("no code was generated")
