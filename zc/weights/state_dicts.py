"""``state_dict`` and ``load_state_dict`` of sharded weights. Hooks of the modules say where a call begins and ends.

``load_state_dict``: of each whole tensor in a state, every rank copies its own elements into its shards. All ranks call
it with the same values, between two updates, as in plain PyTorch. `zc.weights.param` brings here each value that is
copied into a parameter::

                     begin    the first value             each value                           end
    this rank                 closes its shards           writes its shards and masters        opens its shards
    the other ranks           read no shard any more      write other elements of it           read the new weights

``state_dict``: every rank gets DTensors with its rows of each parameter, as FSDP2 gives them. A bucket's flat shard
cuts across parameters, so buckets are gathered one by one, and each rank copies its rows, as in FSDP1's
SHARDED_STATE_DICT.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zc import torch_private
from zc.engine.memory_order import flattened, in_shape
from zc.errors import ZcError
from zc.kernels import copy_writes
from zc.planning.layout import Slot
from zc.planning.plan import Bucket
from zc.weights.param import AbsentView

if TYPE_CHECKING:
    from zc.engine.core import Core
    from zc.weights.sharded_weights import ShardedWeights


@torch.no_grad()
def write_value(core: Core, bucket: Bucket, slot: Slot, value: Tensor, before: Tensor | None = None) -> None:
    """This rank's elements of the whole ``value`` of a parameter go into its shard. Masters adopt what differs from
    them. With ``before`` [n], both take only what differs from that."""
    flat = flattened(value.detach(), slot)
    shard, elements = core.buffers.weight_part(bucket, slot)
    if before is None:
        shard.copy_(flat[elements])
    elif shard.numel():
        copy_writes([shard], [flat[elements].contiguous()], [before[elements]])
    part = core.buffers.master_part(bucket, slot)
    if part is not None and part[0].numel():
        master, elements = part
        core.wait_for_host_memory()  # with offload the last update may still copy from the masters
        new = flat[elements].to(master.device, bucket.param_dtype).contiguous()
        copy_writes([master], [new], None if before is None else [before[elements].to(master.device)])


def rows_of(whole: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """A copy of this rank's rows of ``whole`` as a DTensor. The ranks of a mesh of one dimension divide them as
    torch.chunk does. A tensor without dimensions is copied on every rank. Without a mesh one rank has all rows."""
    if mesh is None:
        return whole.clone(memory_format=torch.contiguous_format)
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes 0.3 s

    if whole.dim() == 0:
        return DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
    count = -(-whole.shape[0] // mesh.size())  # rows of each rank but the last ones
    first = min(count * mesh.get_local_rank(), whole.shape[0])
    own = whole[first : first + count].clone(memory_format=torch.contiguous_format)
    strides = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=strides)


def _rows(weights: ShardedWeights, params: Collection[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each of these parameters with this rank's rows of it. All ranks ask for the same ones."""
    core = weights.core
    core.unset.check("state_dict()")
    wanted = {id(param) for param in params}
    names = {name for name, param in core.placed.items() if id(param) in wanted}
    core.group.same_everywhere(
        "what state_dict() is called for",
        sorted(names),
        f"With {weights.managed.why} all ranks call it together, and each gets its rows; zc.full_state_dict(model) "
        "gives rank 0 whole tensors, also on all ranks",
    )
    weights.adopt_writes()
    mesh, where = core.group.shard.mesh(), core.plan.slot_of
    if mesh is not None:
        core.say_once(
            f"{weights.managed.why}: state_dict() gives each rank its rows of the parameters as DTensors, which "
            "torch.distributed.checkpoint saves together. torch.save would write this rank's rows alone: give it "
            "zc.full_state_dict(model), called on all ranks"
        )
    for bucket in sorted({where[name][0] for name in names}):
        flat = weights.whole.gathered_once(bucket)
        for slot, param in core.params_in(core.plan.bucket(bucket)):
            if slot.name in names:
                yield param, rows_of(in_shape(flat[slot.offset : slot.stop], slot), mesh)


