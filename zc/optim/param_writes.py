"""Handles changes to parameters between updates: writes are kept, moved parameters are refused.

The parameters' memory is flat_param. If masters are separate tensors (narrower parameters, offload), the next update
would overwrite a value that the caller wrote into the parameter: ``load_state_dict``, a re-initialised layer, a clamp
or an exchange of weights through ``p.data``. Autograd counts writes, but not those through ``.data``. So before an
update each rank compares the elements that it owns with their masters. An element that equals its rounded master was
not written. Weights that travel as differences stay a little behind their masters, so there the comparison is with a
copy of what the last update has left.

``param.data = other`` is a write, too, if ``other`` has the parameter's shape, dtype and device (SAM restores weights
so): its values are copied into the bucket, and the parameter is given its memory there again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import eq
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.engine.memory_order import in_shape
from zc.errors import ZcError, some
from zc.kernels import copy_writes
from zc.planning.layout import Slot
from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.engine.core import Core


def _is_shared(tensor: Tensor) -> bool:
    """Whether other processes may have this memory too (share_memory, a tensor that came through a queue)."""
    return tensor.device.type == "cpu" and bool(tensor.is_shared())  # type: ignore[no-untyped-call, unused-ignore]


def note_of_shared(params: Mapping[str, nn.Parameter]) -> str | None:
    """The note for parameters that `zc.compile` takes out of memory that other processes may read."""
    shared = next((name for name, param in params.items() if _is_shared(param)), None)
    if shared is None:
        return None
    return (
        f"{shared} lay in memory that processes share (share_memory, or it came through a queue), and is in a bucket "
        "of this process now: other processes don't see its updates. Copy it into a second model that is shared"
    )


def note_of_held(model: nn.Module, params: Mapping[str, nn.Parameter]) -> str | None:
    """The note for parameters whose memory something outside of the model holds, too. `zc.compile` moves parameters out
    of it, so under DDP it would follow the updates, and here it does not."""
    own = Counter(torch_private.storage_number(tensor) for tensor in _tensors_of(model) if _has_bytes(tensor))
    of_model = ((n, p, own[torch_private.storage_number(p)]) for n, p in params.items() if _has_bytes(p))
    held = [name for name, param, num_own in of_model if torch_private.num_sharing(param) - 1 > num_own]
    if not held:
        return None
    return (
        f"something outside of the model holds the memory in which {some(held)} lay: p.data, a state_dict() or a flat "
        "tensor from before zc.compile, or an output with its graph. It keeps the values of then, and what is written "
        "into it changes no parameter. Make such tensors after zc.compile, or read the parameters themselves"
    )


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and what `torch.nn.utils.spectral_norm` has as the weight until the first forward."""
    every = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        names = (name.removesuffix("_orig") for name, _ in module.named_parameters(recurse=False))
        every += (tensor for tensor in map(vars(module).get, names) if isinstance(tensor, Tensor))
    return every


