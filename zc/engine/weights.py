"""What code that reads or writes a model's weights asks for, whichever way they are kept.

`Weights` itself is the simplest way: all ranks keep all weights whole, and ``optimizer.step()`` returns when they are
new everywhere. Its methods about weights that can't be read do nothing, and say what the two other ways do there:

- `zc.weights.overlapped`: weights that come while the next forward runs (``overlap_gather``);
- `zc.weights.sharded_weights`: weights of which a rank has its shard only, outside of their use (stage 3,
  ``shard_frozen``).

After an update all ranks' shards are gathered into flat_param, by a proved schedule::

       comm | gather(1, "flat_param[1]")
       comm | gather(0, "flat_param[0]")
    compute | publish(1, "flat_param[1]")
    compute | publish(0, "flat_param[0]")

The main stream only waits for them. So where ranks read each other's memory, the calling thread runs comm's tasks.
Where weights leave a host as differences (`zc.planning.wire`), ranks gather the differences::

       comm | gather(0, "flat_param[0]", scratch="update[0]")
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from zc import torch_private
from zc.engine.core import Core, Part
from zc.engine.param_checks import Places
from zc.engine.program import Program
from zc.kernels._private import copy_all_
from zc.planning.plan import Plan, gathers_by_memory
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import put
from zc.schedule.spec import Publish, Spread, gather_node


def gather_graph(plan: Plan, buckets: Sequence[int]) -> fx.Graph:
    """Gathers these buckets in the order in which a forward reads them: the plan's last bucket first."""
    graph = fx.Graph()
    order = sorted(buckets, reverse=True)
    for bucket in order if plan.world_size > 1 else ():
        weights = Buffer.named(plan.weights_buffer(bucket))
        if plan.spreads(plan.buckets[bucket]):
            put(graph, Spread(bucket, weights))
        put(graph, gather_node(plan, bucket, weights))
    for bucket in () if plan.overlap_gather else order:
        put(graph, Publish(bucket, Buffer.named(plan.weights_buffer(bucket))))
    graph.output(())
    return graph


def publish_graph(plan: Plan, buckets: Iterable[int]) -> fx.Graph:
    """Lets the main stream read the parameters of these buckets."""
    graph = fx.Graph()
    for bucket in buckets:
        put(graph, Publish(bucket, Buffer.named(plan.weights_buffer(bucket))))
    graph.output(())
    return graph


Programs = dict[tuple[str, int | None], Program]


