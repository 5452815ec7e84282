"""What all parts of a compiled model share on one rank: its plan, its memory, its streams, its ranks, and its notes.

There is one object of it for each compiled model, and that is a `Runtime` (`zc.engine.runtime`), which adds the state
of backwards and updates. Code that needs no such state takes a `Core`, so that it can't depend on it.
Hooks and Dynamo's caches refer to it by a `Part` or by `weakly`, which do not keep the model alive.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn

from zc.engine.agreement import Agreement
from zc.engine.buffers import Accumulators, Buffers, Function
from zc.engine.ledger import Ledger
from zc.engine.operations import Operations
from zc.engine.param_checks import Names, Unset
from zc.engine.program import Program, Segment, build
from zc.engine.streams import Streams
from zc.errors import PlanError
from zc.log import log
from zc.passes.scheduling import scheduling
from zc.planning.layout import Slot
from zc.planning.plan import Bucket, Plan
from zc.ranks.group import Group
from zc.ranks.journal import frame_of_program
from zc.ranks.routes import Routes

if TYPE_CHECKING:
    from zc.config import Config
    from zc.engine.runtime import Runtime
    from zc.engine.weights import Weights
    from zc.passes.base import Pass, Pipelines
    from zc.schedule.spec import Op


SYNCS = "require_backward_grad_sync"  # DDP's no_sync sets it, and so do scripts, nanoGPT's among them


def syncs(of_model: weakref.ref[nn.Module]) -> bool:
    """What DDP's no_sync, or a script, has set on the model."""
    model = of_model()
    return model is None or bool(getattr(model, SYNCS, True))


class Listener:
    """What the runtime calls in the optimizers of its model (`zc.optim.model`), which it does not know. This one does
    nothing: a runtime has it until its optimizers register theirs."""

    def gradients_ready(self, *, are_shown: bool = False) -> None:
        """A backward has ended, or an update begins. `Agreement.has_grad` says which parameters have a gradient.
        ``are_shown``: each ``.grad`` is as it says already."""

    def gradients_cleared(self, optimizer: int | None) -> None:
        """One optimizer, by its number, has no gradient any more, or all have none: nobody may hold a view of one."""

    def gradients_dropped(self, names: Sequence[str]) -> None:
        """These parameters have no gradient any more: their ``.grad`` was set to None."""

    def gradients_change(self) -> None:
        """A backward begins."""

    def is_value(self, name: str, grad: Tensor) -> bool:
        """Whether ``grad`` is a sharded value that the caller may assign to ``.grad`` of this parameter. Raises ZcError
        for one that no_sync makes another value than DDP's."""
        return False

    def has_taken(self, grad: Tensor) -> bool:
        """Whether ``grad`` was taken by `take_value`, so that a backward has added to the accumulator in its place."""
        return False

    def take_value(self, name: str, grad: Tensor) -> Tensor:
        """[n]: the elements of such a value that lie in this rank's shard. The accumulator gets them."""
        raise NotImplementedError


# The gradients of the parameters that this rank updates, by bucket: of optimizers that read whole ones
GatherWhole = Callable[["Plan", "Buffers", "Group", Sequence[int]], dict[int, Tensor]]


class Features(NamedTuple):
    """What features decide in a model's engine, which imports none of them: `zc.compile` puts them together
    (`zc.prepare`) and hands them over.

    ``pipelines``: the passes. ``make_weights``: how weights reach those who read them. ``operations``: the functions
    of kinds of nodes that only some feature's schedules have. ``gather_whole``: None if no optimizer needs it.
    ``make_agreement``: how ranks come to reduce the same."""

    pipelines: Pipelines
    make_weights: Callable[[Core], Weights]
    operations: Mapping[type[Op], Function] = {}
    gather_whole: GatherWhole | None = None
    make_agreement: Callable[[Core], Agreement] = Agreement