def _has_bytes(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout == torch.strided and type(tensor.data) is Tensor and tensor.numel() > 0


class ParamWrites:
    """Compares the parameters with their places, and with the masters."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # of each parameter that has elements
        self._addresses: dict[str, int] = {}
        self._places: dict[str, tuple[Bucket, Slot]] = {}
        self._versions: dict[str, int] = {}

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Records the addresses of these buckets' parameters in flat_param, which never moves. In stage 3 they have
        none, and `zc.whole_parameters` takes writes over."""
        for bucket in buckets if not self._core.plan.placement.shards_weights else ():
            flat = self._core.buffers.flat_param[bucket.index]
            for slot in bucket.slots:
                if slot.numel > 0:
                    self._addresses[slot.name] = flat.data_ptr() + slot.offset * flat.element_size()
                    self._places[slot.name] = bucket, slot
        self.remember()

    def leave(self, names: Iterable[str]) -> None:
        """These parameters have left their buckets."""
        for name in names:
            self._addresses.pop(name, None)
            self._places.pop(name, None)
            self._versions.pop(name, None)

    def remember(self) -> None:
        """Records that parameters and masters agree now."""
        if self._core.plan.offload is None:
            return  # the masters are on the parameters' device, and are compared with them
        self._versions = {name: torch_private.version(param) for name, param in self._core.params.items()}

    def check_places(self) -> None:
        """Brings parameters back whose ``.data`` was set to another tensor like it. Raises ZcError for any other that
        has left its bucket. What has not moved costs one call for each parameter: no code of ours runs for it."""
        of_name = self._core.params.__getitem__
        if all(map(eq, map(Tensor.data_ptr, map(of_name, self._addresses)), self._addresses.values())):
            return
        for name, (bucket, slot) in self._places.items():
            param = of_name(name)
            if param.data_ptr() != self._addresses[name] and not self._bring_back(param, bucket, slot):
                so = (
                    "Was the model moved, cast or given other tensors (model.to, .half, param.data = ...) after "
                    "zc.compile? Move it before. For bf16 weights don't cast it: param_dtype=torch.bfloat16 keeps fp32 "
                    "masters. Write values in place (param.copy_, load_state_dict)"
                )
                if _is_shared(param):
                    so = (
                        "share_memory, or a queue between processes, has moved it into memory that they share: put "
                        "clones into the queue, or copy into a second model that is shared"
                    )
                raise ZcError(
                    f"parameter {name} has left its bucket, so no update would reach it: it is {param.dtype} on "
                    f"{param.device}, the bucket {bucket.param_dtype} on {bucket.device}. {so}"
                )

    def _bring_back(self, param: nn.Parameter, bucket: Bucket, slot: Slot) -> bool:
        """Copies the values of a parameter that lies elsewhere into its bucket, and makes that its memory."""
        values = param.data
        is_like = tuple(values.shape) == slot.shape and values.dtype == bucket.param_dtype
        if not is_like or values.device != bucket.device or values.layout != torch.strided or _is_shared(values):
            return False
        place = self._core.buffers.flat_param[bucket.index][slot.offset : slot.stop]
        param.data = in_shape(torch_private.own_storage(place), slot)
        param.data.copy_(values)  # as where ``.data`` is set, autograd does not count it
        self._versions[slot.name] = -1
        self._core.say_once(
            f"param.data of {slot.name} was set to another tensor: zc copies its values into the parameter's own "
            "memory, so later writes to that tensor change nothing. param.copy_(tensor) saves a copy"
        )
        return True

    def take_over(self) -> None:
        """Right before an update: copies writes into parameters since the last update into this rank's masters.

        Raises ZcError for a parameter that has left its bucket; nothing has changed.
        """
        self.check_places()
        plan, buffers = self._core.plan, self._core.buffers
        if plan.placement.shards_weights:
            return
        masters: list[Tensor] = []
        weights: list[Tensor] = []
        before: list[Tensor] = []  # where weights travel as differences, which all buckets do or none
        for bucket in plan.buckets:
            if not bucket.has_master and plan.offload is None:
                continue  # the master is the parameter's own storage
            master: Tensor = buffers.master_shard[bucket.index]
            own = buffers.owned(buffers.flat_param[bucket.index], bucket)
            if own.device == master.device or self._is_counted(bucket):
                masters.append(master)
                weights.append(own)
                if bucket.sends_differences:
                    before.append(buffers.published[bucket.index])
        if masters:
            self._core.wait_for_host_memory()  # the last update may still copy from the masters
            copy_writes(masters, [own.to(masters[0].device) for own in weights], before or None)

    def _is_counted(self, bucket: Bucket) -> bool:
        """Whether autograd has seen a write since `remember`."""
        params = self._core.params
        names = (slot.name for slot in bucket.slots if not slot.is_left)
        return any(torch_private.version(params[name]) != self._versions[name] for name in names)
