"""One rank's gradient path: what happens between a backward's first gradient and the finished shard.

Gradients come in by two ways and no other: through a compiled schedule, or through the parameter's
post-accumulate-grad hook (eager code, and the whole of backend="eager"). Whatever does not fill a bucket inside one
compiled graph is *deposited*, and a bucket is reduced when all its slots have arrived and all earlier buckets are done,
or at the end of the backward, in plan order: the same on every rank, and nobody counts hooks.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zc import torch_private
from zc.engine import param_grads
from zc.engine.accumulators import Acc
from zc.engine.announcements import Announcements, State
from zc.engine.buffers import Buffers
from zc.engine.core import Core, Listener
from zc.engine.eager_gradients import Backward, EagerGradients
from zc.engine.ledger import Where
from zc.engine.memory_order import in_shape
from zc.engine.overlap_gather import WeightGather
from zc.engine.program import Program
from zc.engine.sharded_weights import ShardedWeights
from zc.engine.streams import Streams, ThreadStreams
from zc.engine.weight_uses import WeightUses
from zc.errors import UncoveredGradientError, ZcError
from zc.log import log
from zc.planning.plan import Bucket, Plan
from zc.ranks.group import Group
from zc.ranks.journal import GATHER_GRADIENT

if TYPE_CHECKING:
    from zc.config import Config


class Phase(enum.Enum):
    """Where this rank is between two updates."""

    OPEN = "gradients may come and go"
    FAILED = "a backward has raised, and the accumulators may hold some of it"
    READ = "as FINAL, and no rank had a backward before: one that has its first now expects the others at the update"
    FINAL = "the gradients are finished, and nothing has come since"


class Runtime(Core):
    """The gradients of one compiled model on one rank. The module and the optimizers know it, nobody else."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        buffers: Buffers,
        group: Group,
        streams: Streams,
        params: dict[str, nn.Parameter],
    ) -> None:
        super().__init__(config, plan, buffers, group, streams, params)
        self.accumulators.on_deposit = self._keep
        if group.world_size > 1:
            group.set_plan(plan)
            if group.journal is not None and not group.journal.watch.has_own_connection:
                # a thread that waits for a key blocks all other threads of its client of the store
                self.say_once(
                    f"a {type(torch_private.default_store()).__name__} can't be connected to twice: while the program "
                    "waits for a key of it, the watch for lost ranks waits, too"
                )
        if group.journal is not None and isinstance(streams, ThreadStreams):
            streams.wait_for = group.journal.wait_event  # a stream's thread may wait for a rank that never comes
        self.announcements = Announcements(plan, self.accumulators, group)
        self.eager = EagerGradients(streams, self.passes, self.bind)
        if group.journal is not None:
            group.journal.has_raised = partial(_has_raised, weakref.ref(self.eager))
        self.weights: WeightGather | ShardedWeights = (
            ShardedWeights(self, WeightUses(self)) if plan.sharded else WeightGather(self)
        )
        self._left_to_outer = -1  # autograd's number of the last backward inside another one, which announces it
        self.around_blocks: frozenset[str] = frozenset()  # matrices that are read there
        self.listeners: list[Listener] = []
        self.hooks: list[RemovableHandle] = []  # on parameters
        self._phase = Phase.OPEN
        # parameters of which a part came after their bucket was full and reduced (tied weights in two graphs): from the
        # next backward on, graphs leave their parts to autograd, which sums them
        self.summed_by_autograd: set[str] = set()
        self._is_home = True  # no gradient is on its way: all streams that carry them were joined since the last one
        self._updated: set[int] = set()  # optimizers, since the ledger's step was closed

    def grow(self, plan: Plan, params: dict[str, nn.Parameter]) -> None:
        """Takes in ``plan``, whose first buckets are the present ones, and the parameters of the others. Schedules that
        were compiled before stay as they are: their buckets keep their places."""
        self.streams.synchronize()
        self.weights.grow()
        added = plan.buckets[len(self.plan.buckets) :]
        self.buffers.grow(plan)
        self.accumulators.grow(plan)
        self.plan = plan
        self.announcements.grow(plan)
        self.group.set_plan(plan)
        self.params.update(params)
        self.placed.update(params)
        self._install_hooks(added)

    # --- gradients come in ---

    def begin_backward(self, program: Program | None = None) -> None:
        """Called by whatever brings a gradient, ``program`` or a hook, in autograd's thread: makes sure that the end of
        this backward is ours."""
        param_grads.refuse_compiled_autograd()
        self._is_home = False
        self._reopen()
        if self.eager.is_entered():
            self._announce(program)
            return
        self.streams.clock.phase("backward")
        param_grads.refuse_accumulate_hooks(self.params)
        self._drop_failed()
        if self.eager.backward is Backward.NONE:  # else the outer one (reentrant checkpointing) has yet to show its own
            self._notice_cleared()
        self.eager.enter(self._end_backward)
        self._announce(program)

    def _announce(self, program: Program | None) -> None:
        """The first gradient of a backward announces it. A graph brings none where autograd has to see all of them, or
        under torch.autograd.grad, in which other ranks may run no graph at all."""
        is_new = self.current_plan.reduces and self.announcements.state is State.IDLE
        task = torch_private.current_graph_task()
        if not is_new or self._left_to_outer == task or not (program is None or program.brings):
            return
        outer = torch_private.outer_node()
        if outer is not None:
            # The outer backward announces both: on other ranks it may have brought something before this one.
            self._left_to_outer = task
            torch_private.call_once_left(outer, partial(_begin, weakref.ref(self)))
        elif program is None:
            self.announcements.begin("hooks", None, frozenset(), is_boundary=self.is_boundary)
        else:
            # a graph that does not bring all is one of several: the last backward like it tells which ones
            is_all = len(program.brings) == sum(len(b.slots) for b in self.plan.buckets)
            launched = program.launched if is_all else None
            self.announcements.begin(program.name, launched, program.brings, is_boundary=self.is_boundary)

    def run_program(self, program: Program, args: list[object]) -> tuple[object, ...]:
        """A compiled backward graph, from its first node to its last."""
        self.begin_backward(program)
        self.ledger.step.runs[program.name] += 1
        log.debug("%s: runs, fills %s", program.name, sorted(program.inline_buckets))
        outputs = program(args, self.streams, self.announcements.may_reduce(program.launched))
        if program.plan.reduces:
            self.eager.done |= program.inline_buckets
        self._flush_ready()
        return outputs

    def receive_eager(self, bucket: int, slot: int, param: nn.Parameter) -> None:
        """The post-accumulate-grad hook: the gradient leaves ``param.grad`` for the plan."""
        grad = param.grad
        if grad is None or grad is self.shown.get(self.plan.buckets[bucket].slots[slot].name):
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

    def may_be_cleared(self) -> bool:
        """Whether the caller may have taken the gradients of an optimizer's own tensors, by a look at few."""
        return any(listener.may_be_cleared() for listener in self.listeners)

    def _keep(self, bucket: int, slot: int, grad: Tensor) -> None:
        self.accumulators.touched[bucket][slot] = True
        self.eager.add(self.plan.buckets[bucket], slot, grad)
        if bucket in self.eager.done:
            self.summed_by_autograd.add(self.plan.buckets[bucket].slots[slot].name)

    def _flush_ready(self) -> None:
        self._flush(self.eager.ready(self.plan), reduce=self.current_plan.reduces)

    def _end_backward(self) -> None:
        """Autograd's final callback. What is still deposited is written, with zeros where nothing came."""
        keeps_grads = self.plan.placement.shards_gradients
        if not keeps_grads or self.plan.num_ranks == 1:  # stage 1 keeps a partial sum; one rank has nobody to ask
            self._flush(sorted(self.eager.buckets), reduce=keeps_grads)
        if keeps_grads and self.announcements.differs():
            self.say_once(
                "ranks were to reduce other buckets in one backward, or have other numbers of backwards: the gradients "
                "of such a backward are whole to its end, or to the update, as without ZeRO-2"
            )
        self._reduce_kept(self.announcements.left(self.eager.buckets), is_final=self.is_boundary)
        self.eager.done.clear()
        self._reduce_kept(self.announcements.end(self.eager.buckets), is_final=self.is_boundary)
        self.eager.own()
        if self.config.backend != "eager" and not self.programs:
            self.say_once("nothing of the model was compiled: every gradient came in through its parameter's hook")
        for listener in self.listeners:
            listener.backward_ended()
        self.streams.clock.phase("forward")

    def _drop_failed(self) -> None:
        """Of a backward that raised, whose end never came, nothing goes on: what waits for its bucket is dropped here,
        what is in the accumulators by `_notice_cleared`."""
        if self.eager.backward is not Backward.RAISED:
            return
        if self.eager.drop_failed() is not Backward.NONE:
            raise ZcError("a backward inside another one raised and was caught: their gradients can't be told apart")
        self._cut_short()
        self._phase = Phase.FAILED

    def _cut_short(self) -> None:
        """Reduces what all ranks have agreed to reduce in a backward that did not end on this one: others wait."""
        journal = self.group.journal
        if self.announcements.state is not State.IDLE and journal is not None and not journal.has_failed:
            self.streams.join_main()  # each reduction that was issued has begun, and is counted
            self._reduce_kept(self.announcements.cut_short(), is_final=self.is_boundary)

    def _flush(self, buckets: Sequence[int], *, reduce: bool) -> None:
        may_reduce = self.announcements.may_reduce(buckets) if reduce else None
        # a microbatch in no_sync that reduces (stage 2) still leaves the way to host memory to the boundary
        is_final = reduce and self.is_boundary
        for index in buckets:
            self.eager.write(self.plan, index, is_final=is_final, may_reduce=may_reduce)
            if reduce:
                self.eager.done.add(index)

    # --- boundaries ---

    @property
    def is_final(self) -> bool:
        """Whether the gradients are finished, and nothing has come since."""
        return self._phase in (Phase.READ, Phase.FINAL)

    def _reopen(self) -> None:
        if self.is_final:
            self._phase = Phase.OPEN

    def finish_gradients(self, *, by_grad: bool = False) -> None:
        """The boundary: afterwards every rank's shard holds the mean over ranks of the sum over backward calls.

        ``by_grad``: a ``param.grad`` asks, so a loop over all that are there may go on: raises ZcError, on all ranks,
        where these had not shown the same ones.
        """
        self.streams.clock.phase("update")
        self.weights.synchronize()
        param_grads.check(self.params, self.frozen, self.shown)
        self._drop_failed()
        self._notice_cleared()
        if self._phase is Phase.FINAL or (by_grad and self.is_final):
            return
        for listener in self.listeners:
            listener.before_meeting()
        self.streams.join_main()
        comes_alone = self._meet(by_grad)
        for listener in self.listeners:
            listener.after_meeting()
        self._land()
        self._phase, self._is_home = Phase.READ if comes_alone else Phase.FINAL, True
        for listener in self.listeners:
            listener.gradients_finished()

    def _land(self) -> None:
        """With offload: what no boundary backward has copied to host memory (microbatches in no_sync, partial
        buckets)."""
        if self.plan.offload is None or self.plan.offload.accumulates_on_host:
            return
        for bucket in self.plan.buckets:
            if self.accumulators.state[bucket.index] is not Acc.EMPTY and not self.accumulators.landed[bucket.index]:
                self.eager.land(self.plan, bucket.index)
        self.streams.join_main()

    def _meet(self, by_grad: bool) -> bool:
        """All ranks are at the boundary: one small exchange on the host says which parameters have a gradient on any of
        them, and which buckets some rank has yet to reduce. Returns whether no rank had a backward since the last."""
        if self.plan.num_ranks == 1:
            return False
        unreduced = {k for k, state in enumerate(self.accumulators.state) if state is Acc.PARTIAL} | self.eager.buckets
        own_grads = [list(flags) for flags in self.announcements.has_grad]
        boundary = self.announcements.meet(unreduced, by_grad=by_grad)
        if boundary.is_asked and not boundary.show_same:
            raise ZcError(param_grads.grads_differ(self.plan, own_grads, self.announcements.has_grad))
        self.accumulators.set_touched(boundary.touched)
        self._reduce_kept(boundary.buckets, is_final=True)
        self.streams.join_main()
        return boundary.comes_alone

    def _reduce_kept(self, buckets: Sequence[int], *, is_final: bool) -> None:
        """Reduces what ranks keep of these buckets (zc/engine/announcements.py). All ranks call it, whether or not this
        one has something; a model that was called twice may have proposed a bucket twice."""
        for index in buckets:
            if self.plan.placement.shards_gradients:
                self.eager.write(self.plan, index, is_final=is_final, may_reduce=self.announcements.counted)
            else:
                self.eager.reduce(self.plan, index, may_reduce=self.announcements.counted)

    def _notice_cleared(self) -> None:
        """Whatever way the caller has dropped gradients by since: ``param.grad = None``, the stock model.zero_grad(),
        the zero_grad of the optimizer's class, its own tensors' ``.grad``. Raises ZcError where some of what is left
        is mixed with a backward that raised."""
        for listener in self.listeners:
            for optimizer in listener.cleared_optimizers():
                self.clear(set_to_none=True, optimizer=optimizer)
        gone = param_grads.cleared(self.plan, self.announcements.has_grad, self.params)
        num_left = sum(map(sum, self.announcements.has_grad)) - len(gone)
        has_failed = self._phase is Phase.FAILED
        if num_left == 0 and (gone or has_failed):
            self.clear(set_to_none=True)
            return
        if has_failed:
            raise ZcError(
                f"a backward raised, and {num_left} parameter(s) still have the gradients of backwards before it, to "
                "which it may have added: call optimizer.zero_grad() before you go on"
            )
        if gone:
            self.drop(gone, set_to_none=True)

    def drop(self, gone: Sequence[Where], *, set_to_none: bool) -> None:
        """The gradients of some parameters were set to None, or become zeros. Asks no other rank: the boundary does."""
        if not self._is_home:
            self.streams.join_main()
        self._reopen()
        self.wait_for_host_memory()
        self.announcements.drop(gone, set_to_none=set_to_none)
        for bucket, slot in gone:
            self.eager.drop(bucket, slot)
            self.accumulators.drop(bucket, slot, set_to_none=set_to_none)

    def clear(self, *, set_to_none: bool, optimizer: int | None = None) -> None:
        """zero_grad of the module (None) or of one optimizer."""
        buckets = self.plan.of_optimizer(optimizer)
        self._cut_short()
        if not self._is_home:  # else gathers may go on (overlap_gather)
            self.streams.join_main()
        self.streams.take(self.buffers.gradients(buckets) if set_to_none else ())
        if not set_to_none:
            self.wait_for_host_memory()
        for bucket in buckets:
            self.eager.drop(bucket.index, set_to_none=set_to_none)
        if len(buckets) == len(self.plan.buckets):  # what a backward that raised has left goes with all of them
            self.eager.forget_backwards()
            self._phase = Phase.OPEN
        self._reopen()
        self.announcements.clear(buckets, set_to_none=set_to_none)
        if set_to_none:
            for listener in self.listeners:
                listener.gradients_cleared(optimizer)
        self.accumulators.clear(buckets, set_to_none=set_to_none)

    def full_grad(self, index: int) -> dict[str, Tensor | None]:
        """The whole gradients [shape] of one bucket's parameters, in acc_dtype, on every rank; None where none came."""
        self.finish_gradients()
        self.wait_for_host_memory()
        bucket = self.plan.buckets[index]
        self.buffers.hold(bucket)  # one without a gradient has no memory, and is gathered all the same
        shard = self.buffers.acc_shard(bucket).to(bucket.device)
        flat = shard
        if self.group.shard.world_size > 1:
            flat = torch.empty(bucket.numel, dtype=shard.dtype, device=shard.device)
            work = self.group.shard.all_gather(flat, shard.contiguous(), GATHER_GRADIENT, index)
            if work is not None:
                work.wait()
        pairs = zip(bucket.slots, self.accumulators.touched[index], strict=True)
        return {s.name: in_shape(flat[s.offset : s.stop], s).clone() if touched else None for s, touched in pairs}

    def after_update(self, optimizer: int) -> None:
        self._reopen()  # the next step meets the other ranks again, whether or not this one has a backward before
        unused = self.ledger.unused(self.programs, self.plan.of_optimizer(optimizer), self.accumulators.touched)
        if unused:
            self.say_once(unused)
        # of several optimizers the last one closes the step, or one whose turn comes again before
        is_first, others = optimizer not in self._updated, {b.optimizer for b in self.plan.buckets} - {optimizer}
        self._updated.add(optimizer)
        if is_first and not others <= self._updated:
            return
        self._updated.clear()
        journal, exposed_s = self.group.journal, None
        if journal is not None and isinstance(self.streams, ThreadStreams):  # elsewhere the device waits, not the host
            exposed_s, journal.exposed_s = journal.exposed_s, 0.0
        self.ledger.close_step(exposed_s, self.group.take_nbytes_sent(), self.announcements.take_waits())
        self.streams.clock.end_step(len(self.ledger.graphs), exposed_s)
        self._say_uncompiled()
        self.say_rest()
        log.debug("step %d is done", self.ledger.num_steps)
        self.accumulators.close_step()

    def _say_uncompiled(self) -> None:
        """After the first update of a model with blocks: whether code around them is compiled."""
        if self.ledger.num_steps != 1 or not self.around_blocks:
            return
        written = set().union(*(program.brings for program in self.programs))
        by_hooks = (self.plan.buckets[b].slots[k].name for b, k in self.ledger.last.hooks.keys() - written)
        names = sorted(self.around_blocks.intersection(by_hooks))
        if names:
            self.say_once(
                f"the code that reads {', '.join(names[:3])}{', ...' if len(names) > 3 else ''} runs op by op: Dynamo "
                "compiles no function that calls blocks in a loop. Move what stands before and after the loop (norm, "
                "head, loss) into methods of their own, which are compiled. Or pass fullgraph=True: all is one graph, "
                "whose first step takes longer with each block"
            )

    def install_hooks(self) -> None:
        self._install_hooks(self.plan.buckets)

    def _install_hooks(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for k, slot in enumerate(bucket.slots):
                hook = partial(_receive, weakref.ref(self), bucket.index, k)
                param = self.params[slot.name]
                self.hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]


def _has_raised(eager: weakref.ref[EagerGradients]) -> bool:
    gradients = eager()
    return gradients is not None and gradients.backward is Backward.RAISED


def _begin(runtime: weakref.ref[Runtime]) -> None:
    """A backward goes on that had called another one before it brought anything itself."""
    target = runtime()
    if target is not None:
        target.begin_backward()


def _receive(runtime: weakref.ref[Runtime], bucket: int, slot: int, param: nn.Parameter) -> None:
    """The hook on a parameter. It holds the runtime weakly: Python's collector does not look into a tensor's hooks, so
    a cycle through them would keep a dropped model for ever."""
    target = runtime()
    if target is not None:
        target.receive_eager(bucket, slot, param)
