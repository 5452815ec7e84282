"""The update in host memory: also a schedule, bucket by bucket, and proved like a backward's.

The CPU updates a bucket's masters as soon as its gradient has arrived. While it updates the next bucket, the new
weights are copied to the device, and then gathered::

    host | update(0, "master[0]", "host[0]")
    host | cast_param(0, "param[0]", "master[0]")             if the parameters are narrower than the masters
    copy | copy_to_device(0, "flat_param[0]", "param[0]")
    comm | gather(0, "flat_param[0]")
    ...
 compute | publish(0, "flat_param[0]")

In stage 3 the copy goes to ``weight[0]``, this rank's shard, and nothing is gathered. Whole parameters go to a staging
buffer, and from there to the shards in which they lie::

    copy | copy_to_device(0, "staging[0]", "param[0]")
    comm | spread(0, "weight[0]", src="staging[0]")
 compute | publish(0, "weight[0]")

On a GPU ``loss.backward()`` returns before the device is done, so the first buckets are updated during the backward.
They can't be if something needs all gradients first: clipping, or a printed loss. (ZeRO-Offload, arXiv:2101.06840,
delays the update by a step for this overlap; zc never changes the results.)

Host memory that a device copies from and to is page-locked in place: `HostMemory` allocates ordinary memory and
registers it with the driver. ``pin_memory=True`` would use PyTorch's caching host allocator, which rounds a block up to
a power of two: up to twice the memory, and offload exists to save memory. Other devices than CUDA's and ROCm's have
that one, which keeps a block while copies use it.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from zc.engine.buffers import Function
from zc.engine.core import Updater
from zc.engine.program import Program
from zc.machine import is_cuda, num_threads
from zc.planning.plan import Plan
from zc.planning.traits import TRAITS
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import put
from zc.schedule.spec import CastParam, CopyToDevice, Op, Publish, Spread, Update, gather_node

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime
    from zc.offload.disk import DiskState


def step_graph(plan: Plan, buckets: Sequence[int], *, with_update: bool) -> fx.Graph:
    """The schedule that updates these buckets, or only copies their weights back."""
    graph = fx.Graph()
    for k, index in enumerate(buckets):
        source = Buffer("master", index)
        if with_update:
            put(graph, Update(index, source, Buffer("host", index)))
        if plan.buckets[index].has_master:
            cast = Buffer("param", k % plan.num_staging)
            put(graph, CastParam(index, cast, source))
            source = cast
        _bring_weights(graph, plan, index, source, Buffer("staging", k % plan.num_staging))
    for index in buckets:
        put(graph, Publish(index, Buffer.named(plan.weights_buffer(index))))
    graph.output(())
    return graph


def _bring_weights(graph: fx.Graph, plan: Plan, index: int, source: Buffer, staging: Buffer) -> None:
    """From host memory to the device, and to the other ranks where they have them now."""
    weights, spreads = Buffer.named(plan.weights_buffer(index)), plan.spreads(plan.buckets[index])
    if plan.placement.shards_weights:
        put(graph, CopyToDevice(index, staging if spreads else weights, source))
        if spreads:
            put(graph, Spread(index, weights, staging))
        return
    put(graph, CopyToDevice(index, weights, source))
    if spreads:
        put(graph, Spread(index, weights))
    if plan.world_size > 1:
        put(graph, gather_node(plan, index, weights))


class HostStep(Updater):
    """Runs the caller's optimizer, as its class sees it (`zc.optim.local`), on masters in host memory. ``by_bucket``:
    its update is elementwise, so buckets may be updated one after another. ``disk``: where the state is, if not in
    memory."""

    moves_slices = True

    def __init__(
        self,
        runtime: Runtime,
        number: int,
        optimizer: Any,
        slices: Mapping[str, nn.Parameter],
        disk: DiskState | None,
        *,
        by_bucket: bool,
    ) -> None:
        super().__init__(runtime)
        self.optimizer, self._by_bucket = optimizer, by_bucket
        plan = runtime.plan
        self._slices = [[slices[s.name] for s in b.slots if s.name in slices] for b in plan.buckets]
        # by whether they update, of all its buckets: sets of changed ones are without number (layer drop)
        self._programs: dict[bool, Program] = {}
        self._buckets = [bucket.index for bucket in plan.of_optimizer(number)]
        self._is_done = False
        self._next: dict[int, int] = {}  # bucket -> the one updated after it
        self._groups: list[dict[str, Any]] = []  # of the optimizer, while buckets are updated one by one
        self.disk = disk
        self.num_threads = torch.get_num_threads()
        if plan.buckets[0].device.type == "cpu":
            saves = "only the optimizer's state leaves it" if disk is not None else "so it saves no memory here"
            runtime.say_once(f"offload: parameters are in host memory already, {saves}")
        else:
            self.num_threads = num_threads(runtime.group.world_size)
            prefer_fused(optimizer)
        fused = "fused " if any(group.get("fused") for group in optimizer.param_groups) else ""
        how = "bucket by bucket as gradients land" if by_bucket else "all at once, after the last gradient has landed"
        self.how = f"{fused}{type(optimizer).__name__}, {how}, {self.num_threads} thread(s) a rank"  # for explain
        self._name = f"update_of_{number}" if number else "update"

    @property
    def programs(self) -> list[Program]:
        """The schedules that have run so far, for explain."""
        return list(self._programs.values())

    def before(self, changed: tuple[int, ...]) -> None:
        """Called before the optimizer's step. Updates bucket by bucket if the optimizer allows that, and leaves nothing
        to the step itself. Otherwise waits for all gradients."""
        start_momenta(self.optimizer)
        has_scaler = self._scaler_on_host()
        self._is_done = self._by_bucket and not has_scaler
        if self.disk is not None:
            self.disk.begin_update()
        if not self._is_done:
            self.runtime.wait_for_host_memory()
            return
        self._groups = self.optimizer.param_groups
        try:
            self._run(changed, with_update=True)
        finally:
            self.optimizer.param_groups = self._groups
        for param in (p for slices in self._slices for p in slices):
            param.grad = None

    def _scaler_on_host(self) -> bool:
        """Moves to host memory the tensors by which a GradScaler lets a fused optimizer unscale or skip the step. False
        if there are none. The update would copy them from a GPU without waiting, and read the copy at once."""
        has_scaler = False
        for key in ("grad_scale", "found_inf"):
            value = getattr(self.optimizer, key, None)
            if isinstance(value, Tensor):
                has_scaler = True
                setattr(self.optimizer, key, value.cpu())
        return has_scaler

    def after(self, changed: tuple[int, ...]) -> None:
        """Copies the changed weights to the device, unless `before` did."""
        if self._is_done:
            self.runtime.weights.published(changed)
        else:
            self.publish(changed)
        self._is_done = False

    def publish(self, changed: tuple[int, ...]) -> None:
        """Copies to the device what a method of the optimizer has written."""
        if self.disk is not None:
            for bucket in changed:
                self.disk.move_to_file(bucket)
        self.publish_loaded(changed)

    def publish_loaded(self, buckets: tuple[int, ...]) -> None:
        self._run(buckets, with_update=False)
        self.runtime.weights.published(buckets)

    def take_loaded_state(self, buckets: Sequence[int]) -> None:
        if self.disk is not None:
            self.disk.begin_writes()  # state of an earlier run no longer belongs to these masters
            for bucket in buckets:
                self.disk.move_to_file(bucket)

    def flush(self, take_over_writes: Callable[[], None]) -> None:
        if self.disk is None:
            super().flush(take_over_writes)
            return
        self.runtime.streams.synchronize()
        self.disk.flush(take_over_writes)

    def close(self) -> None:
        self._programs.clear()
        self._slices.clear()
        if self.disk is not None:
            self.disk.close()

    def _run(self, buckets: tuple[int, ...], *, with_update: bool) -> None:
        if not buckets:
            return
        if with_update not in self._programs:
            graph = step_graph(self.runtime.plan, self._buckets, with_update=with_update)
            name = f"{self._name}_{len(self._programs)}"
            own: dict[type[Op], Function] = {
                Update: self.update, CastParam: self.cast_param, CopyToDevice: self.copy_to_device,
            }  # fmt: skip
            self._programs[with_update] = self.runtime.build(graph, self.runtime.plan, name=name, overrides=own)
        self._next = dict(itertools.pairwise(buckets))
        some = None if len(buckets) == len(self._buckets) else frozenset(buckets)
        self._programs[with_update]([], self.runtime.streams, buckets=some)
        self.runtime.streams.join_main()

    # --- the operations ---

    def update(self, bucket: int, master: str, grad: str) -> None:
        mine = {id(p) for p in self._slices[bucket]}
        groups: list[dict[str, Any]] = []
        for group in self._groups:
            members = [p for p in group["params"] if id(p) in mine]
            if members:
                groups.append({**group, "params": members})
        self.optimizer.param_groups = groups
        if self.disk is not None and bucket in self._next:
            self.disk.prefetch(self._next[bucket])
        with _threads(self.num_threads):
            self.optimizer.step()
        if self.disk is not None:
            self.disk.move_to_file(bucket)

    def cast_param(self, bucket: int, dst: str, src: str) -> None:
        record = self.runtime.plan.buckets[bucket]
        self.runtime.buffers.named(dst, record).copy_(self.runtime.buffers.named(src, record).detach())

    def copy_to_device(self, bucket: int, dst: str, src: str) -> None:
        record = self.runtime.plan.buckets[bucket]
        buffers, source = self.runtime.buffers, self.runtime.buffers.named(src, record)
        out = buffers.staged_run(dst, record) if Buffer.named(dst).kind == "staging" else buffers.named(dst, record)
        # of one rank that updates whole parameters the shard has padding, its masters have none
        self.runtime.accumulators.move(out[: source.numel()], source, "to_device")


@contextmanager
def _threads(num: int) -> Iterator[None]:
    """Runs the calling thread's operations with ``num`` threads."""
    before = torch.get_num_threads()
    if num == before:
        yield
        return
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prefer_fused(optimizer: Any) -> None:
    """Selects torch's fused CPU update unless the caller chose another form. Without it torch passes over host memory
    tensor by tensor and operation by operation."""
    traits = TRAITS.get(type(optimizer).__name__)
    for group in optimizer.param_groups if traits is not None and traits.has_fused else ():
        is_chosen = group.get("fused") is not None or group.get("foreach") or group.get("differentiable")
        if not is_chosen and not (group.get("momentum") and group.get("dampening")):  # `start_momenta`
            group["fused"] = True