class Weights(Part):
    """The weights of one model on one rank."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        # by kind, of all buckets ("gather", "gather exactly") or of one. None is made for a set of buckets: with layer
        # drop, or a head for each task, nearly every update would have another one
        self._programs: Programs = {}
        self.hooks: list[RemovableHandle] = []  # on modules
        self._on_modules: list[Callable[[nn.Module], RemovableHandle]] = []  # each installs one hook
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def programs(self) -> list[Program]:
        """The schedules that have run so far, for explain."""
        return list(self._programs.values())

    @property
    def passes_so_far(self) -> list[tuple[str, Program]]:
        """The passes over shards: a table of what each gathers and frees, "" for one of a single use, and its schedule,
        which a clocked step may have run."""
        return []

    # --- where the model runs ---

    def install_hooks(self, model: nn.Module) -> None:
        """Installs hooks on modules that read their parameters outside of compiled code, or bring their state; later
        on those that have come since, where the plan has new buckets."""
        for module in model.modules() if self._on_modules else ():
            if module not in self._hooked and not torch_private.is_fake_quant(module):
                self._hooked.add(module)
                self.hooks += [install(module) for install in self._on_modules]

    def call_of(self, module: nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """What runs in place of ``call``, the compiled forward of ``module``. None: its own forward."""
        return call

    def _inside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, a forward, inside `forward`. It holds the weights weakly: ``module`` may outlive them."""
        reference = weakref.ref(self)

        def run(*args: Any, **kwargs: Any) -> Any:
            weights = reference()
            if weights is None:
                return call(*args, **kwargs)
            with weights.forward():
                output = call(*args, **kwargs)
            weights.note_output(output)
            return output

        # a caller who compiles more than the model gets a graph break here; the model's own graphs stay as they are
        disabled: Callable[..., Any] = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
        return disabled

    def forward(self) -> AbstractContextManager[None]:
        """The model's forward runs inside."""
        return nullcontext()

    def note_output(self, output: object) -> None:
        """The model's forward has returned this."""

    @property
    def around_block(self) -> Callable[[Places], AbstractContextManager[object]] | None:
        """The context in which what is compiled by itself runs, for the places of its parameters; None: there is
        none. It holds the weights weakly."""
        return None

    def note_graph(self, names: Iterable[str | None]) -> None:
        """Dynamo has made a graph that reads these parameters."""

    def note_forward(self, forward: Program) -> None:
        """A schedule of a forward has run."""

    def waiting_for(self, names: Iterable[str] | None) -> Callable[[], None]:
        """A function that makes the main stream wait until it may read these parameters, or all. It holds the weights
        weakly."""
        return lambda: None

    def read(self, params: Sequence[nn.Parameter], why: str = "code that is not compiled reads") -> None:
        """The main stream reads these parameters themselves, for this reason. It waits for their gathers, if these are
        on their way; without any, for all gathers. What is sharded becomes whole, inside the model's forward alone."""

    # --- what other code may do with parameters ---

    def named_plainly(self) -> AbstractContextManager[None]:
        """Inside, parameters are of their own class, for code that asks them for no element."""
        return nullcontext()

    def refuse_without_bytes(self, what: str, module: nn.Module) -> None:
        """Raises ZcError if parameters of ``module`` have no bytes."""

    def with_bytes(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """These parameters have memory of their own inside, on this rank. Where they had none, nothing defined is in
        it."""
        return nullcontext()

    @property
    def is_unsharded(self) -> bool:
        """Whether all parameters are whole until the program says otherwise."""
        return True

    def unsharded(self) -> AbstractContextManager[None]:
        """All parameters are whole inside, and what was written into them goes to the shards at the end."""
        return nullcontext()

    def leaving(self, moved: Iterable[str], left: Iterable[str]) -> AbstractContextManager[None]:
        """These parameters are whole inside, where they leave their buckets: ``moved`` for buckets that train, ``left``
        for good."""
        return nullcontext()

    def displaced(self) -> dict[str, Tensor]:
        """The parameters whose memory is another one for the moment, each with a tensor that has their lasting one."""
        return {}

    def units(self, *, is_wanted: bool) -> Generator[dict[str, Tensor], None, None]:
        """The whole weights of all parameters in buckets, a unit at a time: name -> [shape]. Its memory may be used
        again after the next unit has come. Only ranks with ``is_wanted`` get units."""
        self.synchronize()
        for name, param in self.core.placed.items() if is_wanted else ():
            yield {name: param.detach()}

    # --- what code does with parameters that it can't read without asking (`zc.weights.param`) ---

    def read_param(self, param: nn.Parameter, is_raw: bool) -> bool:
        """Somebody reads a parameter outside of compiled code. True: it may be read now; False: it has no bytes.
        ``is_raw``: what is asked for could be written without autograd's knowing."""
        self.read([param])
        return True

    def load_value(self, param: nn.Parameter, value: Tensor) -> bool:
        """Somebody copies a value into a parameter. True: it went to the shards, as part of a load_state_dict."""
        return False

    # --- updates and loads ---

    def before_writes(self) -> None:
        """All ranks call it before masters or shards are written: no rank reads one from here on."""
        self.synchronize()

    def adopt_writes(self) -> None:
        """All ranks call it before they read shards for a save: what the program has written into parameters is in the
        shards then."""

    def publish(self, buckets: Sequence[int], *, is_exact: bool = False) -> None:
        """All ranks may read the new weights of ``buckets``, which come from all ranks' masters, cast to param_dtype.
        Encoded differences bring them close to the masters; with ``is_exact`` they become equal."""
        self._fill(buckets, is_exact=is_exact)
        self.published(buckets)

    def _fill(self, buckets: Sequence[int], *, is_exact: bool) -> None:
        """Fills flat_param of ``buckets``."""
        core, plan = self.core, self.core.plan
        if not buckets:
            return
        filled = (plan.buckets[index] for index in buckets)
        of_masters = [b for b in filled if b.has_master and (is_exact or not b.sends_differences)]
        if of_masters:
            shards = [core.buffers.owned(core.buffers.flat_param[bucket.index], bucket) for bucket in of_masters]
            copy_all_(shards, [core.buffers.master_shard[bucket.index].detach() for bucket in of_masters])
        for bucket in of_masters:
            core.buffers.remember_shard(bucket)
        some = None if len(buckets) == len(plan.buckets) else frozenset(buckets)
        kind = "gather"
        if is_exact and plan.buckets[0].sends_differences:  # all are alike
            kind, plan = "gather exactly", plan.exact_gathers()
        if (kind, None) not in self._programs:  # the schedule that gathers all buckets
            graph = gather_graph(plan, range(len(plan.buckets)))
            self._programs[kind, None] = self._build("gather", plan, graph)
        try:
            with core.streams.on_calling_thread() if self._waits_at_once else nullcontext():
                self._programs[kind, None]([], core.streams, buckets=some)
        except RuntimeError:
            raise
        except BaseException:  # Ctrl-C, or what a signal's handler raises: the program may go on, and read the weights
            core.streams.synchronize()
            raise

    @cached_property
    def _waits_at_once(self) -> bool:
        """Whether main does nothing but wait for a gather, and may do it itself."""
        return gathers_by_memory(self.core.plan) and not self.core.plan.overlap_gather

    def published(self, buckets: Sequence[int]) -> None:
        """A schedule has written the weights of ``buckets``, unseen by autograd. So their versions increase, and a
        backward through a forward from before this step fails, as in PyTorch."""
        placed, plan = self.core.placed, self.core.plan
        torch.autograd.graph.increment_version(
            [placed[slot.name] for index in buckets for slot in plan.bucket(index).slots if not slot.is_left]
        )

    def watch(self) -> None:
        """Called at the end of a step. Reads of new weights wait from then on, where these may be on their way."""

    def synchronize(self) -> None:
        """Makes the main stream wait for all gathers."""

    def grow(self) -> None:
        """Called before the plan gets more buckets: schedules of all buckets are then built anew."""
        self.synchronize()
        self._programs.clear()

    # --- the end ---

    def unshard(self) -> None:
        """All ranks call it at the end: parameters have their values and all their bytes."""

    def let_go(self) -> None:
        """Parameters are plain ones again, with bytes of their own or those of a bucket."""

    # --- schedules ---

    def _build(self, kind: str, plan: Plan, graph: fx.Graph) -> Program:
        return self.core.build(graph, plan, name=f"{kind}_{len(self._programs)}")
