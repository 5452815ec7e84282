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
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zc import torch_private
from zc.engine import param_grads
from zc.engine.buffers import Buffers
from zc.engine.flushes import Flushes
from zc.engine.ledger import Ledger
from zc.engine.ops import Acc, GradientOps
from zc.engine.overlap_gather import WeightGather
from zc.engine.program import Program
from zc.engine.rounds import Rounds
from zc.engine.streams import Streams, ThreadStreams
from zc.errors import UncoveredGradientError, ZcError
from zc.log import log
from zc.passes.base import Pass
from zc.passes.pipeline import PIPELINE
from zc.planning.plan import Bucket, Plan
from zc.ranks.agreement import Agreement
from zc.ranks.comm import Group

if TYPE_CHECKING:
    from zc.config import Config
    from zc.engine.program import Segment
    from zc.offload.disk_file import StateFile


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
            group.watch(plan, torch_private.default_store())
        if group.check is not None and isinstance(streams, ThreadStreams):
            streams.wait_for = group.check.wait_event  # a stream's thread may wait for a rank that never comes
        self.agreement = Agreement(group)
        self.rounds = Rounds(plan, self.ops, self.agreement)
        self.passes: tuple[Pass, ...] = tuple(p for p in PIPELINE if getattr(config, p.name, True))
        self.flushes = Flushes(self.passes, self.ops)
        self.programs: list[Program] = []  # of compiled backward graphs, for explain
        self.forwards: list[Program] = []  # of compiled forward graphs (overlap_gather)
        self.weights = WeightGather(self)
        self.compiled_segments: dict[str, Segment] = {}  # by canonical text
        self.notes: list[str] = []  # fallbacks taken and other things worth saying, each once
        self.ledger = Ledger()
        self.ledger.breaks_before = torch_private.graph_breaks()
        self.num_skipped = 0  # steps that a GradScaler left out
        self.frozen: dict[str, nn.Parameter] = {}  # not in the plan; one that asks for a gradient needs zc.recompile
        self.is_boundary = True
        # buffers: rank 0 sends them before it waits for another rank at a boundary; the others take them behind it
        self.before_meeting: Callable[[], None] = lambda: None
        self.after_meeting: Callable[[], None] = lambda: None
        self.on_final: Callable[[], None] = lambda: None  # the optimizer's: hands out the slices' gradients
        self.on_backward: Callable[[], None] = lambda: None  # the optimizer's: shows the sharded gradients
        self.on_cleared: Callable[[], None] = lambda: None  # the optimizer's: no parameter and no slice has a .grad
        self.slices_cleared: Callable[[], bool] = lambda: False  # the optimizer's: whether the caller has done so
        self.may_be_cleared: Callable[[], bool] = lambda: False  # the same by a look at one slice
        self.host_programs: Callable[[], list[Program]] = list  # the optimizer's: updates in host memory, for explain
        self.state_file: StateFile | None = None  # offload="disk"
        self.host_update = "none yet"  # how they are done, for explain
        self.is_shown: Callable[[str, Tensor], bool] = lambda name, grad: False
        self.hooks: list[RemovableHandle] = []  # on parameters
        self._pending: dict[int, dict[int, Tensor]] = {}  # bucket -> slot -> what is kept (zc/engine/rounds.py)
        self._done: set[int] = set()  # buckets that this backward has reduced
        # autograd's graph tasks whose end will call us; the engine holds the callback, so one that raised lets go of it
        self._open_tasks: dict[int, weakref.ref[Callable[[], None]]] = {}
        self._has_round = False  # the backward that runs reduces, and has begun
        self._has_failed = False  # a backward has raised, and the accumulators may hold some of it
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
        self.rounds.grow(plan)
        if self.group.check is not None:
            self.group.check.describe = plan.describe_exchange
        self.params.update(params)
        self._install_hooks(added)

    # --- gradients come in ---

    def begin_backward(self, program: Program | None = None) -> None:
        """Called by whatever brings a gradient, ``program`` or a hook, in autograd's thread: makes sure that the end of
        this backward is ours."""
        param_grads.refuse_compiled_autograd()
        self._final = self._is_home = False
        task = torch_private.current_graph_task()
        if task in self._open_tasks and self._open_tasks[task]() is not None:
            return
        param_grads.refuse_accumulate_hooks(self.params)
        self._drop_failed()
        if not self._open_tasks:  # not inside another one (reentrant checkpointing), which has yet to show its own
            self._notice_cleared()
        callback = partial(self.end_backward, task)
        self._open_tasks[task] = weakref.ref(callback)
        torch_private.queue_callback(callback)
        # inside another backward, of which nothing has come yet, is no round of its own: other ranks may have none
        may_wait = not self.plan.placement.reduces_every_backward
        is_inner = may_wait and not self._has_round and torch_private.is_inside_another_backward()
        if self.current_plan.reduces and not self._has_round and not is_inner:
            self._has_round = True
            if program is None:
                self.rounds.begin("hooks", None, is_boundary=self.is_boundary)
            else:
                launched, brings = program.launched, program.brings
                self.rounds.begin(program.name, launched, brings, is_boundary=self.is_boundary)

    def run_program(self, program: Program, args: list[object]) -> tuple[object, ...]:
        """A compiled backward graph, from its first node to its last."""
        self.begin_backward(program)
        self.ledger.step.runs[program.name] += 1
        log.debug("%s: runs, fills %s", program.name, sorted(program.inline_buckets))
        outputs = program(args, self.streams, self.rounds.is_agreed(program.launched))
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
        # lifetime: until the bucket is reduced, or written into a partial sum: at the end of this backward, or, where
        # ranks differ, at the latest at the boundary
        self.ops.touched[bucket][slot] = True
        arrived = self._pending.setdefault(bucket, {})
        grad = grad.detach()
        if slot in arrived:  # in fp32: a second part must not be rounded to the first one's dtype
            grad = arrived[slot].to(self.plan.buckets[bucket].acc_dtype) + grad
        arrived[slot] = grad

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
        self._open_tasks.pop(task, None)
        if self._open_tasks:
            return  # inside another backward (reentrant checkpointing), whose end is yet to come
        keeps_grads = self.plan.placement.gradient_in_ring
        if not keeps_grads or self.plan.world_size == 1:  # stage 1 keeps a partial sum; one rank has nobody to ask
            self._flush(sorted(self._pending), reduce=keeps_grads)
        if keeps_grads and self.rounds.differs():
            self.say_once(
                "ranks were to reduce other buckets in one backward, or have other numbers of backwards: the gradients "
                "of such a backward are whole to its end, or to the update, as without ZeRO-2"
            )
        self._reduce_kept(self.rounds.left(self._pending), is_final=self.is_boundary)
        self._done.clear()
        self._reduce_kept(self.rounds.end(self._pending), is_final=self.is_boundary)
        for arrived in self._pending.values():  # to the boundary; what came may be the caller's (backward(gradient=))
            arrived.update({slot: grad.clone() for slot, grad in arrived.items()})
        self._has_round = False
        if self.config.backend != "eager" and not self.programs:
            self.say_once("nothing of the model was compiled: every gradient came in through its parameter's hook")
        self.on_backward()

    def _drop_failed(self) -> None:
        """Of a backward that raised, whose end never came, nothing goes on: what waits for its bucket is dropped here,
        what is in the accumulators by `_notice_cleared`."""
        failed = [task for task, callback in self._open_tasks.items() if callback() is None]
        if not failed:
            return
        for task in failed:
            del self._open_tasks[task]
        if self._open_tasks:
            raise ZcError("a backward inside another one raised and was caught: their gradients can't be told apart")
        self._pending.clear()
        self._done.clear()
        self._cut_short()
        self._has_failed = True

    def _cut_short(self) -> None:
        """What all ranks have agreed to reduce in a backward that has not come to its end on this one: others wait."""
        check = self.group.check
        if self._has_round and check is not None and not check.has_failed:
            self._reduce_kept(self.rounds.cut_short(), is_final=self.is_boundary)
        self._has_round = False

    def _flush(self, buckets: Sequence[int], *, reduce: bool) -> None:
        is_agreed = self.rounds.is_agreed(buckets) if reduce else None
        # a microbatch in no_sync that reduces (stage 2) still leaves the way to host memory to the boundary
        is_final = reduce and self.is_boundary
        for index in buckets:
            self.flushes.get("flush", index, is_final, self.plan)(self._take(index), self.streams, is_agreed)
            if reduce:
                self._done.add(index)

    def _take(self, index: int) -> list[object]:
        """What was deposited for one bucket: a gradient a slot, None where nothing came."""
        arrived = self._pending.pop(index, {})
        return [arrived.get(slot) for slot in range(len(self.plan.buckets[index].slots))]

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

    def finish_gradients(self, *, by_grad: bool = False) -> None:
        """The boundary: afterwards every rank's shard holds the mean over ranks of the sum over backward calls.

        ``by_grad``: a ``param.grad`` asks, so a loop over all that are there may go on: raises ZcError, on all ranks,
        where these had not shown the same ones.
        """
        self.weights.synchronize()
        param_grads.check(self.params, self.frozen, self.is_shown)
        self._drop_failed()
        self._notice_cleared()
        if self._final:
            return
        self.before_meeting()
        self.streams.join_home()
        self._meet(by_grad)
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

    def _meet(self, by_grad: bool) -> None:
        """All ranks are at the boundary: one small exchange on the host says which parameters have a gradient on any of
        them, and which buckets some rank has yet to reduce."""
        if self.plan.world_size == 1:
            return
        kept = {k for k, state in enumerate(self.ops.state) if state is Acc.PARTIAL} | self._pending.keys()
        shown = [list(flags) for flags in self.rounds.known]
        *flags, is_asked = self.rounds.meet(kept, by_grad=by_grad)
        if is_asked and not self.rounds.showed_one_set:
            raise ZcError(param_grads.shown_apart(self.plan, shown, self.rounds.known))
        self.ops.set_touched(flags[: -len(self.plan.buckets)])
        self._reduce_kept([k for k, flag in enumerate(flags[-len(self.plan.buckets) :]) if flag], is_final=True)
        self.streams.join_home()

    def _reduce_kept(self, buckets: Sequence[int], *, is_final: bool) -> None:
        """What this rank keeps of these buckets (zc/engine/rounds.py), on all ranks, whether or not this one has
        something; a model that was called twice may have proposed a bucket twice."""
        if self.plan.placement.gradient_in_ring:
            for index in buckets:
                self.flushes.get("flush", index, is_final, self.plan)(self._take(index), self.streams)
            return
        for k, index in enumerate(buckets):
            if k == 0 or index in buckets[:k]:
                self.streams.join_home()  # what its accumulator holds is known when the ones before have ended
            if self.ops.state[index] is not Acc.PARTIAL:
                self.ops.add_nothing(index)
            self.buffers.hold(self.plan.buckets[index])  # zc.recompile drops the ring
            self.flushes.get("reduce", index, True, self.plan)([], self.streams)

    def _notice_cleared(self) -> None:
        """Whatever way the caller has dropped gradients by since: ``param.grad = None``, the stock model.zero_grad(),
        the zero_grad of the optimizer's class, its own tensors' ``.grad``. Raises ZcError where some of what is left
        is mixed with a backward that raised."""
        gone = param_grads.cleared(self.plan, self.rounds.known, self.params)
        num_left = sum(map(sum, self.rounds.known)) - len(gone)
        if self.slices_cleared() or (num_left == 0 and (gone or self._has_failed)):
            self.clear(set_to_none=True)
            return
        if self._has_failed:
            raise ZcError(
                f"a backward raised, and {num_left} parameter(s) still have the gradients of backwards before it, to "
                "which it may have added: call optimizer.zero_grad() before you go on"
            )
        if not gone:
            return
        self.streams.join_home()
        self._final = False
        self.wait_for_host_memory()
        for bucket, slot in gone:
            self.rounds.known[bucket][slot] = False
            self._pending.get(bucket, {}).pop(slot, None)
            self.ops.forget(bucket, slot)

    def clear(self, *, set_to_none: bool) -> None:
        """zero_grad of the module or of the optimizer."""
        self._cut_short()
        if not self._is_home:  # else gathers may go on (overlap_gather)
            self.streams.join_home()
        if not set_to_none:
            self.wait_for_host_memory()
        self._pending.clear()
        self._open_tasks.clear()
        self._done.clear()
        self._final = self._has_failed = False
        self.rounds.clear(set_to_none=set_to_none)
        if set_to_none:
            self.on_cleared()  # before the memory goes: their views would keep it
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

