"""Stage 3 on one rank: the shards of the weights, and which buckets are whole at this moment.

A *pass* is one forward of the model, with its backward if there is one. Its compiled graphs read weights in *windows*
(`zc.passes.window_weights`), and each window asks here for its buckets: the pass's next *use*. The order of the uses is
that of the pass before. So the gathers of a pass are planned, proved, and run piece by piece, one piece before each use
(`zc.planning.residency`)::

    pass before     (3,) (2,) (1,) () (1,) (2,) (3,) ()      forward, then backward
    piece 0         gather 3, gather 2, read 3
    piece 1         free 3, gather 1, read 2
    ...

A pass with another order goes on right and slower: from there on each use gathers its own buckets when it comes.

Code that is not compiled reads the parameters themselves. Before it runs, their buckets become *whole*: each parameter
gets its bytes back, and keeps them until the update, since autograd may have saved views of them. In a forward without
gradients they go at its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from zc import torch_private
from zc.engine.absent import Absent
from zc.engine.memory_order import flattened, in_shape
from zc.engine.owners import spread_shards
from zc.engine.program import Program, build
from zc.engine.shard_reads import ShardReads
from zc.errors import ZcError
from zc.kernels import adopt_writes
from zc.passes import insert_events, place_on_streams, verify
from zc.passes.weights_schedule import build_weights_schedule
from zc.planning.layout import Slot
from zc.planning.plan import MOVED, Bucket
from zc.planning.residency import Extent, Residency, Uses, plan_residency
from zc.schedule.buffer import Buffer
from zc.schedule.codegen import Run, load_pieces
from zc.schedule.nodes import put
from zc.schedule.spec import GatherWeights, Publish

if TYPE_CHECKING:
    from zc.engine.core import Core

_WHOLE = (place_on_streams.PASS, insert_events.PASS, verify.PASS)
MANY_EVALUATED = 32
MAX_ORDERS = 16  # of passes, planned ahead; further ones gather as they come


@dataclass(frozen=True)
class Step:
    """One pass, planned: a piece of its schedule before each use, and one after the last."""

    uses: Uses
    residency: Residency
    graph: fx.Graph
    pieces: Sequence[Run]


class ShardedWeights:
    """The weights of one model on one rank. The streams that read and write them are the plan's."""

    def __init__(self, core: Core) -> None:
        self._core = weakref.ref(core)
        core.accumulators.on_take = self.take
        self.hooks: list[RemovableHandle] = []  # on modules
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.absent = Absent(self._read_by_eager_code)
        self._reads = ShardReads()
        self._operations = core.bind({})
        self._singles: dict[Uses, Step] = {}  # of one use each
        self._steps: dict[Uses, Step] = {}  # of whole passes
        self._order: list[tuple[int, ...]] = []  # uses of the pass so far
        self._expected: dict[int, Uses] = {}  # by the number of the pass in its update; -1: without gradients
        self._number = 0  # of the pass that runs
        self._num_evaluated = 0  # forwards without gradients, in a row
        self._num_passes = 0  # with gradients, since the last update
        self._step: Step | None = None
        self._position = 0
        self._whole: set[int] = set()
        # bucket and slot of parameters that were frozen -> those of now. Dynamo does not compile a graph without
        # gradients again when a parameter begins to ask for one
        self._moved: dict[tuple[int, int], tuple[int, int]] = {}
        self._asked: set[int] = set()  # those that code which is not compiled has read since the last update
        self._bucket_of: dict[int, int] = {}  # by the parameter's id
        self._versions: dict[str, int] = {}  # of whole parameters, as they became whole
        self._whole_programs: dict[int, Program] = {}
        self._reasons: dict[str, set[int]] = {}  # why buckets became whole in this pass
        self._said: set[str] = set()  # those of earlier passes
        self._task = -1  # autograd's number of the backward that runs
        self._depth = 0  # forwards of the model inside one another
        self._is_exposed = False  # inside zc.whole_parameters
        # Dynamo has the whole forward, and finds plain parameters in it; else blocks are compiled one by one, and what
        # is between them runs eagerly
        self.is_one_graph = False
        self.may_break = True  # that graph; its first forward shows whether it does
        self._is_first = True  # that forward has not run yet
        # a forward that may break has whole parameters to the update, and what it reads is no order to plan
        self._is_trial = False

    # --- what compiled graphs read ---

    def take(self, places: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The next window of a compiled graph: its parameters, [shape] each, until the window after it."""
        core = self._found()
        if self._moved:
            places = [self._moved.get(place, place) for place in places]
        if torch_private.saved_tensors_are_copied():
            self._make_whole_for("hooks on what autograd saves may read", {bucket for bucket, _ in places})
        buckets = tuple(sorted({bucket for bucket, _ in places} - self._whole))
        at = {extent.bucket: extent.start for extent in self._use(core, buckets)}
        flat = {b: core.buffers.gathered("arena[0]", core.plan.bucket(b), at[b]) for b in buckets}
        taken = []
        for bucket, number in places:
            slot = core.plan.bucket(bucket).slots[number]
            if bucket in flat:
                taken.append(in_shape(flat[bucket][slot.offset : slot.stop], slot))
            else:
                with torch_private.without_torch_function():
                    taken.append(core.placed[slot.name].detach())
        return taken

    def _use(self, core: Core, buckets: tuple[int, ...]) -> Sequence[Extent]:
        """The next use of this pass: runs the piece before it, and returns where it reads."""
        step = self._step
        if step is None or self._position >= len(step.uses) or step.uses[self._position] != buckets:
            if step is not None and step.uses in self._steps and self._position < len(step.uses):
                core.say_once(
                    "stage 3: a forward or backward read other weights than the one before it, or in another order: "
                    "there it gathers each bucket when it is read, not ahead"
                )
            self._close_step(core)
            self._start(core, (buckets,), self._singles)
        step = self._step
        assert step is not None
        step.pieces[self._position]({}, core.streams, self._operations)
        reads = step.residency.pieces[self._position].reads
        self._order.append(buckets)
        self._position += 1
        if self._position == len(step.uses) > 1 and not buckets:
            self._finish_step(core)
        return reads

    def _start(self, core: Core, uses: Uses, steps: dict[Uses, Step]) -> None:
        if uses not in steps:
            plan = core.plan
            nbytes = {bucket.index: bucket.nbytes for bucket in plan.with_weights}
            residency = plan_residency(uses, nbytes, plan.weight_cap)
            graph = build_weights_schedule(plan, residency, verify=core.config.verify)
            steps[uses] = Step(uses, residency, graph, load_pieces(graph))
        self._step, self._position = steps[uses], 0
        with torch.inference_mode(False):
            core.buffers.make_arena(self._step.residency.nbytes)

    def _finish_step(self, core: Core) -> None:
        """The last piece: everything is freed."""
        assert self._step is not None
        self._step.pieces[-1]({}, core.streams, self._operations)
        self._step = None

    def _close_step(self, core: Core) -> None:
        """No use follows in this order. A step that is left in the middle has gathers on their way."""
        if self._step is None:
            return
        if self._position == len(self._step.uses):
            self._finish_step(core)
        else:
            core.streams.join_main()
            self._step = None

    # --- passes ---

    def _begin_pass(self, core: Core) -> None:
        self._end_pass(core)
        self._reads.open(core)
        self._number = self._num_passes if torch.is_grad_enabled() else -1
        self._num_evaluated = 0 if torch.is_grad_enabled() else self._num_evaluated + 1
        if self._num_evaluated == MANY_EVALUATED:
            core.say_once(
                f"stage 3: {MANY_EVALUATED} forwards without gradients in a row, such as those of generate(), have "
                "gathered all weights each. Inside `with zc.whole_parameters(model):` they are gathered once"
            )
        self._num_passes += torch.is_grad_enabled()
        expected = self._expected.get(self._number) or self._expected.get(self._number - 1 if self._number > 0 else 0)
        if expected is not None and (expected in self._steps or len(self._steps) < MAX_ORDERS):
            self._start(core, expected, self._steps)

    def _end_pass(self, core: Core) -> None:
        if self._order and not self._is_trial:
            self._expected[self._number] = tuple(self._order)
        self._order.clear()
        self._close_step(core)
        self._say_reasons(core)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model's forward runs inside: compiled code finds plain parameters."""
        core = self._found()
        is_outer = self._depth == 0 and not self._is_exposed
        breaks = torch_private.graph_breaks()
        if is_outer:
            core.unset.check("a forward of stage 3")
            self._begin_pass(core)
            if self.is_one_graph:
                if self.may_break:
                    self._is_trial = True
                    self.make_whole(self._every(core))
                self.absent.release()
        before, has_grad = set(self._whole), torch.is_grad_enabled()
        self._depth += 1
        try:
            with self._watching_dynamo(core) if is_outer and self.is_one_graph else nullcontext():
                yield
        finally:
            self._depth -= 1
            if is_outer:
                if self.is_one_graph:
                    is_broken = torch_private.graph_breaks() != breaks
                    self.may_break = is_broken or (self.may_break and not self._is_first)
                    self._is_first = False
                if not has_grad:
                    self._end_pass(core)
                    self._free(core, self._whole - before)
                    core.buffers.drop_arena()
                self._leave(core)

    def _watching_dynamo(self, core: Core) -> AbstractContextManager[None]:
        """Inside, a frame that Dynamo compiles anew may leave code uncompiled, which reads parameters past any hook of
        ours. Ranks that read each other's memory have whole parameters first. Ranks that exchange messages must do so
        together, so they wait until Dynamo has broken the graph, as it does on all of them."""
        if self._is_trial:
            return nullcontext()
        everything = set(self._every(core))

        def num_breaks() -> int:
            return sum(times for why, times in torch_private.graph_breaks().items() if why != "skipped frames")

        known = num_breaks()

        def make_whole() -> None:
            self._make_whole_for("code that Dynamo compiles anew may read", everything)

        def before() -> None:
            if core.plan.topology.reads_memory:
                make_whole()

        def after() -> None:
            if num_breaks() != known:  # a frame that is being compiled counts as skipped so far
                make_whole()

        return torch_private.before_compiling(before, after)

    def hook_outputs(self, output: object) -> None:
        """A backward through this output of the forward begins with `begin_backward`."""
        if not torch.is_grad_enabled() or self._is_exposed or not self.is_one_graph:
            return
        known = weakref.ref(self)

        def begin(grad: Tensor) -> None:
            weights = known()
            if weights is not None:
                weights.begin_backward()

        for leaf in torch_private.tensors_in(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(begin)  # type: ignore[no-untyped-call]

    def begin_backward(self) -> None:
        """Code that is compiled may run again (activation checkpointing), and finds plain parameters."""
        if not self._is_exposed and self._depth == 0 and self._task != torch_private.current_graph_task():
            self._task = torch_private.current_graph_task()
            self.absent.release()
            torch_private.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        self._task = -1
        if not self._is_exposed and self._depth == 0:
            self._leave(self._found())

    def _leave(self, core: Core) -> None:
        self.absent.leave(core.placed.values())

    @contextmanager
    def plain(self, places: Sequence[tuple[dict[str, Any], str, nn.Parameter]]) -> Iterator[None]:
        """Inside, these parameters are of their own class: a compiled block is guarded by it."""
        lent = [param for _, _, param in places if self.absent.lend(param)]
        try:
            yield
        finally:
            for param in lent:
                self.absent.take_back(param)

    @contextmanager
    def with_bytes(self, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """These parameters have memory of their own inside, on this rank, and nothing defined is in it."""
        lent = [param for param in params if self.absent.lend(param)]
        try:
            for param in lent:
                param.untyped_storage().resize_(param.numel() * param.element_size())
            yield
        finally:
            for param in lent:
                param.untyped_storage().resize_(0)
                self.absent.take_back(param)

    @contextmanager
    def leaving(self, names: Iterable[str]) -> Iterator[None]:
        """Those of these parameters that are frozen are whole inside, where they move to buckets that train."""
        core = self._found()
        where = core.plan.slot_of()
        before = {name: where[name] for name in names if name in where}
        buckets = {bucket for bucket, _ in before.values()}
        self.make_whole(buckets)
        yield
        where = core.plan.slot_of()
        self._moved.update({place: where[name] for name, place in before.items()})
        self._free(core, [bucket.index for bucket in core.plan.frozen])
        self._whole -= buckets

    @contextmanager
    def named_plainly(self) -> Iterator[None]:
        """Inside, parameters are of their own class, for code that asks them for no element."""
        core = self._found()
        self.absent.release()
        try:
            yield
        finally:
            if not self._is_exposed and self._depth == 0:
                self._leave(core)

    # --- what eager code reads ---

    def make_whole(self, buckets: Iterable[int]) -> None:
        """The parameters of these buckets have all their bytes, on all ranks."""
        core = self._found()
        for index in sorted(set(buckets) - self._whole):
            flat = self.gathered_once(index)
            with torch.inference_mode(False), torch.no_grad(), torch_private.without_torch_function():
                for slot, param in _params_in(core, core.plan.bucket(index)):
                    param.untyped_storage().resize_(slot.numel * param.element_size())
                    param.data.copy_(in_shape(flat[slot.offset : slot.stop], slot))
                    self._versions[slot.name] = torch_private.version(param)
            self._whole.add(index)

    def gathered_once(self, index: int) -> Tensor:
        """[P]: the whole weights of one bucket, in memory of their own. All ranks call it."""
        core = self._found()
        self._reads.open(core)
        bucket = core.plan.bucket(index)
        with torch.inference_mode(False), torch.no_grad():
            core.buffers.whole[index] = torch.empty(bucket.numel, dtype=bucket.param_dtype, device=bucket.device)
            self._whole_program(core, index)([], core.streams)
        return core.buffers.whole.pop(index)

    def _whole_program(self, core: Core, index: int) -> Program:
        if index not in self._whole_programs:
            plan, graph, whole = core.plan, fx.Graph(), Buffer("flat_param", index)
            put(graph, GatherWeights(index, whole, Buffer("weight", index), 0, plan.bucket(index).nbytes))
            put(graph, Publish(index, whole))
            graph.output(())
            passes = [p._replace(requires=frozenset()) for p in _WHOLE if core.config.verify or p.name != "verify"]
            self._whole_programs[index] = build(graph, plan, passes, core.bind, name=f"whole_{index}")
        return self._whole_programs[index]

    def _refuse_writes(self, core: Core) -> None:
        """Before an update: raises ZcError for a whole parameter that the program has written. Nothing has changed."""
        for index in sorted(self._whole):
            for slot, param in _params_in(core, core.plan.bucket(index)):
                if torch_private.version(param) != self._versions[slot.name]:
                    self._free(core, self._every(core))
                    raise ZcError(
                        f"parameter {slot.name} was written in place, and with stage=3 such a "
                        "write reaches no shard. Write inside `with zc.whole_parameters(model):` on all ranks, or "
                        "train with stage=2. The write is lost, and nothing else has changed"
                    )

    def _free(self, core: Core, buckets: Iterable[int]) -> None:
        """The parameters of those of ``buckets`` that are whole have no bytes any more."""
        for index in self._whole.intersection(buckets):
            for _, param in _params_in(core, core.plan.bucket(index)):
                with torch_private.without_torch_function():
                    param.untyped_storage().resize_(0)
            self._whole.discard(index)

    def _read_by_eager_code(self, param: nn.Parameter, is_raw: bool) -> bool:
        """Somebody reads a parameter outside of compiled code. True: it is whole now; False: it can't be. ``is_raw``:
        what is asked for could be written without autograd's knowing, and such a write would be lost."""
        if self._is_exposed:
            return True
        if self._depth == 0 and torch_private.current_graph_task() == -1:
            return not is_raw and self._buckets_of([param]) <= self._asked & self._whole
        self._make_params_whole([param])
        return True

    def _make_params_whole(self, params: Iterable[nn.Parameter]) -> None:
        self._make_whole_for("code that is not compiled reads", self._buckets_of(params))

    def _buckets_of(self, params: Iterable[nn.Parameter]) -> set[int]:
        core = self._found()
        if len(self._bucket_of) != len(core.placed):
            where = core.plan.slot_of()
            self._bucket_of = {id(param): where[name][0] for name, param in core.placed.items()}
        return {self._bucket_of[id(param)] for param in params if id(param) in self._bucket_of}

    def _make_whole_for(self, reason: str, buckets: set[int]) -> None:
        self._asked |= buckets
        missing = buckets - self._whole
        if missing:
            self.make_whole(missing)
            self._reasons.setdefault(reason, set()).update(missing)

    def _say_reasons(self, core: Core) -> None:
        """Once per reason, with the bytes of the first pass that had it."""
        for reason in self._reasons.keys() - self._said:
            buckets = self._reasons[reason]
            nbytes = sum(core.plan.bucket(b).nbytes for b in buckets)
            first = next(slot.name for slot, _ in _params_in(core, core.plan.bucket(min(buckets))))
            core.say_once(
                f"stage 3: {reason} {first} or its neighbors: {len(buckets)} of {len(core.plan.with_weights)} buckets, "
                f"{nbytes:,} bytes, are whole on every rank from there to the update, beside weight_nbytes"
            )
        self._said.update(self._reasons)
        self._reasons.clear()

    def install_hooks(self, model: nn.Module) -> None:
        """A module that runs eagerly has whole parameters first. Also for modules that came since the last call."""
        known = weakref.ref(self)

        def get_bytes(module: nn.Module) -> None:
            weights = known()
            own = list(module.parameters(recurse=False))
            if weights is not None and own and not weights._is_exposed:
                weights._make_params_whole(own)

        def refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            found = known()
            if found is not None and not keep_vars:  # else the caller gets the parameters themselves
                found.refuse_without_bytes("state_dict()", module)

        def refuse_load(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
            found, own = known(), module.named_parameters(recurse=False)
            if found is not None and any(prefix + name in state for name, _ in own):
                found.refuse_without_bytes("load_state_dict()", module)

        hook = torch_private.only_eager(get_bytes)
        for module in model.modules():
            if module not in self._hooked:
                self._hooked.add(module)
                self.hooks += [
                    module.register_forward_pre_hook(hook),
                    module.register_state_dict_pre_hook(refuse_state),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(refuse_load),  # type: ignore[no-untyped-call]
                ]
        self._leave(self._found())

    def refuse_without_bytes(self, what: str, module: nn.Module) -> None:
        """Raises ZcError if parameters of ``module`` have no bytes."""
        if not self._is_exposed and next(module.parameters(), None) is not None:
            raise ZcError(
                f"{what} with stage=3: a rank has flat shards, which cut across parameters, so neither a whole tensor "
                "nor a DTensor can show them. Use zc.full_state_dict(model) for whole tensors on rank 0, "
                "zc.state_dict(model, optimizer) for torch.distributed.checkpoint, zc.load_state_dict and "
                "zc.load_pretrained to load, each on all ranks; or `with zc.whole_parameters(model):`, inside which it "
                "works as for a plain model"
            )

    # --- whole parameters for the caller ---

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """All parameters are whole inside, and what was written into them goes to the shards at the end."""
        core = self._found()
        if self._is_exposed:
            yield
            return
        self.synchronize()
        self.make_whole(self._every(core))
        self.absent.release()
        self._is_exposed = True
        try:
            yield
        finally:
            self._is_exposed = False
            self._take_over(core)
            self._reads.open(core)
            self._free(core, self._every(core))
            self._leave(core)

    @torch.no_grad()
    def _take_over(self, core: Core) -> None:
        """The shards, and the masters of the elements that were written, from the whole parameters."""
        self.synchronize()
        self._reads.close(core)
        rank = core.group.shard.rank
        for bucket in core.plan.with_weights:
            flat = torch.zeros(bucket.numel, dtype=bucket.param_dtype, device=bucket.device)
            for slot, param in _params_in(core, bucket):
                flat[slot.offset : slot.stop] = flattened(param.detach(), slot)
                if slot.name in core.unset.params and not param.isnan().any():  # its first value
                    core.unset.params.discard(slot.name)
            core.buffers.weight_shard(bucket.index).copy_(flat[slice(*bucket.layout.shard_range(rank))])
            if not bucket.is_frozen and core.buffers.has_own_master(bucket):
                master = core.buffers.master_shard[bucket.index].detach()
                adopt_writes(master, flat[slice(*bucket.layout.owned_range(rank))].to(master.device))

    # --- updates ---

    def publish(self, buckets: Sequence[int], *, is_exact: bool = False) -> None:
        """weight <- this rank's masters of ``buckets``, cast to param_dtype, since `before_writes`."""
        core = self._found()
        if self._is_exposed:
            raise ZcError(
                "optimizer.step() inside zc.whole_parameters: the whole weights would stay those of before it. Leave "
                "the block first"
            )
        for index in buckets:
            bucket = core.plan.buckets[index]
            if bucket.layout.owners is not None:
                spread_shards(core.buffers, core.group.shard, bucket)
            elif bucket.has_master:
                core.buffers.weight[index].copy_(core.buffers.master_shard[index].detach())
        self._reads.open(core)
        self._num_passes, self._is_trial = 0, False
        self._asked.clear()
        slots = [slot for index in buckets for slot in core.plan.buckets[index].slots]
        torch.autograd.graph.increment_version([core.params[slot.name] for slot in slots])
        frozen = [bucket.index for bucket in core.plan.frozen if bucket.index in self._whole]
        eager = [param for index in frozen for _, param in _params_in(core, core.plan.bucket(index))]
        torch.autograd.graph.increment_version(eager)
        # a backward through a forward of before fails by these versions, as in PyTorch
        self._free(core, [*buckets, *frozen])

    def synchronize(self) -> None:
        """Before an update, a save, or the end: no gather of this rank is on its way, and nothing is gathered."""
        core = self._found()
        if self._depth or self._is_exposed:
            return
        if torch_private.current_graph_task() != -1:
            return
        self._end_pass(core)
        core.streams.join_main()
        core.buffers.drop_arena()

    def before_writes(self) -> None:
        """All ranks call it before masters or shards are written: no rank reads a shard from here on."""
        core = self._found()
        self.synchronize()
        core.streams.join_main()
        self._refuse_writes(core)
        self._reads.close(core)

    def may_be_read(self) -> None:
        """The shards have their first values."""
        self._reads.open(self._found())

    def watch(self) -> None:
        """Nothing is on its way after an update."""

    def let_read(self) -> None:
        """Nothing is on its way before a forward."""

    def count_sharing(self) -> None:
        """Nobody can hold the bytes of a parameter that has none."""

    @torch.no_grad()
    def let_go(self) -> None:
        """Plain parameters with bytes of their own again: what is whole, and NaN where ranks that were to send their
        shards are lost."""
        core = self._found()
        self.absent.release()
        for bucket in core.plan.with_weights:
            for slot, param in _params_in(core, bucket):
                if param.untyped_storage().nbytes() < slot.numel * param.element_size():
                    param.untyped_storage().resize_(slot.numel * param.element_size())
                    param.data.fill_(float("nan"))
        self._whole.clear()

    def grow(self) -> None:
        """The plan is about to get more buckets."""
        self.synchronize()
        self._singles.clear()
        self._steps.clear()
        self._expected.clear()
        self._whole_programs.clear()
        self._bucket_of.clear()

    @property
    def programs(self) -> list[Program]:
        """The schedules of whole buckets that have run so far, for explain."""
        return list(self._whole_programs.values())

    @property
    def steps(self) -> list[Step]:
        """Those planned so far, for explain."""
        return list(self._steps.values())

    @staticmethod
    def _every(core: Core) -> list[int]:
        return [bucket.index for bucket in core.plan.with_weights]

    def _found(self) -> Core:
        core = self._core()
        assert core is not None, "the model of these parameters is gone"
        return core


def _params_in(core: Core, bucket: Bucket) -> Iterator[tuple[Slot, nn.Parameter]]:
    """The parameters that lie in a bucket, without those that have moved to another one."""
    for slot in bucket.slots:
        if slot.name != MOVED:
            yield slot, core.placed[slot.name]


def without_bytes(param: nn.Parameter, slot_dtype: torch.dtype) -> Tensor:
    """A tensor of the shape, strides and device of ``param``, whose storage has no bytes."""
    empty = torch.empty_like(param.detach(), dtype=slot_dtype, memory_format=torch.preserve_format)
    empty.untyped_storage().resize_(0)
    return empty


def forward_of(weights: ShardedWeights, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, the model's forward, inside `ShardedWeights.forward`."""
    known = weakref.ref(weights)

    def run(*args: Any, **kwargs: Any) -> Any:
        found = known()
        if found is None:
            return call(*args, **kwargs)
        with found.forward():
            output = call(*args, **kwargs)
        found.hook_outputs(output)
        return output

    # a caller who compiles more than the model gets a graph break here; the model's own graphs stay as they are
    disabled: Callable[..., Any] = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return disabled
