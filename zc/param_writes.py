"""What the caller does to parameters between updates: weights written in place are kept, moved ones refused.

flat_param is the parameters' storage. Where the masters are their own tensors (narrower parameters, offload), the next
update would overwrite a value that the caller has written into the parameter alone: ``load_state_dict``, a clamp, a
re-initialised layer. Autograd counts in-place writes, so who has been written is known without reading anything; writes
through ``.data`` are not counted, by torch either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zc import backend
from zc.errors import ZcError
from zc.layout import Slot
from zc.plan import Bucket

if TYPE_CHECKING:
    from zc.runtime import Runtime


class ParamWrites:
    """Compares each parameter with what it was when `remember` was called last."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._versions: dict[str, int] = {}
        self._places: dict[str, tuple[int, Bucket]] = {}  # address of each parameter that has elements

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """The parameters of these buckets are views of flat_param, which never moves, from now on."""
        for bucket in buckets:
            flat = self._runtime.buffers.flat_param[bucket.index]
            for slot in bucket.slots:
                if slot.numel > 0:
                    self._places[slot.name] = flat.data_ptr() + slot.offset * flat.element_size(), bucket
        self.remember()

    def remember(self) -> None:
        """Parameters and masters agree now."""
        self._versions = {name: backend.version(param) for name, param in self._runtime.params.items()}

    def check_places(self) -> None:
        """Raises ZcError for a parameter that has left its bucket."""
        for name, (address, bucket) in self._places.items():
            param = self._runtime.params[name]
            if param.data_ptr() != address:
                raise ZcError(
                    f"parameter {name} has left its bucket, so no update would reach it: it is {param.dtype} on "
                    f"{param.device}, the bucket {bucket.param_dtype} on {bucket.device}. Was the model moved, cast or "
                    "given other tensors (model.to, .half, param.data = ...) after zc.compile? Do that before, and "
                    "write values in place (param.copy_, load_state_dict)"
                )

    def take_over(self) -> None:
        """Right before an update: this rank's masters take what was written into parameters since `remember`.

        Raises ZcError for a parameter that has left its bucket; nothing has changed.
        """
        self.check_places()
        for bucket in self._runtime.plan.buckets:
            if not bucket.has_master and self._runtime.plan.offload is None:
                continue  # the master is the parameter's own storage
            for slot in bucket.slots:
                if backend.version(self._runtime.params[slot.name]) != self._versions[slot.name]:
                    self._take(bucket, slot)

    @torch.no_grad()
    def _take(self, bucket: Bucket, slot: Slot) -> None:
        """Elements that still are their master, rounded, keep the master's precision."""
        rank, buffers = self._runtime.group.rank, self._runtime.buffers
        start, _ = bucket.layout.shard_range(rank)
        first, stop = bucket.layout.owned(slot, rank)
        if first == stop:
            return
        self._runtime.wait_for_host_memory()
        master = buffers.master_shard[bucket.index][first - start : stop - start]
        given = buffers.flat_param[bucket.index][first:stop].to(master.device)
        master.copy_(torch.where(master.to(given.dtype) == given, master, given.to(master.dtype)))
