"""How much memory a check needs, before it takes any."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from zc.devices import free_nbytes
from zc.errors import PlanError, megabytes
from zc.machine import available_nbytes, ranks_on_this_host

# Each in weights of fp32, by the tensors that were alive at one time (10 linear layers, AdamW; tests/check).
RUNNING = 8  # a model to try things on, one that trains, its narrow copy, two states, gradients of a rank and of all
COMPARED = 9  # in host memory: an update of the run that is compared, first weights, what the first update has shown
KEPT = 4  # of each update of the reference: gradients, weights and two states


class Needs(NamedTuple):
    """Bytes of a rank, without activations. On a CPU both are host memory."""

    device: int
    host: int


def needs_of(model: nn.Module, world_size: int, updates: int, microbatches: int) -> Needs:
    wide = sum(param.numel() * max(4, param.element_size()) for param in model.parameters() if param.requires_grad)
    rest = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    rest += sum(buffer.nbytes for buffer in model.buffers()) * (1 + world_size)
    device = (RUNNING + world_size) * wide + 2 * rest
    return Needs(device, (KEPT * updates + COMPARED + world_size + microbatches) * wide)


def check_memory(needs: Needs, device: torch.device, world_size: int) -> None:
    """Raises PlanError where the memory that is free now can't hold it."""
    num_ranks = ranks_on_this_host(world_size)
    host = needs.host + (needs.device if device.type == "cpu" else 0)
    free = available_nbytes()
    if free is not None and host * num_ranks > free:
        raise PlanError(
            f"zc.check needs {megabytes(host)} of host memory on each of the {num_ranks} ranks here, and "
            f"{megabytes(free)} are available: check a smaller model of the same kind, or with updates=1"
        )
    if device.type != "cpu" and needs.device > free_nbytes(device):
        raise PlanError(
            f"zc.check needs {megabytes(needs.device)} on {device}, and {megabytes(free_nbytes(device))} are free: "
            "check a smaller model of the same kind, or move it to the CPU"
        )