class Updater:
    """Who updates an optimizer's masters, and how new weights reach the model. The optimizer calls it around its
    class's step, which here updates masters on the device; gathers follow it. Another one is
    `zc.offload.host_step.HostStep`."""

    moves_slices = False  # True: slices of masters may change their place in a step

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @property
    def programs(self) -> list[Program]:
        """The schedules of its own that have run so far, for explain."""
        return []

    def before(self, changed: tuple[int, ...]) -> None:
        """Called before the step of the class. ``changed``: the buckets that it will update."""

    def after(self, changed: tuple[int, ...]) -> None:
        """Called after that step. Brings the new weights to the model."""
        self.runtime.weights.publish(changed)

    def publish(self, changed: tuple[int, ...]) -> None:
        """Brings to the model what a method of the class has written into the masters of these buckets."""
        self.runtime.weights.publish(changed)

    def publish_loaded(self, buckets: tuple[int, ...]) -> None:
        """Brings to the model masters that were loaded, and waits, so that the caller may read the weights."""
        self.runtime.weights.publish(buckets, is_exact=True)
        self.runtime.weights.synchronize()

    def take_loaded_state(self, buckets: Sequence[int]) -> None:
        """Called after the optimizer's state was loaded."""

    def flush(self, take_over_writes: Callable[[], None]) -> None:
        """See `zc.flush_state`."""
        raise PlanError("zc.flush_state is for offload='disk', and this model was compiled without")

    def close(self) -> None:
        """See `zc.close`: releases what it has of its own."""


class Core:
    """Made by `zc.compile`; `zc.recompile` gives its `buffers` a larger plan."""

    def __init__(
        self,
        config: Config,
        buffers: Buffers,
        group: Group,
        streams: Streams,
        params: dict[str, nn.Parameter],
        features: Features,
    ) -> None:
        self.config, self.buffers, self.group, self.streams = config, buffers, group, streams
        # it refers to the tensors, so they live until the streams are recorded
        weakref.finalize(buffers, streams.record_streams, buffers.all_tensors).atexit = False
        # Parameters by name. One of `frozen` that requires a gradient later needs zc.recompile.
        self.params = params  # those that train
        self.frozen: dict[str, nn.Parameter] = {}  # all others
        self.placed = dict(params)  # those in a bucket: `params`, and of `frozen` those whose weights are sharded
        self.unset = Unset()  # parameters of a model from meta that have no value yet
        self.sharded_grads: dict[str, Tensor] = {}  # the .grad of each of params while it has a gradient
        self.with_graph: set[str] = set()  # parameters whose gradient came with a graph, which is not kept
        # of the parameters that have a place; the model keeps it
        self.names: weakref.ref[Names] | None = None
        self.num_left = 0  # parameters that have left the plan: schedules of before name their slots
        self.features = features
        routes = Routes(self.plan, group, buffers.tables)
        self.accumulators = Accumulators(buffers, group, routes, features.operations)
        self.inductor_options = config.inductor_options
        self.programs: list[Program] = []  # of compiled backward graphs, for explain
        self.forwards: list[Program] = []  # of compiled forward graphs that are schedules
        # by canonical text: each with the check of the global state that it was compiled under
        self.compiled_segments: dict[str, list[tuple[Callable[[], bool], Segment]]] = {}
        self.ledger = Ledger()
        self.notes: list[str] = []  # fallbacks, and other things worth knowing, each once
        self.unsaid: list[tuple[int, str]] = []  # on ranks above 0: with the number of the update
        self._is_in_no_sync = False
        self.syncs: Callable[[], bool] = lambda: True  # what ``model.require_backward_grad_sync`` says

    @property
    def plan(self) -> Plan:
        return self.buffers.plan

    @property
    def is_boundary(self) -> bool:
        """False inside no_sync: this microbatch is not the last before an update."""
        return not self._is_in_no_sync and self.syncs()

    @property
    def current_plan(self) -> Plan:
        """What schedules of the present microbatch follow."""
        return self.plan if self.is_boundary else self.plan.microbatch()

    def build(
        self,
        graph: fx.Graph,
        plan: Plan,
        *passes: Pass,
        name: str,
        overrides: Mapping[type[Op], Function] | None = None,
        prefix: str = "e",
    ) -> Program:
        """A program that has no segments, such as an update: its graph through ``passes``, and on streams.
        ``overrides``: functions in place of those of `zc.engine.operations`; ``prefix``: of the names of its events."""
        parts = self.features.pipelines.parts
        stages = scheduling(*passes, prove=self.config.verify, prefix=prefix, parts=parts)
        return build(graph, plan, stages, self.operations(overrides), name=name, dump_dir=self.config.dump_dir)

    @property
    def sharded_buckets(self) -> list[int]:
        """The buckets whose weights are sharded."""
        return [bucket.index for bucket in self.plan.sharded]

    def params_in(self, bucket: Bucket) -> list[tuple[Slot, nn.Parameter]]:
        """The parameters that lie in a bucket, without those that have left it."""
        return [(slot, self.placed[slot.name]) for slot in bucket.slots if not slot.is_left]

    def names_now(self) -> dict[int, str]:
        """The name that the model has for each of its parameters now, by the parameter's id. A plan keeps the names of
        `zc.compile`, also where a module was put around a layer since."""
        names = self.names() if self.names is not None else None
        return names.now() if names is not None else {id(param): name for name, param in self.placed.items()}

    def name_now(self, name: str) -> str:
        """What the model calls a parameter now, for errors. ``name`` is the plan's."""
        return self.names_now().get(id(self.placed.get(name)), name)

    def check_names(self) -> None:
        """Raises ZcError if another parameter has replaced one of the plan's."""
        names = self.names() if self.names is not None else None
        if names is not None:
            names.check()

    def operations(self, overrides: Mapping[type[Op], Function] | None = None) -> Operations:
        """What one schedule calls: it works on this rank's accumulators."""
        return Operations(self.accumulators, overrides)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._is_in_no_sync = self._is_in_no_sync, True
        try:
            yield
        finally:
            self._is_in_no_sync = before

    def wait_for_host_memory(self) -> None:
        """Called before the host itself reads or writes host memory: copies may still be on their way to it."""
        if self.plan.offload is not None:
            self.streams.synchronize()

    def say_once(self, note: str) -> None:
        """Records a note for explain: a fallback, or something worth knowing. Rank 0 warns of it, the first time. Other
        ranks warn in `say_rest`, of notes that rank 0 does not have."""
        if note in self.notes:
            return
        self.notes.append(note)
        if self.group.rank == 0:
            warn(f"zc: {note}")
            self.group.record_note(note)
        else:
            self.unsaid.append((self.ledger.num_steps, note))

    def say_rest(self) -> None:
        """Called after each update. Warns of notes that rank 0 does not have, one update late: by then rank 0 has had
        the time to say them itself."""
        while self.unsaid and self.unsaid[0][0] + 1 < self.ledger.num_steps:
            _, note = self.unsaid.pop(0)
            if not self.group.has_note(note):
                warn(f"zc, rank {self.group.rank}, not rank 0: {note}")


