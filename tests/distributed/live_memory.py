"""The memory of all tensors of a process, counted and not planned."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
from torch import Tensor, nn

Storages = Mapping[int, tuple[int, Tensor]]


def storages() -> Storages:
    """Bytes by storage, with a tensor that keeps its address from being used again. Stand-ins for gradients and fake
    tensors have a size and no memory."""
    gc.collect()
    nbytes: dict[int, tuple[int, Tensor]] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for each in gc.get_objects():
            is_real = type(each) in (Tensor, nn.Parameter) or type(each).__name__ == "ManagedParameter"
            if is_real and each.device.type == "cpu" and each.layout == torch.strided:
                nbytes[each.untyped_storage()._cdata] = each.untyped_storage().nbytes(), each
    return nbytes


def nbytes_since(before: Storages) -> int:
    """Bytes of storages that were not there ``before``, each once: a parameter's storage lies in flat_param's."""
    new = [pair for key, pair in storages().items() if key not in before]
    with torch._C.DisableTorchFunctionSubclass():
        places = sorted((each.untyped_storage().data_ptr(), nbytes) for nbytes, each in new if nbytes)
    total, stop = 0, 0
    for start, nbytes in places:
        total += max(start + nbytes, stop) - max(start, stop)
        stop = max(stop, start + nbytes)
    return total
