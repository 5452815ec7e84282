"""Weights that come while the next forward runs (``overlap_gather``), in stages 1 and 2.

``optimizer.step()`` returns with the gathers launched, in the order in which modules were registered. The next forward
waits for each bucket before it first reads it. (The idea is that of PyTorch's FSDP and Megatron's overlap_param_gather;
megatron-lm#950 shows what a missing wait does.) A model with blocks does so from call to call
(`zc.weights.forward_waits`), by schedules that wait for some buckets::

       comm | gather(1, "gathered[1]")                  compute | wait_event("done/gathered[1]")
       comm | record_event("done/gathered[1]")    ...   compute | publish(1, "gathered[1]")
       comm | gather(0, "gathered[0]")
       comm | record_event("done/gathered[0]")

The forward of any other model is a schedule itself (`CompiledForward`)::

    compute | wait_event("done/gathered[1]")
    compute | segment("segment_0", %primals_1, %primals_9)
    compute | wait_event("done/gathered[0]")
    compute | segment("segment_1", %getitem_2, %primals_2)

``gathered[b]`` is flat_param[b]; its name carries an event from schedule to schedule. After the model's call all
weights may be read. Before it, any read waits for the buckets of the parameters that it reads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from zc import torch_private
from zc.engine.names import Places
from zc.engine.part import weakly
from zc.engine.program import Program
from zc.errors import ZcError
from zc.schedule.buffer import Buffer, carried_event
from zc.weights.forward_waits import ForwardWaits
from zc.weights.param import ManagedParams
from zc.weights.weights import Weights, publish_graph

if TYPE_CHECKING:
    from zc.engine.core import Core


class OverlappedWeights(Weights):
    """The gathers of one model on one rank, and the waits for them."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._in_flight: set[int] = set()  # buckets for whose gathers the main stream has not waited
        self.managed = ManagedParams(self, "overlap_gather", come=True)
        weakref.finalize(self, self.managed.release).atexit = False  # later there is nobody to wait for
        self.waits = ForwardWaits(core, self)
        self._num_sharing: dict[str, int] = {}  # by parameter: tensors that share its storage, when its bucket was made
        self._unseen: str | None = None  # why zc could miss a read of the new weights; None: it can't

    @property
    def is_in_flight(self) -> bool:
        """Whether a gather may be in flight for which the main stream has not waited."""
        return bool(self._in_flight)

    # --- where the model runs ---

    def install_hooks(self, model: nn.Module) -> None:
        """Installs hooks that wait before parameters are read outside of a compiled forward: by state_dict and
        load_state_dict of the model or of a submodule, and by modules that run eagerly. In a model with blocks these
        have no hook: Dynamo would compile each of them, which it leaves alone without overlap_gather."""
        synchronize = weakly(self.synchronize)
        wait = torch_private.only_eager(lambda *_: synchronize())
        for module in model.modules():
            if not self.core.plan.kinds:
                self.hooks.append(module.register_forward_pre_hook(wait))
            self.hooks += [
                module.register_state_dict_pre_hook(wait),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(wait),  # type: ignore[no-untyped-call]
            ]
        self.count_sharing()

    def note_growth(self, model: nn.Module) -> None:
        self.count_sharing()

    def call_of(self, module: nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """The compiled forward waits for weights. A model that is not compiled does so by its hooks."""
        return call if call is None else torch_private.call_inside(self.waits.forward, call)

    @property
    def around_block(self) -> Callable[[Places], AbstractContextManager[None]]:
        return self.waits.block

    def note_graph(self, names: Iterable[str | None]) -> None:
        self.waits.note_graph(names)

    def note_forward(self, forward: Program) -> None:
        """A schedule of a forward has published all buckets of its plan. `zc.recompile` may have added more since."""
        buckets = self._in_flight.intersection(range(len(forward.plan.buckets)))
        self._refuse_failed(buckets)
        self._in_flight.difference_update(buckets)

    def waiting_for(self, names: Iterable[str] | None) -> Callable[[], None]:
        placed = self.core.placed
        first = 0 if names is None else self.waits.order.first_of(placed[name] for name in names)
        arrive = weakly(self.arrive)
        return lambda: arrive(first)

    # --- updates ---

    def _fill(self, buckets: Sequence[int], *, is_exact: bool) -> None:
        """Launches the gathers of ``buckets``. Whoever has waited for them may read flat_param."""
        if not buckets:
            return
        self._unseen = self._why_unseen()  # before the gathers are launched, since they have views of their own
        super()._fill(buckets, is_exact=is_exact)
        self._in_flight.update(buckets)
        self.waits.note_gathers()

    def count_sharing(self) -> None:
        """Counts what shares the storages of new buckets' parameters: they are new, so only the parameters do."""
        for name, param in self.core.params.items():
            if name not in self._num_sharing:
                self._num_sharing[name] = torch_private.num_sharing(param)

    def watch(self) -> None:
        """Called at the end of a step. From then on a read of a parameter waits for its gather. If zc could miss such a
        read, the step waits itself, and says so once."""
        if not self._in_flight:
            return
        core = self.core
        if self._unseen is None:
            for bucket in self._in_flight:
                self.managed.add(param for _, param in core.params_in(core.plan.buckets[bucket]))
        else:
            core.say_once(f"overlap_gather: {self._unseen}: step() waits for the weights wherever that is so")
            self.synchronize()

    def _why_unseen(self) -> str | None:
        """What may read new weights without zc noticing; None: nothing."""
        params = self.core.params
        others = sorted({type(p).__name__ for p in params.values() if type(p) is not nn.Parameter})
        if others:
            return f"parameters of class {', '.join(others)} can't be watched"
        for name, num_sharing in self._num_sharing.items():
            if torch_private.num_sharing(params[name]) > num_sharing:
                return (
                    f"something other than the parameter holds the memory of {name} (a view, p.data, p.detach() or an "
                    "array kept from before the step), and may be read unseen"
                )
        return None

    def release(self) -> None:
        """Parameters are read by compiled graphs alone from now on, which wait for what they read."""
        self.managed.release()

    def arrive(self, first: int) -> None:
        """Makes the main stream wait for the gathers of bucket ``first`` and all later ones, which come before it. On
        CUDA the host does not wait."""
        for bucket in sorted((bucket for bucket in self._in_flight if bucket >= first), reverse=True):
            core = self.core
            self._publish(bucket)([], core.streams)
            self._refuse_failed([bucket])
            self._in_flight.discard(bucket)
            self.managed.release(param for _, param in core.params_in(core.plan.buckets[bucket]))

    def synchronize(self) -> None:
        """Makes the main stream wait for all gathers."""
        self.arrive(0)

    def _refuse_failed(self, buckets: Iterable[int]) -> None:
        """Raises ZcError where a gather has failed, also after its own error has been raised and caught. These buckets
        stay in flight, so every read of them fails."""
        core = self.core
        for index in buckets:
            bucket = core.plan.buckets[index]
            error = core.streams.error_before(carried_event(Buffer.named(core.plan.weights_buffer(index))))
            if error is not None:
                raise ZcError(
                    f"the new weights of {bucket.slots[0].name} and others in bucket {index} have not arrived on rank "
                    f"{core.group.rank}: their gather failed with {error}. What the parameters have is no step's "
                    "weights: start again from the last checkpoint"
                )

    def wait_for(self, params: Sequence[nn.Parameter]) -> None:
        if self._in_flight:  # another model's read may ask, also while this one is taken apart
            self.arrive(self.waits.order.first_of(params) if params else 0)

    def _publish(self, bucket: int) -> Program:
        """The schedule that waits for one bucket. They are all alike, and explain shows the first one."""
        if ("publish", bucket) not in self._programs:
            program = self._build("publish", self.core.plan, publish_graph(self.core.plan, [bucket]))
            program.like = next((first for (kind, _), first in self._programs.items() if kind == "publish"), None)
            program.block = f"bucket {bucket}"
            self._programs["publish", bucket] = program
        return self._programs["publish", bucket]
