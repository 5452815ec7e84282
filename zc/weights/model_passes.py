"""The forwards and backwards of a model with sharded weights: which one runs, and what its parameters are meanwhile.

Inside of one, compiled code finds plain parameters, and code that is not compiled finds whole ones. Outside, parameters
are absent (`zc.weights.param`), except inside `zc.whole_parameters`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zc import torch_private
from zc.engine.core import Core, Part, weakly
from zc.weights.param import ManagedParams

if TYPE_CHECKING:
    from zc.weights.weight_uses import WeightUses
    from zc.weights.whole_params import WholeParams

MANY_EVALUATED = 32


class ModelPasses(Part):
    """The passes of one model on one rank, a pass being a forward with its backward."""

    def __init__(self, core: Core, managed: ManagedParams, whole: WholeParams, uses: WeightUses) -> None:
        super().__init__(core)
        self.managed, self._whole, self._uses = managed, whole, uses
        self._num_evaluated = 0  # forwards without gradients, in a row
        self._num_passes = 0  # with gradients, since the last update
        self._task = -1  # autograd's number of the backward that runs
        self._depth = 0  # forwards of the model inside one another
        self.is_unsharded = False  # inside zc.whole_parameters
        # Dynamo has the whole forward, and finds plain parameters in it; else blocks are compiled one by one, and what
        # is between them runs eagerly
        self.is_one_graph = core.config.backend != "eager" and not core.plan.kinds
        self.may_break = not core.config.fullgraph  # that graph; its first forward shows whether it does
        self._is_first = True  # that forward has not run yet
        # a forward that may break has whole parameters to the update, and what it reads is no order to plan
        self._is_trial = False

    @property
    def is_passing(self) -> bool:
        """Whether a forward of the model runs, or a backward."""
        return self._depth > 0 or torch_private.current_graph_task() != -1

    def _begin(self) -> None:
        core = self.core
        self.end()
        self.core.accumulators.open_shards()
        number = self._num_passes if torch.is_grad_enabled() else -1
        self._num_evaluated = 0 if torch.is_grad_enabled() else self._num_evaluated + 1
        if self._num_evaluated == MANY_EVALUATED:
            core.say_once(
                f"{self.managed.why}: {MANY_EVALUATED} forwards without gradients in a row, such as those of generate()"
                ", have gathered all weights each. Inside `with zc.whole_parameters(model):` they are gathered once"
            )
        self._num_passes += torch.is_grad_enabled()
        self._uses.begin(number)

    def end(self) -> None:
        """The pass is over, if one was open."""
        self._uses.end(is_order_kept=not self._is_trial)
        self._whole.say_reasons()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model's forward runs inside: compiled code finds plain parameters."""
        core = self.core
        is_outer = self._depth == 0 and not self.is_unsharded
        breaks = torch_private.graph_breaks()
        if is_outer:
            core.unset.check("a forward")
            core.group.record_call("a forward", shared=False)
            self._begin()
            if self.is_one_graph:
                if self.may_break:
                    self._is_trial = True
                    self._whole.unshard(core.sharded_buckets)
                self.managed.release()
        before, has_grad = set(self._whole.buckets), torch.is_grad_enabled()
        self._depth += 1
        try:
            with self._watching_dynamo() if is_outer and self.is_one_graph else nullcontext():
                yield
        finally:
            self._depth -= 1
            if is_outer:
                if self.is_one_graph:
                    is_broken = torch_private.graph_breaks() != breaks
                    self.may_break = is_broken or (self.may_break and not self._is_first)
                    self._is_first = False
                if not has_grad:
                    self.end()
                    self._whole.reshard_unwritten(self._whole.buckets.keys() - before)
                    core.buffers.drop_arena()
                self.make_absent()

    def _watching_dynamo(self) -> AbstractContextManager[None]:
        """Inside, a frame that Dynamo compiles anew may leave code uncompiled, which reads parameters past any hook of
        ours. Ranks that read each other's memory have whole parameters first. Ranks that exchange messages must do so
        together, so they wait until Dynamo has broken the graph, as it does on all of them."""
        if self._is_trial:
            return nullcontext()
        core = self.core
        everything = set(core.sharded_buckets)

        def num_breaks() -> int:
            return sum(times for why, times in torch_private.graph_breaks().items() if why != torch_private.SKIPPED)

        breaks_before = num_breaks()

        def unshard() -> None:
            self._whole.unshard_for("code that Dynamo compiles anew may read", everything)

        def before() -> None:
            if core.accumulators.routes.gathers_alone:
                unshard()

        def after() -> None:
            if num_breaks() != breaks_before:  # a frame that is being compiled counts as skipped so far
                unshard()

        return torch_private.before_compiling(before, after)

    def hook_outputs(self, output: object) -> None:
        """A backward through this output of the forward begins with `begin_backward`."""
        if not torch.is_grad_enabled() or self.is_unsharded or not self.is_one_graph:
            return
        begin = weakly(self.begin_backward)
        for leaf in torch_private.tensors_in(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(lambda _: begin())  # type: ignore[no-untyped-call]

    def begin_backward(self) -> None:
        """Code that is compiled may run again (activation checkpointing), and finds plain parameters."""
        if not self.is_unsharded and self._depth == 0 and self._task != torch_private.current_graph_task():
            self._task = torch_private.current_graph_task()
            self.managed.release()
            callback = partial(self.end_backward, self._task)
            torch_private.queue_callback(callback)
            # after a backward that raised, autograd drops the callback without a call
            weakref.finalize(callback, weakly(self.end_backward), self._task).atexit = False

    def end_backward(self, task: int) -> None:
        """The backward with this number has ended, or raised."""
        if self._task != task:
            return
        self._task = -1
        if not self.is_unsharded and self._depth == 0:
            self.make_absent()

    def make_absent(self) -> None:
        """No pass runs: parameters are absent."""
        core = self.core
        self.managed.add(param for bucket in core.plan.sharded for _, param in core.params_in(bucket))

    @contextmanager
    def named_plainly(self) -> Iterator[None]:
        """Inside, parameters are of their own class, for code that asks them for no element."""
        self.managed.release()
        try:
            yield
        finally:
            if not self.is_unsharded and self._depth == 0:
                self.make_absent()

    def end_update(self) -> None:
        """The weights are new."""
        self._num_passes, self._is_trial = 0, False