def start_momenta(optimizer: Any) -> None:
    """torch's fused SGD wants momenta for all parameters that have a gradient, or for none: a parameter whose first
    gradient comes later than others' gets zeros. Without dampening its momentum is then its first gradient, as in
    torch's other forms."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"] or group["dampening"]:
            continue
        with_grad = [p for p in group["params"] if p.grad is not None]
        late = [p for p in with_grad if optimizer.state[p].get("momentum_buffer") is None]
        if len(late) < len(with_grad):
            for p in late:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


_Locked = list[tuple[torch.device, Tensor]]
# Page-locked memory of models that were dropped. The garbage collector adds to it, in any thread, perhaps while another
# one captures a CUDA graph, so it must not call CUDA. Copies of the model may still be queued: the memory lives until
# the calling thread empties the list in `unlock_dropped`.
_DROPPED: _Locked = []


class HostMemory:
    """Allocates tensors in host memory that ``device`` can copy from and to without blocking the host.

    For a GPU each tensor has pages of its own: tensors from the heap share their first and last page with others, and
    the driver registers no page twice. The pages stay locked until `unlock`; the tensors may live on as ordinary ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._locked: _Locked = []
        self.note: str | None = None  # why the driver refused to lock a tensor; later ones are pageable, too
        unlock_dropped()
        # when the process ends, the driver unlocks everything
        weakref.finalize(self, _drop, self._locked, os.getpid()).atexit = False

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] of zeros, page-locked if the device is a GPU and its driver agrees; `note` says why it does not."""
        if self._device.type == "cpu" or not numel:
            return torch.zeros(numel, dtype=dtype, device="cpu")
        if not is_cuda(self._device):
            self.note = (
                f"offload: host memory for {self._device} is pinned by PyTorch's allocator, which may round each block "
                "up to a power of two. zc page-locks memory in place on CUDA and ROCm alone"
            )
            return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=True)
        tensor = _pages(numel, dtype)
        if self.note is None:
            with torch.cuda.device(self._device):
                # portable (1): every device of this process may copy from it
                code = _runtime().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 1)
                if int(code):
                    self.note = self._refused(tensor.nbytes, code)
                else:
                    self._locked.append((self._device, tensor))
        return tensor

    def unlock(self) -> None:
        """Unlocks all pages. The caller has waited for the copies."""
        _unlock(self._locked)

    def _refused(self, nbytes: int, code: Any) -> str:
        """Clears the driver's error, which the next kernel launch would raise, by a launch of its own."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        before = sum(tensor.nbytes for _, tensor in self._locked)
        return (
            f"offload: the driver does not page-lock {nbytes:,} bytes of host memory after {before:,} bytes: error "
            f"{int(code)}, {_runtime().cudaGetErrorString(code)}. Copies from and to pageable memory block the host "
            "and overlap nothing; a low `ulimit -l` is one reason"
        )


def unlock_dropped() -> None:
    """Unlocks the memory of models that the program has dropped, when the device has done its copies."""
    dropped = [_DROPPED.pop() for _ in range(len(_DROPPED))]
    for device in {device for device, _ in dropped}:
        torch.cuda.synchronize(device)
    _unlock(dropped)


def _pages(numel: int, dtype: torch.dtype) -> Tensor:
    """[numel] of zeros on pages of their own. They are shared with forked processes: after a fork of private pages, the
    next write of this process would go to a copy that the device does not know."""
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=dtype)  # holds the pages


def _drop(locked: _Locked, process: int) -> None:
    if os.getpid() == process:  # the registrations are not a forked process's
        _DROPPED.extend(locked)


def _unlock(locked: _Locked) -> None:
    while locked:
        _, tensor = locked.pop()
        _runtime().cudaHostUnregister(tensor.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
