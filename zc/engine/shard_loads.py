"""``load_state_dict`` in stage 3: of each whole tensor in a state, every rank copies its own elements into its shards.

All ranks call it with the same values, between two updates, as in plain PyTorch. Hooks of the modules say where a call
begins and ends, and in between `zc.engine.absent` brings here each value that is copied into a parameter::

                     begin    the first value             each value                           end
    this rank                 closes its shards           writes its shards and masters        opens its shards
    the other ranks           read no shard any more      write other elements of it           read the new weights
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zc.engine.memory_order import flattened
from zc.errors import ZcError
from zc.kernels import adopt_writes
from zc.planning.layout import Slot
from zc.planning.plan import Bucket

if TYPE_CHECKING:
    from zc.engine.core import Core
    from zc.engine.sharded_weights import ShardedWeights


@torch.no_grad()
def write_value(core: Core, bucket: Bucket, slot: Slot, value: Tensor) -> None:
    """This rank's elements of the whole ``value`` of a parameter go into its shard. Masters adopt what differs."""
    flat, rank, layout = flattened(value.detach(), slot), core.group.shard.rank, bucket.layout

    def part(common: tuple[int, int], begin: int) -> tuple[slice, Tensor]:
        """Where these elements of the bucket lie in a buffer that begins at ``begin``, and their values."""
        start, stop = common
        values = flat[start - slot.offset : stop - slot.offset]
        return slice(start - begin, stop - begin), values.to(bucket.device, bucket.param_dtype)

    common = layout.in_shard(slot, rank)
    if common[0] < common[1]:
        where, values = part(common, layout.shard_range(rank)[0])
        core.buffers.weight_shard(bucket.index)[where].copy_(values)
    common = layout.owned(slot, rank)
    if not bucket.is_frozen and core.buffers.has_own_master(bucket) and common[0] < common[1]:
        where, values = part(common, layout.owned_range(rank)[0])
        core.wait_for_host_memory()  # with offload the last update may still copy from the masters
        master = core.buffers.master_shard[bucket.index].detach()
        adopt_writes(master[where], values.to(master.device).contiguous())


class ShardLoads:
    """Calls of ``load_state_dict`` of one model, on one rank."""

    def __init__(self, weights: ShardedWeights) -> None:
        self._weights = weakref.ref(weights)
        self._outer: weakref.ref[nn.Module] | None = None  # whose load_state_dict runs
        self._is_closed = False  # this rank's shards, since its first value

    def begin(self, module: nn.Module, state: Mapping[str, Any], prefix: str, local: Any, *_: Any) -> None:
        """The hook before a module loads its own part of ``state``."""
        weights = self._weights()
        if weights is None or weights.is_exposed:
            return
        own = [name for name, _ in module.named_parameters(recurse=False) if prefix + name in state]
        if own and local.get("assign_to_params_buffers", False):
            raise ZcError(
                f"load_state_dict(assign=True) would put another tensor in the place of {prefix}{own[0]}, and with "
                "stage=3 its bytes lie in shards: leave assign out, so that values are copied"
            )
        if not prefix:
            self._outer = weakref.ref(module)

    def write(self, param: nn.Parameter, value: Tensor) -> bool:
        """Somebody copies into a parameter without bytes. False: it is no load_state_dict."""
        weights = self._weights()
        if weights is None or self._outer is None:
            return False
        if not self._is_closed:
            weights.before_writes()
            self._is_closed = True
        weights.load(param, value)
        return True

    def end(self, module: nn.Module, _: Any) -> None:
        """The hook after a module and all inside it."""
        weights = self._weights()
        if self._outer is None or self._outer() is not module:
            return
        self._outer = None
        if self._is_closed and weights is not None:
            weights.were_written()
        self._is_closed = False
