"""offload="disk": the optimizer's state tensors live in a rank's state file and are updated in place.

The optimizer creates its state in memory, at a parameter's first update. After that update each tensor moves to its
region of the file, and later updates read and write mapped pages. Scalars, such as Adam's ``step``, stay in memory.
ZeRO-Infinity (arXiv:2104.07857) reads and writes NVMe explicitly. Here the system's page cache is the staging buffer,
and zc announces its reads one bucket ahead.

`zc.flush_state` makes the folder complete: a later run that starts from the same weights continues from it.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zc.engine.memory_order import in_shape
from zc.errors import PlanError
from zc.offload.disk_file import Region, StateFile, place
from zc.planning.plan import Plan

if TYPE_CHECKING:
    from zc.engine.core import Core


def regions_of(plan: Plan, keys: Sequence[str]) -> tuple[Region, ...]:
    """The file's regions, bucket by bucket in the order of the update: its state tensors [S], and the fp32 master [S]
    if the weights are narrower."""
    sizes: dict[str, tuple[int, torch.dtype]] = {}
    for bucket in plan.buckets:
        named = [*keys, *(["master_shard"] if bucket.has_master else [])]
        sizes.update({f"{bucket.index}/{key}": (bucket.layout.numel_shard, bucket.acc_dtype) for key in named})
    return place(sizes)


def open_file(
    folder: str | Path, rank: int, plan: Plan, name: str, keys: Sequence[str], params: Mapping[str, nn.Parameter]
) -> StateFile:
    """Opens the file for this plan, and for an optimizer of the class ``name`` whose state tensors are ``keys``. Raises
    as `StateFile` does, and PlanError if an earlier run's state belongs to weights other than rank 0's, which all ranks
    get."""
    slots = [f"{slot} of bucket {b.index}" for b in plan.buckets for slot in b.slots]
    lines = [f"optimizer {name} with {', '.join(keys) or 'no state'}", *slots]
    file = StateFile(Path(folder), rank, plan.world_size, regions_of(plan, keys), lines)
    if file.mark is not None and rank == 0:
        dtypes = {s.name: b.param_dtype for b in plan.buckets for s in b.slots}
        for param, wanted in file.mark["weights"].items():
            if checksum(params[param], dtypes[param]) != wanted:
                path, number = file.path, file.mark["num_updates"]
                file.discard()
                raise PlanError(
                    f"{path} holds the state of other weights ({param} differs), those of update "
                    f"{number:,}: load them before zc.compile, or remove {path.stem}.* from every rank"
                )
    return file


def checksum(param: Tensor, dtype: torch.dtype) -> int:
    """CRC-32 of the values, as ``dtype``."""
    values = param.detach().to(dtype=dtype).contiguous().cpu().view(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().data) if values.numel() else 0


class DiskState:
    """The optimizer's state of ``slices`` (by name) in ``file``."""

    def __init__(
        self, core: Core, file: StateFile, optimizer: Optimizer, slices: Mapping[str, nn.Parameter]
    ) -> None:
        self.core, self.file, self.optimizer, self.slices = core, file, optimizer, slices
        self.num_updates = 0
        self._place: dict[tuple[str, str], Tensor] = {}
        keys = {name.split("/")[1] for name in file.regions} - {"master_shard"}
        rank = core.group.rank
        for bucket in core.plan.buckets:
            for slot in bucket.slots:
                if slot.name in slices:
                    inside, _ = bucket.layout.owned_part(slot, rank)
                    for key in keys:
                        whole = file.tensor(f"{bucket.index}/{key}")
                        self._place[slot.name, key] = in_shape(whole[inside], slot)
        self._resume()

    def _resume(self) -> None:
        """Loads the state that an earlier run flushed, on all ranks or on none."""
        mark, group = self.file.mark, self.core.group
        number = mark["flush"] if mark is not None else -1
        low, high = group.max_on_host([-number, number])
        if mark is None or -low != high:
            self.file.mark = None
            if self.file.existed or -low != high:
                why = "on some ranks it is not complete" if -low != high else "it is not complete"
                self.core.say_once(f"offload_dir: {why}, so state of an earlier run in it is not used")
            self.file.begin_update()
            return
        self.num_updates = mark["num_updates"]
        for bucket in self.core.plan.buckets:
            if bucket.has_master:
                self.core.buffers.master_shard[bucket.index].copy_(self.file.tensor(f"{bucket.index}/master_shard"))
        for name, items in mark["state"].items():
            param = self.slices[name]
            self.optimizer.state[param] = {key: self._read_item(name, key, item) for key, item in items.items()}
        self.core.say_once(f"offload_dir: state after update {self.num_updates:,} taken up")

    def _read_item(self, name: str, key: str, item: Any) -> Any:
        if item == "file":
            return self._place[name, key]
        if isinstance(item, dict):
            return torch.tensor(item["value"], dtype=getattr(torch, item["dtype"]))
        return item

    def begin_update(self) -> None:
        self.file.begin_update()
        self.num_updates += 1

    def prefetch(self, bucket: int) -> None:
        """Announces the reads of a bucket's update."""
        for name in self.file.regions:
            if name.startswith(f"{bucket}/") and not name.endswith("/master_shard"):
                self.file.prefetch(name)

    def move_to_file(self, bucket: int) -> None:
        """Moves state tensors that the optimizer created in memory (a first update, load_state_dict) to the file."""
        for slot in self.core.plan.buckets[bucket].slots:
            param = self.slices.get(slot.name)
            state = self.optimizer.state.get(param) if param is not None else None
            for key, item in list((state or {}).items()):
                if not isinstance(item, Tensor) or item.dim() == 0:
                    continue
                place = self._place.get((slot.name, key))
                if place is None or item.dtype != place.dtype or item.shape != place.shape:
                    self.core.say_once(
                        f"offload='disk': the state {key} was not there when the file was made; it stays in memory"
                    )
                elif item.data_ptr() != place.data_ptr() and item.numel():
                    assert state is not None
                    place.copy_(item)
                    state[key] = place

    def flush(self, prepare: Callable[[], None]) -> None:
        """See `zc.flush_state`. ``prepare`` copies the caller's writes to parameters into the masters."""
        core, rank = self.core, self.core.group.rank
        (number,) = core.group.max_on_host([secrets.randbits(62) if rank == 0 else 0])
        with core.group.refuse_together():
            prepare()
            self.file.begin_update()
            for bucket in core.plan.buckets:
                self.move_to_file(bucket.index)
                if bucket.has_master:
                    self.file.tensor(f"{bucket.index}/master_shard").copy_(core.buffers.master_shard[bucket.index])
            dtypes = {s.name: b.param_dtype for b in core.plan.buckets for s in b.slots}
            weights = {n: checksum(p, dtypes[n]) for n, p in core.params.items()} if rank == 0 else {}
            state = {name: self._items_of(name, param) for name, param in self.slices.items()}
            facts = {"flush": number, "num_updates": self.num_updates, "weights": weights}
            self.file.flush({**facts, "state": {name: items for name, items in state.items() if items}})

    def _items_of(self, name: str, param: nn.Parameter) -> dict[str, Any]:
        saved: dict[str, Any] = {}
        for key, item in self.optimizer.state.get(param, {}).items():
            if not isinstance(item, Tensor):
                saved[key] = item
            elif item.dim() == 0:
                saved[key] = {"value": item.item(), "dtype": str(item.dtype).removeprefix("torch.")}
            elif (name, key) in self._place and self._place[name, key].data_ptr() == item.data_ptr():
                saved[key] = "file"
            else:
                raise PlanError(f"the state {key} of {name} is not in the file, so it can't be flushed")
        return saved
