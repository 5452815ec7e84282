"""One rank's gradient path: what happens between a backward's first gradient and the finished shard.

Gradients come in by two ways and no other: through a compiled schedule, or through the parameter's
post-accumulate-grad hook (eager code, and the whole of backend="eager"). Whatever does not fill a bucket inside one
compiled graph is *deposited*, and a bucket is reduced when all its slots have arrived and all earlier buckets are done,
or at the end of the backward, in plan order: the same on every rank, and nobody counts hooks (INVARIANTS I6, I7).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zc import backend, param_grads
from zc.agreement import Agreement, describe
from zc.buffers import Buffers
from zc.comm import Group
from zc.config import Config
from zc.disk_file import StateFile
from zc.errors import UncoveredGradientError
from zc.flushes import Flushes
from zc.gathering import WeightGather
from zc.ledger import Ledger
from zc.log import log
from zc.ops import Acc, GradientOps, Segment
from zc.passes.base import Pass
from zc.passes.pipeline import PIPELINE
from zc.plan import Bucket, Plan
from zc.program import Program
from zc.streams import Streams, ThreadStreams


class Runtime:
    """State of one compiled model on one rank. Made by `zc.compile`; the module and the optimizer know it, nobody
    else."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        buffers: Buffers,
        group: Group,
        streams: Streams,
        params: dict[str, nn.Parameter],
    ) -> None:
        self.config, self.plan, self.buffers, self.group, self.streams = config, plan, buffers, group, streams
        self.params = params
        self.ops = GradientOps(plan, buffers, group)
        self.ops.on_deposit = self._keep
        if group.world_size > 1:
            group.watch(plan, backend.default_store())
        if group.check is not None and isinstance(streams, ThreadStreams):
            streams.wait_for = group.check.wait_event  # a stream's thread may wait for a rank that never comes
        self.agreement = Agreement(group, _num_flags(plan), defers=not plan.placement.reduces_every_backward)
        self.passes: tuple[Pass, ...] = tuple(p for p in PIPELINE if getattr(config, p.name, True))
        self.flushes = Flushes(self.passes, self.ops)
        self.programs: list[Program] = []  # of compiled backward graphs, for explain
        self.forwards: list[Program] = []  # of compiled forward graphs (overlap_gather)
        self.weights = WeightGather(self)
        self.compiled_segments: dict[str, Segment] = {}  # by canonical text
        self.notes: list[str] = []  # fallbacks taken and other things worth saying, each once
        self.ledger = Ledger()
        self.ledger.breaks_before = backend.graph_breaks()
        self.num_skipped = 0  # steps that a GradScaler left out
        self.frozen: dict[str, nn.Parameter] = {}  # not in the plan; one that asks for a gradient needs zc.recompile
        self.is_boundary = True
        # buffers: rank 0 sends them before it waits for another rank at a boundary; the others take them behind it
        self.before_meeting: Callable[[], None] = lambda: None
        self.after_meeting: Callable[[], None] = lambda: None
        self.on_final: Callable[[], None] = lambda: None  # the optimizer's: hands out the slices' gradients
        self.on_backward: Callable[[], None] = lambda: None  # the optimizer's: shows the sharded gradients
        self.on_cleared: Callable[[], None] = lambda: None  # the optimizer's: lets go of the slices' gradients
        self.host_programs: Callable[[], list[Program]] = list  # the optimizer's: updates in host memory, for explain
        self.state_file: StateFile | None = None  # offload="disk"
        self.host_update = "none yet"  # how they are done, for explain
        self.is_shown: Callable[[str, Tensor], bool] = lambda name, grad: False
        self.hooks: list[RemovableHandle] = []  # on parameters
        self._pending: dict[int, dict[int, list[Tensor]]] = {}  # bucket -> slot -> gradients of this backward
        self._done: set[int] = set()  # buckets that this backward has reduced
        self._open_tasks: set[int] = set()  # autograd graph tasks whose end will call us
        self._final = False
        self._is_home = True  # no gradient is on its way: all streams that carry them were joined since the last one

    def grow(self, plan: Plan, params: dict[str, nn.Parameter]) -> None:
        """Takes in ``plan``, whose first buckets are the present ones, and the parameters of the others. Schedules that
        were compiled before stay as they are: their buckets keep their places."""
        self.streams.synchronize()
        self.weights.grow()
        added = plan.buckets[len(self.plan.buckets) :]
        self.buffers.grow(plan)
        self.ops.grow(plan)
        self.plan = plan
        self.agreement.numel_flags = _num_flags(plan)
        if self.group.check is not None:
            self.group.check.describe = plan.describe_exchange
        self.params.update(params)
        self._install_hooks(added)

    # --- gradients come in ---

    def begin_backward(self) -> None:
        """Called by whatever brings a gradient, in autograd's thread: makes sure that the end of this backward is
        ours."""
        backend.refuse_compiled_autograd()
        self._final = self._is_home = False
        task = backend.current_graph_task()
        if task not in self._open_tasks:
            param_grads.refuse_accumulate_hooks(self.params)
            if not self._open_tasks:  # not inside another one (reentrant checkpointing), which has yet to show its own
                self._notice_cleared()
            self._open_tasks.add(task)
            backend.queue_callback(partial(self.end_backward, task))

    def run_program(self, program: Program, args: list[object]) -> tuple[object, ...]:
        """A compiled backward graph, from its first node to its last."""
        self.begin_backward()
        self.ledger.step.runs[program.name] += 1
        log.debug("%s: runs, fills %s", program.name, sorted(program.inline_buckets))
        outputs = program(args, self.streams, self._announce(program.launched))
        if program.plan.reduces:
            self._done |= program.inline_buckets
        self._flush_ready()
        return outputs

    def receive_eager(self, bucket: int, slot: int, param: nn.Parameter) -> None:
        """The post-accumulate-grad hook: the gradient leaves ``param.grad`` for the plan."""
        grad = param.grad
        if grad is None or self.is_shown(self.plan.buckets[bucket].slots[slot].name, grad):
            return  # nothing came, or it was added to a ShardedGrad, which has called `receive`
        param.grad = None
        self.receive(bucket, slot, grad)

    def receive(self, bucket: int, slot: int, grad: Tensor) -> None:
        """A gradient [shape of the parameter] from outside compiled graphs."""
        if grad.is_sparse or grad.is_complex():
            name = self.plan.buckets[bucket].slots[slot].name
            raise UncoveredGradientError(
                f"the gradient of {name} is {grad.layout} {grad.dtype}: zc takes dense real ones"
            )
        self.begin_backward()
        self.ledger.step.hooks[bucket, slot] += 1
        log.debug("bucket %d: a hook brings the gradient of %s", bucket, self.plan.buckets[bucket].slots[slot].name)
        self._keep(bucket, slot, grad)
        self._flush_ready()

    def _keep(self, bucket: int, slot: int, grad: Tensor) -> None:
        # lifetime: until the bucket is flushed, at the latest at the end of this backward
        self._pending.setdefault(bucket, {}).setdefault(slot, []).append(grad.detach())

    def _announce(self, buckets: Sequence[int]) -> Callable[[], bool] | None:
        """Tells the other ranks which buckets come next. The comm stream asks the answer before it reduces them."""
        if not buckets or self.plan.world_size == 1:
            return None
        return self.agreement.announce(describe(buckets, [self.plan.buckets[b].slots[0].name for b in buckets])).is_same

    def _flush_ready(self) -> None:
        ready = []
        for bucket in self.plan.buckets:
            if bucket.index in self._done:
                continue
            if len(self._pending.get(bucket.index, ())) < len(bucket.slots):
                break  # later ones wait: one order on every rank
            ready.append(bucket.index)
        self._flush(ready, reduce=self.current_plan.reduces)

    def end_backward(self, task: int) -> None:
        """Autograd's final callback. What is still deposited is written, with zeros where nothing came."""
        self._open_tasks.discard(task)
        # stage 2 must reduce here; stage 1 keeps a partial sum, which waits for the boundary
        self._flush(sorted(self._pending), reduce=self.plan.placement.reduces_every_backward)
        self._done.clear()
        self.agreement.check()  # of what is known by now: this backward may be the rank's last
        if self.config.backend != "eager" and not self.programs:
            self.say_once("nothing of the model was compiled: every gradient came in through its parameter's hook")
        self.on_backward()

    def _flush(self, buckets: Sequence[int], *, reduce: bool) -> None:
        is_agreed = self._announce(buckets) if reduce else None
        # a microbatch in no_sync that reduces (stage 2) still leaves the way to host memory to the boundary
        is_final = reduce and self.is_boundary
        for index in buckets:
            self.flushes.get("flush", index, is_final, self.plan)(self._take(index), self.streams, is_agreed)
            if reduce:
                self._done.add(index)

    def _take(self, index: int) -> list[object]:
        """What was deposited for one bucket: a gradient a slot, None where nothing came."""
        arrived = self._pending.pop(index)
        bucket = self.plan.buckets[index]
        grads: list[object] = []
        for slot in range(len(bucket.slots)):
            parts = arrived.get(slot, [])
            total = parts[0] if parts else None
            for part in parts[1:]:  # in fp32: a second part must not be rounded to the first one's dtype
                assert total is not None
                total = total.to(bucket.acc_dtype) + part
            grads.append(total)
        return grads

    # --- boundaries ---

    @property
    def is_final(self) -> bool:
        """Whether the gradients are finished, and nothing has come since."""
        return self._final

    @property
    def current_plan(self) -> Plan:
        return self.plan if self.is_boundary else self.plan.microbatch()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_boundary = self.is_boundary, False
        try:
            yield
        finally:
            self.is_boundary = before

    def finish_gradients(self) -> None:
        """The boundary: afterwards every rank's shard holds the mean over ranks of the sum over backward calls."""
        self.weights.synchronize()
        param_grads.check(self.params, self.frozen, self.is_shown)
        self._notice_cleared()
        if self._final:
            return
        self.before_meeting()
        self._pending.clear()  # of a backward that raised half-way: its end never came
        self._open_tasks.clear()
        self.streams.join_home()
        self._meet()
        self.after_meeting()
        self._land()
        self._final = self._is_home = True
        self.on_final()

    def _land(self) -> None:
        """With offload: what no boundary backward has copied to host memory (microbatches in no_sync, partial
        buckets)."""
        if self.plan.offload is None or self.plan.offload.accumulates_on_host:
            return
        for bucket in self.plan.buckets:
            if self.ops.state[bucket.index] is not Acc.EMPTY and not self.ops.landed[bucket.index]:
                self.flushes.get("land", bucket.index, True, self.plan)([], self.streams)
        self.streams.join_home()

    def wait_for_host_memory(self) -> None:
        """Before the calling thread itself reads or writes what copies may still be on their way to."""
        if self.plan.offload is not None:
            self.streams.synchronize()

    def _meet(self) -> None:
        """All ranks are at the boundary: one small exchange on the host says which parameters have a gradient on any of
        them, and which buckets some rank has yet to reduce."""
        if self.plan.world_size == 1:
            return
        partial = [state is Acc.PARTIAL for state in self.ops.state]
        flags = self.agreement.meet([*self.ops.touched_flags(), *map(int, partial)])
        self.ops.set_touched(flags[: len(flags) - len(partial)])
        if self.plan.placement.reduces_every_backward:
            return
        for bucket, is_partial in zip(self.plan.buckets, flags[len(flags) - len(partial) :], strict=True):
            if is_partial:
                if self.ops.state[bucket.index] is not Acc.PARTIAL:
                    self.ops.add_nothing(bucket.index)
                self.flushes.get("reduce", bucket.index, True, self.plan)([], self.streams)
        self.streams.join_home()

    def _notice_cleared(self) -> None:
        """``param.grad = None`` by hand, or the stock model.zero_grad(): the accumulator forgets that parameter."""
        gone = param_grads.cleared(self.plan, self.ops, self.params)
        if not gone:
            return
        self.streams.join_home()
        self._final = False
        if len(gone) == sum(sum(flags) for flags in self.ops.touched):
            self.on_cleared()  # their views would keep the memory until this backward has taken as much again
            self.ops.clear(set_to_none=True)
            return
        self.wait_for_host_memory()
        for bucket, slot in gone:
            self.ops.forget(bucket, slot)

    def clear(self, *, set_to_none: bool) -> None:
        """zero_grad of the module or of the optimizer."""
        if not self._is_home:  # else gathers may go on (overlap_gather)
            self.streams.join_home()
        if not set_to_none:
            self.wait_for_host_memory()
        self._pending.clear()
        self._open_tasks.clear()
        self._final = False
        self.ops.clear(set_to_none=set_to_none)

    def full_grad(self, index: int) -> dict[str, Tensor | None]:
        """The whole gradients [shape] of one bucket's parameters, in acc_dtype, on every rank; None where none came."""
        self.finish_gradients()
        self.wait_for_host_memory()
        bucket = self.plan.buckets[index]
        self.buffers.hold(bucket)  # one without a gradient has no memory, and is gathered all the same
        shard = self.buffers.acc_shard(bucket).to(bucket.device)
        flat = shard
        if self.group.world_size > 1:
            flat = torch.empty(bucket.numel, dtype=shard.dtype, device=shard.device)
            work = self.group.all_gather(flat, shard.contiguous(), "gather gradient", index)
            if work is not None:
                work.wait()
        pairs = zip(bucket.slots, self.ops.touched[index], strict=True)
        return {s.name: flat[s.offset : s.stop].view(s.shape).clone() if touched else None for s, touched in pairs}

    def after_update(self) -> None:
        self._final = False  # the next step meets the other ranks again, whether or not this one has a backward before
        unused = self.ledger.unused(self.programs, self.plan, self.ops.touched)
        if unused:
            self.say_once(unused)
        check, exposed_s = self.group.check, None
        if check is not None and isinstance(self.streams, ThreadStreams):  # elsewhere the device waits, not the host
            exposed_s, check.exposed_s = check.exposed_s, 0.0
        self.ledger.close_step(exposed_s, self.group.take_nbytes_sent())
        log.debug("step %d is done", self.ledger.num_steps)
        self.ops.close_step()

    def say_once(self, note: str) -> None:
        """Records a fallback or a condition for explain, and warns the first time."""
        if note not in self.notes:
            self.notes.append(note)
            import warnings

            warnings.warn(f"zc: {note}", stacklevel=3)

    def install_hooks(self) -> None:
        self._install_hooks(self.plan.buckets)

    def _install_hooks(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for k, slot in enumerate(bucket.slots):
                hook = partial(_receive, weakref.ref(self), bucket.index, k)
                param = self.params[slot.name]
                self.hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]


def _receive(runtime: weakref.ref[Runtime], bucket: int, slot: int, param: nn.Parameter) -> None:
    """The hook on a parameter. It holds the runtime weakly: Python's collector does not look into a tensor's hooks, so
    a cycle through them would keep a dropped model for ever."""
    found = runtime()
    if found is not None:
        found.receive_eager(bucket, slot, param)


def _num_flags(plan: Plan) -> int:
    """What ranks tell each other at a boundary: which parameters have a gradient, which buckets a partial sum."""
    return len(plan.buckets) + sum(len(bucket.slots) for bucket in plan.buckets)