class StateDicts:
    """Calls of ``state_dict`` and ``load_state_dict`` of one model, on one rank. ``weights`` has this object."""

    def __init__(self, weights: ShardedWeights) -> None:
        self._weights: ShardedWeights = weakref.proxy(weights)
        self._read: weakref.ref[nn.Module] | None = None  # whose state_dict runs
        self._loaded: weakref.ref[nn.Module] | None = None  # whose load_state_dict runs
        self._state: Callable[[], object] = lambda: None  # the state that it loads, while it lives
        self._is_closed = False  # this rank's shards, since the first value of that

    @property
    def is_reading(self) -> bool:
        """Whether a ``state_dict`` runs: each parameter's ``detach()`` is a view without bytes then."""
        return self._read is not None

    # --- state_dict ---

    def begin_read(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """The hook before a module brings its own part. With ``keep_vars`` the caller gets the parameters."""
        weights = self._weights
        if weights.passes.is_unsharded or keep_vars:
            return
        if not weights.whole.buckets_of(module.parameters()):
            return
        if torch_private.caller_of_state_dict().startswith("safetensors."):  # takes DTensors for tensors
            weights.refuse_without_bytes("safetensors.torch.save_model", module)
        if weights.passes.is_passing:
            weights.refuse_without_bytes("state_dict() inside of a forward or backward", module)
        if not prefix or self._read is None:
            self._read = weakref.ref(module)

    def end_read(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """The hook after a module and all inside it. All ranks gather the same buckets in one order."""
        if self._read is None or self._read() is not module:
            return
        self._read = None
        keys: dict[nn.Parameter, list[str]] = {}  # a tied parameter has several
        for key, value in state.items():
            if isinstance(value, AbsentView):
                keys.setdefault(value.param, []).append(key)
        with torch.no_grad():
            for param, rows in _rows(self._weights, keys):
                state.update(dict.fromkeys(keys[param], rows))

    # --- load_state_dict ---

    def begin_load(self, module: nn.Module, state: Mapping[str, Any], prefix: str, local: Any, *_: Any) -> None:
        """The hook before a module loads its own part of ``state``."""
        weights = self._weights
        if weights.passes.is_unsharded:
            return
        here = ((name, param) for name, param in module.named_parameters(recurse=False) if prefix + name in state)
        own = [name for name, param in here if weights.whole.buckets_of([param])]
        if own and local.get("assign_to_params_buffers", False):
            self._end_load()  # of the modules around this one
            raise ZcError(
                f"load_state_dict(assign=True) would put another tensor in the place of {prefix}{own[0]}, and with "
                f"{weights.managed.why} its bytes lie in shards: leave assign out, so that values are copied"
            )
        if not prefix:
            # torch makes this dict for one call, so it dies with a call that raises before `end_load`
            self._loaded, self._state = weakref.ref(module), weakref.ref(state)

    def write(self, param: nn.Parameter, value: Tensor) -> bool:
        """Somebody copies into a parameter without bytes. False: it is no load_state_dict."""
        if self._loaded is not None and self._state() is None:
            self._end_load()
        if self._loaded is None:
            return False
        if value is param:  # set_model_state_dict adds to a state those that it lacks
            return True
        if not self._is_closed:
            self._weights.before_writes()
            self._is_closed = True
        if hasattr(value, "full_tensor"):  # a DTensor, such as those of `state_dict`
            value = value.full_tensor()
        self._weights.whole.load(param, value)
        return True

    def end_load(self, module: nn.Module, _: Any) -> None:
        """The hook after a module and all inside it."""
        if self._loaded is not None and self._loaded() is module:
            self._end_load()

    def _end_load(self) -> None:
        """No load_state_dict runs any more."""
        self._loaded = None
        if self._is_closed:
            self._weights.whole.end_load()
            self._weights.managed.update = None
        self._is_closed = False
