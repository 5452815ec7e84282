"""One rank's gradient path, between a backward's first gradient and the finished shard.

Gradients come in by two ways and no other:

- A compiled backward graph calls `run_program`. Its schedule writes and reduces the buckets that the graph fills.
- A parameter's post-accumulate-grad hook calls `receive` (eager code, and the whole of backend="eager"). Whatever does
  not fill a bucket inside one compiled graph comes as a *deposit*, too. A bucket is written when all its slots have a
  deposit and all earlier buckets are done: the same order on every rank, and nobody counts hooks.

Both call `begin_backward` first, which announces to the other ranks what this backward reduces. Autograd's final
callback calls `_end_backward`, which writes and reduces the rest. ``optimizer.step()`` calls `finish_gradients`, then
updates this rank's shard, then calls `after_update`.
"""

from __future__ import annotations

import enum
import itertools
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zc import torch_private
from zc.engine import param_checks
from zc.engine.buffers import Acc, Buffers
from zc.engine.core import Core, Features, Listener, weakly
from zc.engine.deposits import Deposits
from zc.engine.ledger import Where
from zc.engine.program import Program
from zc.engine.streams import Streams, ThreadStreams
from zc.errors import RankMismatchError, UncoveredGradientError, ZcError
from zc.log import log
from zc.planning.plan import Bucket, Plan
from zc.ranks.group import Group

if TYPE_CHECKING:
    from zc.config import Config
    from zc.engine.buffer_sync import BufferSync
    from zc.engine.param_checks import BlockPlaces
    from zc.ranks.journal import Journal


class Phase(enum.Enum):
    """Where this rank is between two updates::

              a gradient comes         finish_gradients
        IDLE -----------------> OPEN ------------------> READ or FINAL
         ^                     |    ^  a gradient comes    |     |
         |                     |    +----------------------+     |
         |    something raises |    |                            |
         |                     v    | zero_grad                  |
         |                     FAILED                            |
         +------- an update, zero_grad, param.grad.zero_() ------+

    All ranks meet before they read or write weights together (`settle`), too: then OPEN becomes IDLE. IDLE becomes
    FINAL where an update finds no gradient, and what raises at a boundary once all ranks are there makes FAILED of any.
    """

    IDLE = "no gradient has come since all streams that carry gradients were joined"
    OPEN = "gradients come, and may be on their way"
    FAILED = "a backward or a reduction has raised, and the accumulators may hold some of it"
    READ = "as FINAL, and no rank had a backward: step() waits for the others again, as one may have its first now"
    FINAL = "the gradients are finished, and none has come since"