def warn(text: str) -> None:
    """A warning at the line of the program that led to it; where the program makes errors of warnings, a line in the
    log. A note breaks nothing: one rank alone says it, and others wait for that rank."""
    frame = frame_of_program(inspect.currentframe())
    try:
        if frame is None:
            warnings.warn(text, stacklevel=2)
        else:
            registry = frame.f_globals.setdefault("__warningregistry__", {})
            module = frame.f_globals.get("__name__")
            warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)
    except Warning:
        log.warning("%s", text)


T = TypeVar("T")


class Part:
    """A part of a compiled model. It refers to the model's `Core` weakly, and is used only while the model lives."""

    def __init__(self, core: Core) -> None:
        self._core = weakref.ref(core)

    @property
    def core(self) -> Core:
        core = self._core()
        assert core is not None, "the model of these parameters is gone"
        return core


def weakly(method: Callable[..., T]) -> Callable[..., T | None]:
    """A function that calls ``method`` while its object lives, and does nothing later. For hooks, above all those on
    tensors: Python's collector does not look into them, so a cycle through them would keep a dropped model for ever.

    Dynamo compiles none of it: in a loop that the caller has compiled, a backward is a graph break, and Dynamo would
    compile each frame that its hooks run.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> T | None:
        alive = reference()
        return None if alive is None else alive(*args)

    disabled: Callable[..., T | None] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return disabled