class Runtime(Core):
    """The gradients of one compiled model on one rank. The module and the optimizers know it, nobody else.

    Only one thread at a time uses it: autograd's during a backward, the caller's otherwise. The threads of streams run
    the operations of schedules alone (`zc.engine.buffers`).
    """

    def __init__(
        self,
        config: Config,
        buffers: Buffers,
        group: Group,
        streams: Streams,
        params: dict[str, nn.Parameter],
        features: Features,
    ) -> None:
        super().__init__(config, buffers, group, streams, params, features)
        self.accumulators.on_deposit = self._deposit
        self.agreement = features.make_agreement(self)
        on_device = any(bucket.device.type != "cpu" for bucket in self.plan.buckets)
        self.backwards = Backwards(weakly(self._drop_failed), drops_late=on_device)
        self._begin_outer = weakly(self.begin_backward)  # of a backward around the one that brings the first gradient
        passes = features.pipelines
        self.deposits = Deposits(streams, passes.backward, self.accumulators, config.dump_dir, passes.landing)
        group.set_plan(self.plan)
        if group.journal is not None:
            self._watch_ranks(group.journal)
        self.weights = features.make_weights(self)  # how they reach those who read them
        self.outside_blocks: frozenset[str] = frozenset()  # matrices that no block reads
        self.block_places: list[BlockPlaces] = []  # of what is compiled by itself
        self.listener = Listener()  # the optimizers
        # what else travels where all ranks meet; None: each rank keeps its own buffers
        self.buffer_sync: BufferSync | None = None
        self.hooks: list[RemovableHandle] = []  # on parameters
        self._hook_of: dict[str, RemovableHandle] = {}  # the same by name
        self._phase = Phase.IDLE
        if isinstance(self.streams, ThreadStreams):
            self.streams.on_error = weakly(self._note_failure)
        self._cleared_since_failure = set[int]()  # optimizers, after a backward that raised or a reduction
        # parameters with a gradient that came after their bucket was reduced (tied weights in two graphs): from the
        # next backward on, graphs leave their gradients to autograd, which sums them
        self.summed_by_autograd: set[str] = set()

    def _watch_ranks(self, journal: Journal) -> None:
        """With several ranks: a wait for a rank that never comes ends with an error (`zc.ranks.watch`)."""
        if not journal.watch.has_own_connection:
            # a thread that waits for a key blocks all other threads of its client of the store
            self.say_once(
                f"a {type(torch_private.default_store()).__name__} can't be connected to twice: while the program "
                "waits for a key of it, the watch for lost ranks waits, too"
            )
        if isinstance(self.streams, ThreadStreams):
            self.streams.wait_for = journal.wait_event  # a stream's thread may wait for such a rank
        has_stopped = weakly(self.backwards.has_stopped)
        journal.has_raised = lambda: bool(has_stopped())  # the thread of the watch asks

    def grow(self, plan: Plan, params: dict[str, nn.Parameter]) -> None:
        """Takes in ``plan``, whose first buckets are the present ones, and the parameters of the others. Schedules that
        were compiled before stay as they are: their buckets keep their places."""
        self.streams.synchronize()
        self.weights.grow()
        added = plan.buckets[len(self.plan.buckets) :]
        self.buffers.grow(plan)
        self.accumulators.grow()
        self.agreement.grow()
        self.group.set_plan(plan)
        self.params.update(params)
        self.placed.update(params)
        self.install_hooks(added)

    def leave(self, names: Collection[str]) -> None:
        """These parameters leave the plan, which still has their slots: another one has replaced each. They are plain
        ones afterwards, with memory of their own, and schedules that name their slots are made anew."""
        where = self.plan.slot_of
        self.drop([where[name] for name in names if name in self.params], set_to_none=True)
        for name in names:
            param = self.placed.pop(name)
            if name in self._hook_of:
                self._hook_of.pop(name).remove()
            self.params.pop(name, None)
            self.sharded_grads.pop(name, None)
            self.summed_by_autograd.discard(name)
            self.unset.params.discard(name)
            param.grad = None
            param.data = param.data.clone()
        self.buffers.grow(self.plan.without(names))
        self.programs.clear()
        self.forwards.clear()
        self.num_left += len(names)

    # --- gradients come in ---

    def begin_backward(self, program: Program | None = None) -> None:
        """Called before each gradient comes, by ``program`` or by a hook, in autograd's thread. For the first one of a
        backward, makes sure that `_end_backward` is called at its end."""
        param_checks.refuse_compiled_autograd()
        if self._phase is not Phase.FAILED:  # then `_notice_changes` raises, or drops all gradients
            self._phase = Phase.OPEN
        if not self.backwards.has_begun():
            self.streams.clock.phase("backward")
            param_checks.refuse_accumulate_hooks(self.params, self.name_now)
            drop_failed()
            self._cleared_since_failure.clear()
            if not self.backwards.open:  # a backward around this one has not shown its own gradients yet
                self._notice_changes()
            self.listener.gradients_change()
            self.backwards.begin(self._end_backward)
        self._announce(program)

    def count_tokens(self, number: float) -> None:
        """See `zc.count`. Gradients that were dropped before it take the counts before it with them."""
        if torch_private.current_graph_task() == -1:
            drop_failed()
            self._notice_changes()
        self.agreement.token_counts.count(number)

    def _announce(self, program: Program | None) -> None:
        """Announces an outermost backward with its first gradient, and counts it, for `zc.count`. A ``program`` that
        brings none announces nothing: autograd has to see all of its gradients, or this is torch.autograd.grad, in
        which other ranks may run no graph at all."""
        counts = self.agreement.token_counts
        is_told = self.plan.num_ranks == 1 or not self.current_plan.reduces or self.agreement.proposal is not None
        if (is_told and counts.is_in_backward) or (program is not None and not program.gradients):
            return
        # An outer backward announces an inner one: on other ranks it may have brought something before the inner one.
        if self.backwards.defer_to_outer(self._begin_outer):
            return
        if not counts.is_in_backward:
            counts.begin_backward()
        if is_told:
            return
        if program is None:
            self.agreement.begin("hooks", None, frozenset(), is_boundary=self.is_boundary)
            return
        # a graph that does not bring all gradients is one of several: the last backward like it tells which ones
        is_all = len(program.gradients) == self.plan.num_params
        reductions = program.reductions if is_all else None
        self.agreement.begin(program.name, reductions, program.gradients, is_boundary=self.is_boundary)

    def run_program(self, program: Program, args: list[object]) -> tuple[object, ...]:
        """A compiled backward graph, from its first node to its last."""
        self.begin_backward(program)
        self.ledger.step.runs[program.name] += 1
        log.debug("%s: runs, fills %s", program.name, sorted(program.buckets))
        outputs = program(args, self.streams, self.agreement.permission(program.reductions))
        if program.plan.reduces:
            self.deposits.reduced |= program.buckets
        if self.deposits.kept:
            self._flush_complete()
        return outputs

    def _post_accumulate_grad(self, bucket: int, slot: int, param: nn.Parameter) -> None:
        """Called by the hook on a parameter: the gradient leaves ``param.grad`` for the plan."""
        grad = param.grad
        name = self.plan.buckets[bucket].slots[slot].name
        if grad is None or grad is self.sharded_grads.get(name) or self.listener.has_taken(grad):
            return  # nothing came, or it was added to a ShardedGrad, which has called `receive`
        param.grad = None
        self.receive(bucket, slot, grad)

    def receive(self, bucket: int, slot: int, grad: Tensor) -> None:
        """A gradient [shape of the parameter] from outside compiled graphs."""
        name = self.plan.buckets[bucket].slots[slot].name
        if self.listener.is_value(name, grad):
            raise UncoveredGradientError(
                f"a backward went through the param.grad of {self.name_now(name)}, which is sharded over ranks and a "
                "mean over them already: use param.grad.full_tensor() in a loss"
            )
        if grad.is_sparse or grad.is_complex():
            raise UncoveredGradientError(
                f"the gradient of {self.name_now(name)} is {grad.layout} {grad.dtype}: zc takes dense real ones"
            )
        self.begin_backward()
        if grad.requires_grad:
            self.with_graph.add(name)
        self.ledger.step.hooks[bucket, slot] += 1
        log.debug("bucket %d: a hook brings the gradient of %s", bucket, self.plan.buckets[bucket].slots[slot].name)
        self._deposit(bucket, slot, grad)
        self._flush_complete()

    def _deposit(self, bucket: int, slot: int, grad: Tensor) -> None:
        """Called by hooks, and by the main stream of schedules (`Accumulators.on_deposit`), in the thread that issues
        them."""
        self.accumulators.touched[bucket][slot] = True
        self.deposits.add(self.plan.buckets[bucket], slot, grad)
        if bucket in self.deposits.reduced:
            self.summed_by_autograd.add(self.plan.buckets[bucket].slots[slot].name)

    def _flush_complete(self) -> None:
        self._flush(self.deposits.complete(self.plan), reduce=self.current_plan.reduces)

    def _end_backward(self) -> None:
        """Autograd's final callback. Deposits of incomplete buckets are written, with zeros where no gradient came."""
        reduces = self.plan.placement.shards_gradients
        if not reduces:  # stage 1 has room for a partial sum
            self._flush(sorted(self.deposits.kept), reduce=False)
        if reduces and self.agreement.differs():
            self.say_once(
                "ranks were to reduce other buckets in one backward, or have other numbers of backwards: the gradients "
                "of such a backward are whole to its end, or to the update, as without ZeRO-2"
            )
        self._reduce(self.agreement.rest(self.deposits.kept), is_boundary=self.is_boundary)
        self.deposits.reduced.clear()
        self._reduce(self.agreement.end(self.deposits.kept), is_boundary=self.is_boundary)
        if self.deposits.kept:
            self.deposits.clone()
        self.agreement.token_counts.is_in_backward = False
        if self.config.backend != "eager" and not self.programs:
            self.say_once("nothing of the model was compiled: every gradient came in through its parameter's hook")
        if self.buffer_sync is not None and self.is_boundary:
            self.buffer_sync.after_backward()
        self.listener.gradients_ready()
        self.streams.clock.phase("forward")

    def _drop_failed(self) -> None:
        """After a backward that raised, whose end never came: drops its deposits. `_notice_changes` refuses what it has
        left in the accumulators."""
        self.group.record_call("a backward had raised", shared=False)
        self.backwards.forget_raised()
        if self.backwards.open:
            raise ZcError("a backward inside another one raised and was caught: their gradients can't be told apart")
        self.deposits.clear()
        self._cut_short()
        self._phase = Phase.FAILED

    def _cut_short(self) -> None:
        """Reduces what all ranks have agreed to reduce in a backward that did not end on this one: others wait."""
        if self.agreement.proposal is not None and self.group.can_exchange:
            self.streams.join_main()  # each reduction that was issued has begun, and is counted
            self._reduce(self.agreement.cut_short(), is_boundary=self.is_boundary)

    def _note_failure(self) -> None:
        """A reduction or a copy of gradients has raised, and left out what came after it. Whoever catches the error
        may not update from what there is."""
        if self._phase is not Phase.IDLE:
            self._phase = Phase.FAILED

    def _flush(self, buckets: Sequence[int], *, reduce: bool) -> None:
        """Writes the deposits of these buckets, which are complete or at the end of their backward."""
        may_reduce = self.agreement.permission(buckets) if reduce else None
        # in stage 2 a microbatch in no_sync reduces, too; its copy to host memory waits for the boundary
        is_boundary = reduce and self.is_boundary
        for index in buckets:
            self.deposits.flush(self.plan, index, is_boundary=is_boundary, may_reduce=may_reduce)
            if reduce:
                self.deposits.reduced.add(index)

    # --- boundaries ---

    @property
    def is_finished(self) -> bool:
        """Whether the gradients are finished, and none has come since."""
        return self._phase in (Phase.READ, Phase.FINAL)

    def _forget_boundary(self) -> None:
        """The gradients change: the next boundary waits for the other ranks again."""
        if self.is_finished:
            self._phase = Phase.IDLE

    def finish_gradients(self, *, by_grad: bool = False) -> None:
        """The boundary: afterwards every rank's shard holds the mean over ranks of the sum over backward calls; with
        `zc.count` the mean over the tokens of all of them.

        ``by_grad``: a ``param.grad`` is read, perhaps in a loop over those of all parameters. Raises ZcError, on all
        ranks, if they have one on different parameters: such loops would differ; and inside of a backward that has
        brought gradients, which may bring more.
        """
        self.streams.clock.phase("update")
        self.weights.synchronize()
        self.check_names()
        drop_failed()
        if self.backwards.open:
            raise ZcError(
                "the gradients are asked for inside of a backward of this model (in a hook, say), which still adds to "
                "them: read or change param.grad, clip and step after loss.backward(). A hook on a parameter "
                "(param.register_hook) gets what is added to its gradient, and may return another"
            )
        self._notice_changes(is_boundary=True)
        if self._phase is Phase.FINAL or (by_grad and self.is_finished):
            return
        had_grad = self.agreement.has_grad
        is_alone = self._meet_ranks(by_grad=by_grad, is_last=True)
        self._phase = Phase.READ if is_alone else Phase.FINAL
        # a rank without a backward may have gradients now, too, and may drop them
        self.listener.gradients_ready(are_shown=self.agreement.has_grad == had_grad)

    def settle(self) -> None:
        """All ranks are about to read or write weights together, between two backwards: waits for those that have more
        backwards to do, as the boundary does. Gradients may come afterwards, on any rank."""
        drop_failed()
        if self.plan.num_ranks == 1 or self._phase in (Phase.FAILED, Phase.FINAL):
            return
        self._notice_changes()
        self._meet_ranks(by_grad=False, is_last=False)
        self._phase = Phase.IDLE  # the boundary is still to come
        self.listener.gradients_ready()

    def _divide_by_tokens(self) -> None:
        """What `zc.count` asks for. No stream uses the accumulators."""
        for optimizer, scale in enumerate(self.agreement.token_counts.take_scales()):
            if scale is None:
                continue
            for bucket in self.plan.of_optimizer(optimizer):
                if any(self.accumulators.touched[bucket.index]):
                    for shard in self.buffers.acc_copies(bucket):
                        shard.mul_(scale)

    def _meet_ranks(self, *, by_grad: bool, is_last: bool) -> bool:
        """Returns once all ranks are here, with all gradients and buffers where they belong: whether no rank had a
        backward since they last met. ``is_last``: no gradient is to come before the update."""
        if self.buffer_sync is not None:
            self.buffer_sync.send_last()
        self.streams.join_main()
        partial_sums = {bucket for bucket, state in enumerate(self.accumulators.state) if state is Acc.PARTIAL}
        unreduced = partial_sums.union(self.deposits.kept)
        try:
            buckets, is_alone = self.agreement.boundary(unreduced, by_grad=by_grad, is_last=is_last)
        except RankMismatchError:
            raise
        except ZcError:  # on all ranks: this boundary was none, and the next one sends buffers again
            if self.buffer_sync is not None:
                self.buffer_sync.receive_all()
            raise
        # until all of it is done: who catches what raises in between, Ctrl-C too, must not begin it again
        phase, self._phase = self._phase, Phase.FAILED
        if buckets:  # without any, no stream has got a task since they were joined
            self._reduce(buckets, is_boundary=True)
            self.streams.join_main()
        if self.buffer_sync is not None:
            self.buffer_sync.receive_all()
        if self.plan.offload is not None:
            if not self.plan.offload.accumulates_on_host:
                self._land()
            self.wait_for_host_memory()
        if self.accumulators.assigned:
            self.accumulators.put_assigned(add=True)
        if is_last and self.agreement.token_counts.scales:
            self._divide_by_tokens()
        self._phase = phase
        return is_alone

    def _land(self) -> None:
        """With offload: copies gradients to host memory that no schedule of a backward has copied, those of
        microbatches in no_sync and of incomplete buckets."""
        for bucket in self.plan.buckets:
            if self.accumulators.state[bucket.index] is not Acc.EMPTY and not self.accumulators.landed[bucket.index]:
                self.deposits.land(self.plan, bucket.index)
        self.streams.join_main()

    def _reduce(self, buckets: Sequence[int], *, is_boundary: bool) -> None:
        """Reduces the deposits or partial sums of these buckets (zc/engine/agreement.py). All ranks call it, also
        those that have none; a model that was called twice may have proposed a bucket twice."""
        for index in buckets:
            if self.plan.placement.shards_gradients:
                self.deposits.flush(self.plan, index, is_boundary=is_boundary, may_reduce=self.agreement.agreed)
            else:
                self.deposits.reduce(self.plan, index, may_reduce=self.agreement.agreed)

    def _notice_changes(self, *, is_boundary: bool = False) -> None:
        """Drops gradients that the caller has dropped in a way that does not call zc: ``param.grad = None``, the stock
        model.zero_grad(), the zero_grad of the optimizer's class. Takes over sharded values that were assigned to
        ``param.grad``; at a boundary refuses what else was (`param_checks.check`). Raises ZcError if some of the others
        may hold a part of a backward that raised."""
        flags = self.agreement.has_grad
        cleared, assigned = param_checks.changes(self.plan, flags, self.params, self.sharded_grads)
        if is_boundary and (assigned or self.frozen):
            names = [self.plan.buckets[bucket].slots[slot].name for bucket, slot in assigned]
            with torch_private.without_torch_function():
                params = {name: self.params[name] for name in names}
                param_checks.check(params, self.frozen, self.listener.is_value, self.name_now)
        num_others = sum(map(sum, flags)) - len(cleared) + sum(not flags[bucket][slot] for bucket, slot in assigned)
        has_failed = self._phase is Phase.FAILED
        if num_others == 0 and (cleared or has_failed):
            self.clear(set_to_none=True)
            return
        if has_failed:
            raise ZcError(
                f"a backward or a reduction raised, and {num_others} parameter(s) still have gradients, to which it "
                "may have added a part: call optimizer.zero_grad() before you go on"
            )
        if cleared:
            self.drop(cleared, set_to_none=True)
        if assigned:
            if self.agreement.token_counts.has_any and not self.is_finished:
                self._refuse_assigned(assigned)
            self._take_values(assigned)

    def notice_cleared(self) -> None:
        """The caller may have set gradients to None: drops them now, not where the next ones come, so that their memory
        goes. Inside of a backward, and after one that raised, that waits."""
        is_outside = torch_private.current_graph_task() == -1 and not self.backwards.open
        if is_outside and self._phase is not Phase.FAILED:
            self._notice_changes()

    def _refuse_assigned(self, assigned: Sequence[Where]) -> None:
        """The boundary would divide what was assigned by the tokens, too."""
        for name in (self.plan.buckets[bucket].slots[slot].name for bucket, slot in assigned):
            grad = self.params[name].grad
            if grad is not None and self.listener.is_value(name, grad):
                raise ZcError(
                    f"a value was assigned to param.grad of {self.name_now(name)} between zc.count and the end of the "
                    "update's last microbatch, and would be divided by the tokens as well: assign what is made of the "
                    "finished gradients, after a read of one"
                )

    def _take_values(self, assigned: Sequence[Where]) -> None:
        """Takes over the sharded values among these parameters' ``.grad``. Finished gradients are replaced at once.
        Others are dropped, and the next boundary adds the values: until then sums may be on their way to other ranks.
        Asks no other rank, as `drop`."""
        names = {(bucket, slot): self.plan.buckets[bucket].slots[slot].name for bucket, slot in assigned}
        grads = {where: self.params[name].grad for where, name in names.items()}
        is_value = self.listener.is_value  # it raises for some: before any is taken
        own = {where: grad for where, grad in grads.items() if grad is not None and is_value(names[where], grad)}
        values = {where: self.listener.take_value(names[where], grad) for where, grad in own.items()}
        if not self.backwards.open and torch_private.current_graph_task() == -1:
            for where in values:  # else autograd may be adding to it
                self.params[names[where]].grad = self.sharded_grads[names[where]]
        if not values:
            return
        if not self.is_finished:
            self._drop(list(values), set_to_none=False)
        self.agreement.assign(values)
        for (bucket, slot), value in values.items():
            self.accumulators.touched[bucket][slot] = True
            self.accumulators.assigned[bucket, slot] = value
        if self.is_finished:
            self.accumulators.put_assigned(add=False)

    def _join_gradients(self) -> None:
        """Makes the main stream wait for all gradients. Without any on its way, gathers may go on (overlap_gather)."""
        if self._phase in (Phase.OPEN, Phase.FAILED):
            self.streams.join_main()

    def drop(self, slots: Sequence[Where], *, set_to_none: bool) -> None:
        """The gradients of some parameters were set to None, or become zeros. Asks no other rank: the boundary does.
        After the last one of an optimizer nothing is left of its gradients: inside no_sync the sums have some that only
        other ranks know of."""
        for optimizer in self._drop(slots, set_to_none=set_to_none):
            self.clear(set_to_none=set_to_none, optimizer=optimizer)

    def _drop(self, slots: Sequence[Where], *, set_to_none: bool) -> list[int]:
        """Returns the optimizers of which no gradient is left here."""
        self._join_gradients()
        self._forget_boundary()
        self.wait_for_host_memory()
        without_any = self.agreement.drop(slots, set_to_none=set_to_none)
        for bucket, slot in slots:
            self.deposits.drop(bucket, slot)
            self.accumulators.drop(bucket, slot, set_to_none=set_to_none)
        if set_to_none:
            self.listener.gradients_dropped([self.plan.buckets[bucket].slots[slot].name for bucket, slot in slots])
        return without_any

    def clear(self, *, set_to_none: bool, optimizer: int | None = None) -> None:
        """zero_grad of the module (None) or of one optimizer."""
        if self.programs and self.backwards.has_begun():
            raise ZcError(
                "gradients are cleared inside of a backward of this model (in a hook, say), and its compiled part has "
                "brought some that PyTorch would bring after this: clear them between backwards, or compile with "
                'backend="eager"'
            )
        self.group.record_call("drop gradients (zero_grad)", shared=False)
        buckets = self.plan.of_optimizer(optimizer)
        if not set_to_none:  # what was assigned becomes zeros, too
            changes = param_checks.changes(self.plan, self.agreement.has_grad, self.params, self.sharded_grads)
            self._take_values(changes.assigned)
        self._cut_short()
        self._join_gradients()
        self.streams.hand_to_main(self.buffers.gradients(buckets) if set_to_none else ())
        if not set_to_none:
            self.wait_for_host_memory()
        for bucket in buckets if self.deposits.kept else ():
            self.deposits.drop_bucket(bucket.index, set_to_none=set_to_none)
        is_all = len(buckets) == len(self.plan.buckets)
        if not is_all and (self._phase is Phase.FAILED or self.backwards.has_raised()):
            self._cleared_since_failure.update(bucket.optimizer for bucket in buckets)
            is_all = self._cleared_since_failure == {bucket.optimizer for bucket in self.plan.buckets}
        if is_all:  # with all gradients, those of a backward that raised are dropped
            self._cleared_since_failure.clear()
            self.backwards.open.clear()
            self.agreement.token_counts.is_in_backward = False
            self.deposits.reduced.clear()
            if self._phase is Phase.FAILED:
                self._phase = Phase.OPEN
        self._forget_boundary()
        self.agreement.clear(buckets, set_to_none=set_to_none)
        if set_to_none:
            self.listener.gradients_cleared(optimizer)
        self.accumulators.clear(buckets, set_to_none=set_to_none)

    def after_update(self, optimizer: int) -> None:
        """One optimizer's step is done. The last one of an update closes it."""
        self._forget_boundary()
        unused = self.ledger.unused(self.programs, self.plan.of_optimizer(optimizer), self.accumulators.touched)
        if unused:
            self.say_once(unused)
        if not self.ledger.completes_step(optimizer, {b.optimizer for b in self.plan.buckets}):
            return
        journal, exposed_s = self.group.journal, None
        if journal is not None and isinstance(self.streams, ThreadStreams):  # elsewhere the device waits, not the host
            exposed_s, journal.exposed_s = journal.exposed_s, 0.0
        step = self.ledger.step
        step.num_reductions, step.nbytes_moved = self.accumulators.pop_counts()
        step.nbytes_sent, step.exposed_s = self.group.take_nbytes_sent(), exposed_s
        self.ledger.close_step()
        self.streams.clock.end_step(len(self.ledger.graphs), exposed_s)
        if self.ledger.num_steps == 1:
            uncompiled = self.ledger.uncompiled(self.programs, self.plan.buckets, self.outside_blocks)
            if uncompiled:
                self.say_once(uncompiled)
        if self.unsaid:
            self.say_rest()
        log.debug("step %d is done", self.ledger.num_steps)

    def install_hooks(self, buckets: Sequence[Bucket]) -> None:
        """Registers the hooks that bring the gradients of eager code, on the parameters of these buckets."""
        receive = weakly(self._post_accumulate_grad)
        for bucket in buckets:
            for k, slot in enumerate(bucket.slots):
                hook = partial(_bring, receive, bucket.index, k)
                param = self.params[slot.name]
                handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self.hooks.append(handle)
                self._hook_of[slot.name] = handle


@torch_private.not_compiled_alone
def _bring(receive: Callable[[int, int, nn.Parameter], object], bucket: int, slot: int, param: nn.Parameter) -> None:
    """The hook on a parameter. Autograd calls it for each gradient that a compiled graph has kept, too: most often
    there is none to bring, and this is all that it costs. (A call of what `weakly` returns makes ten.)"""
    if param.grad is not None:
        receive(bucket, slot, param)


_OF_ALL_MODELS: weakref.WeakValueDictionary[int, Backwards] = weakref.WeakValueDictionary()
DROPPED_S = 5.0  # autograd's thread needs the GIL and some microseconds
_NUMBERS = itertools.count()  # in the order of zc.compile, which is that of all ranks


class Backwards:
    """The backwards of autograd that run through one model.

    A backward ends with autograd's final callback. Autograd owns the callback, and drops it if the backward raises. So
    a weak reference to it tells whether the backward has raised; nothing else does. On a device a thread of autograd's
    drops it, perhaps after the caller has caught the error: `drop_failed` waits for that. Backwards may be nested
    (reentrant checkpointing): the outermost one ends last. No state is stored, each follows from the references::

                     begin                    the outermost one ends
        none runs ----------> some run ---------------------------------> none runs
                                 |  one raises               forget_raised, clear
                                 +---------------> has_raised -----------------> none runs

    Only the thread that issues schedules changes it: autograd's during a backward, the caller's otherwise.
    ``drop_failed`` drops the gradients of a backward that raised, and reduces what other ranks wait for.
    ``drops_late``: autograd has threads of its own, as for a device.
    """

    def __init__(self, drop_failed: Callable[[], object], *, drops_late: bool = True) -> None:
        self._drop_failed, self._drops_late = drop_failed, drops_late
        _OF_ALL_MODELS[next(_NUMBERS)] = self
        # the callbacks of those that have begun here and not ended, or raised and not been forgotten, by autograd's
        # number of the backward; the thread of the watch reads a copy (`has_stopped`)
        self.open: dict[int, weakref.ref[Callable[[], None]]] = {}
        self._survived: frozenset[int] = frozenset()  # by number: after these raised, the program has gone on
        self._last_deferred: int | None = None  # the last backward that left its announcement to the one around it

    def has_begun(self) -> bool:
        """Whether the backward that runs in this thread has begun here."""
        callback = self.open.get(torch_private.current_graph_task())
        return callback is not None and callback() is not None

    def begin(self, end: Callable[[], None]) -> None:
        """The backward that runs in this thread begins. Calls ``end`` when the outermost one has ended."""
        number = torch_private.current_graph_task()
        callback = partial(self._end_one, number, end)
        self.open[number] = weakref.ref(callback)
        torch_private.queue_callback(callback)

    def _end_one(self, number: int, end: Callable[[], None]) -> None:
        raised = self.open.pop(number, None)
        if self.open:
            return
        try:
            end()
        except BaseException:  # out of memory in the last flush, say: autograd drops the callback, as after any raise
            if raised is not None:
                self.open[number] = raised
            raise

    def await_drops(self) -> None:
        """Outside of a backward, none can run: waits until autograd has dropped the callbacks of those that raised.
        Returns at once where there are none. The limit is for a program that runs a backward in another thread."""
        if not self._drops_late or torch_private.current_graph_task() != -1:
            return
        end = time.monotonic() + DROPPED_S
        while any(callback() is not None for callback in self.open.values()) and time.monotonic() < end:
            time.sleep(0.0001)  # without the GIL

    def has_raised(self) -> bool:
        """Whether one has raised."""
        return any(callback() is None for callback in list(self.open.values()))

    def has_stopped(self) -> bool:
        """Whether one has raised, and the program has called nothing of zc since. The thread of the watch asks."""
        callbacks, survived = list(self.open.items()), self._survived
        return any(callback() is None for number, callback in callbacks if number not in survived)

    def go_on(self) -> None:
        """The program compiles a forward, which may take longer than the others' patience. No backward runs."""
        self._survived = frozenset(self.open)

    def forget_raised(self) -> None:
        self.open = {number: callback for number, callback in self.open.items() if callback() is not None}

    def defer_to_outer(self, callback: Callable[[], None]) -> bool:
        """If the backward in this thread runs inside another one, calls ``callback`` in that one as soon as this one
        has ended, and returns True. Calls it once per backward."""
        number = torch_private.current_graph_task()
        if number == self._last_deferred:
            return True
        outer = torch_private.outer_node()
        if outer is None:
            return False
        self._last_deferred = number
        torch_private.call_before_followers(outer, callback)
        return True


def drop_failed() -> None:
    """Called before a backward and an update: drops the gradients of backwards that raised, in any model of this
    process. A rank that had begun to reduce in such a model waits there for this one, and comes nowhere else."""
    for backwards in list(_OF_ALL_MODELS.values()):
        if backwards.open:
            backwards.await_drops()
            if backwards.has_raised():
                backwards._drop_failed()
