"""Sharded weights on one rank: all of them in stage 3, those of frozen parameters with ``shard_frozen``. This knows the
shards, and which buckets are whole at this moment.

The compiled graphs of a pass, a forward with its backward, read weights in windows (`zc.engine.weight_uses`). For code
that is not compiled, buckets become whole (`zc.engine.whole_params`). A forward without gradients frees its own again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zc import torch_private
from zc.engine.absent import Absent
from zc.engine.memory_order import in_shape
from zc.engine.overlap_gather import WeightGather
from zc.engine.owners import spread_shards
from zc.engine.program import Program
from zc.engine.shard_reads import ShardReads
from zc.engine.state_dicts import StateDicts, rows_of
from zc.engine.whole_params import WholeParams, every_bucket, params_in
from zc.errors import ZcError

if TYPE_CHECKING:
    from zc.engine.core import Core
    from zc.engine.weight_uses import PlannedPass, WeightUses

MANY_EVALUATED = 32


class ShardedWeights:
    """The weights of one model on one rank. The streams that read and write them are the plan's."""

    def __init__(self, core: Core, uses: WeightUses) -> None:
        self._core = weakref.ref(core)
        core.accumulators.on_take = self.take
        self.hooks: list[RemovableHandle] = []  # on modules
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._states = StateDicts(self)
        self.absent = Absent(self._read_by_eager_code, self._states.write, core.plan.why_sharded)
        self._reads = ShardReads()
        self._uses = uses
        self._gather = WeightGather(core)  # of buckets whose weights all ranks keep whole
        self._whole = WholeParams(core, self._reads)
        self._num_evaluated = 0  # forwards without gradients, in a row
        self._num_passes = 0  # with gradients, since the last update
        # bucket and slot of parameters that were frozen -> those of now. Dynamo does not compile a graph without
        # gradients again when a parameter begins to ask for one
        self._moved: dict[tuple[int, int], tuple[int, int]] = {}
        self._task = -1  # autograd's number of the backward that runs
        self._depth = 0  # forwards of the model inside one another
        self.is_exposed = False  # inside zc.whole_parameters
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
        core = self._core_alive()
        if self._moved:
            places = [self._moved.get(place, place) for place in places]
        # what zc.recompile has moved may have its whole weights on every rank
        asked = {bucket for bucket, _ in places if core.plan.is_sharded(core.plan.bucket(bucket))}
        if torch_private.saved_tensors_are_copied():
            self._whole.make_for("hooks on what autograd saves may read", asked)
        buckets = tuple(sorted(asked - self._whole.buckets))
        # inside zc.whole_parameters there is nothing to gather, and one rank alone may be here
        extents = () if self.is_exposed else self._uses.next(buckets)
        at = {extent.bucket: extent.start for extent in extents}
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

    # --- passes ---

    def _begin_pass(self, core: Core) -> None:
        self._end_pass()
        self._reads.open(core)
        number = self._num_passes if torch.is_grad_enabled() else -1
        self._num_evaluated = 0 if torch.is_grad_enabled() else self._num_evaluated + 1
        if self._num_evaluated == MANY_EVALUATED:
            core.say_once(
                f"{self.absent.why}: {MANY_EVALUATED} forwards without gradients in a row, such as those of generate()"
                ", have gathered all weights each. Inside `with zc.whole_parameters(model):` they are gathered once"
            )
        self._num_passes += torch.is_grad_enabled()
        self._uses.begin(number)

    def _end_pass(self) -> None:
        self._uses.end(is_order_kept=not self._is_trial)
        self._whole.say_reasons()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model's forward runs inside: compiled code finds plain parameters."""
        core = self._core_alive()
        is_outer = self._depth == 0 and not self.is_exposed
        breaks = torch_private.graph_breaks()
        if is_outer:
            core.unset.check("a forward")
            self._begin_pass(core)
            if self.is_one_graph:
                if self.may_break:
                    self._is_trial = True
                    self._whole.make(every_bucket(core))
                self.absent.release()
        before, has_grad = set(self._whole.buckets), torch.is_grad_enabled()
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
                    self._end_pass()
                    self._whole.free(self._whole.buckets - before)
                    core.buffers.drop_arena()
                self._leave(core)

    def _watching_dynamo(self, core: Core) -> AbstractContextManager[None]:
        """Inside, a frame that Dynamo compiles anew may leave code uncompiled, which reads parameters past any hook of
        ours. Ranks that read each other's memory have whole parameters first. Ranks that exchange messages must do so
        together, so they wait until Dynamo has broken the graph, as it does on all of them."""
        if self._is_trial:
            return nullcontext()
        everything = set(every_bucket(core))

        def num_breaks() -> int:
            return sum(times for why, times in torch_private.graph_breaks().items() if why != "skipped frames")

        known = num_breaks()

        def make_whole() -> None:
            self._whole.make_for("code that Dynamo compiles anew may read", everything)

        def before() -> None:
            if core.plan.topology.reads_memory:
                make_whole()

        def after() -> None:
            if num_breaks() != known:  # a frame that is being compiled counts as skipped so far
                make_whole()

        return torch_private.before_compiling(before, after)

    def hook_outputs(self, output: object) -> None:
        """A backward through this output of the forward begins with `begin_backward`."""
        if not torch.is_grad_enabled() or self.is_exposed or not self.is_one_graph:
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
        if not self.is_exposed and self._depth == 0 and self._task != torch_private.current_graph_task():
            self._task = torch_private.current_graph_task()
            self.absent.release()
            torch_private.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        self._task = -1
        if not self.is_exposed and self._depth == 0:
            self._leave(self._core_alive())

    def _leave(self, core: Core) -> None:
        self.absent.leave(param for bucket in core.plan.sharded for _, param in params_in(core, bucket))

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
        core = self._core_alive()
        where = core.plan.slot_of()
        before = {name: where[name] for name in names if name in where}
        buckets = {bucket for bucket, _ in before.values()}
        self._whole.make(buckets, is_exact=True)
        yield
        where = core.plan.slot_of()
        self._moved.update({place: where[name] for name, place in before.items()})
        self._whole.free([bucket.index for bucket in core.plan.frozen])
        self._whole.buckets -= buckets

    @contextmanager
    def named_plainly(self) -> Iterator[None]:
        """Inside, parameters are of their own class, for code that asks them for no element."""
        core = self._core_alive()
        self.absent.release()
        try:
            yield
        finally:
            if not self.is_exposed and self._depth == 0:
                self._leave(core)

    # --- what eager code reads ---

    def any_sharded(self, params: Iterable[nn.Parameter]) -> bool:
        """See `WholeParams.any_sharded`."""
        return self._whole.any_sharded(params)

    def make_whole(self, buckets: Iterable[int]) -> None:
        """See `WholeParams.make`; as the shards have them."""
        self._whole.make(buckets, is_exact=True)

    def gathered_once(self, index: int) -> Tensor:
        """See `WholeParams.gathered_once`."""
        return self._whole.gathered_once(index)

    def _read_by_eager_code(self, param: nn.Parameter, is_raw: bool) -> bool:
        """Somebody reads a parameter outside of compiled code. True: it is whole now; False: it can't be. ``is_raw``:
        what is asked for could be written without autograd's knowing, and such a write would be lost."""
        if self.is_exposed:
            return True
        if not self.is_passing:
            return not is_raw and not self._states.is_reading and self._whole.was_read(param)
        self._whole.make_params([param])
        return True

    def install_hooks(self, model: nn.Module) -> None:
        """A module that runs eagerly has whole parameters first. Also for modules that came since the last call."""
        known = weakref.ref(self)

        def get_bytes(module: nn.Module) -> None:
            weights = known()
            own = list(module.parameters(recurse=False))
            if weights is not None and own and not weights.is_exposed:
                weights._whole.make_params(own)

        hook = torch_private.only_eager(get_bytes)
        end_read = partial(self._states.end_read)  # register_state_dict_post_hook marks the object that it is given
        for module in model.modules():
            if module not in self._hooked:
                self._hooked.add(module)
                self.hooks += [
                    module.register_forward_pre_hook(hook),
                    module.register_state_dict_pre_hook(self._states.begin_read),  # type: ignore[no-untyped-call]
                    module.register_state_dict_post_hook(end_read),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_pre_hook(self._states.begin_load),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_post_hook(self._states.end_load),  # type: ignore[no-untyped-call]
                ]
        self._leave(self._core_alive())

    @property
    def is_passing(self) -> bool:
        """Whether a forward of the model runs, or a backward."""
        return self._depth > 0 or torch_private.current_graph_task() != -1

    def refuse_without_bytes(self, what: str, module: nn.Module) -> None:
        """Raises ZcError if parameters of ``module`` have no bytes."""
        if not self.is_exposed and self.any_sharded(module.parameters()):
            raise ZcError(
                f"{what} with {self.absent.why}: a rank has flat shards, and no whole parameter. On all ranks, use "
                "zc.full_state_dict(model) for whole tensors on rank 0, model.state_dict() for DTensors, "
                "zc.state_dict(model, optimizer) for torch.distributed.checkpoint, zc.load_state_dict and "
                "zc.load_pretrained to load; or `with zc.whole_parameters(model):`, inside which it works as for a "
                "plain model"
            )

    # --- values from and to the caller ---

    def rows(self, params: Collection[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each of these parameters with this rank's rows of it. All ranks ask for the same ones."""
        core = self._core_alive()
        core.unset.check("state_dict()")
        wanted = {id(param) for param in params}
        names = {name for name, param in core.placed.items() if id(param) in wanted}
        core.group.same_everywhere(
            "what state_dict() is called for",
            sorted(names),
            f"With {self.absent.why} all ranks call it together, and each gets its rows; zc.full_state_dict(model) "
            "gives rank 0 whole tensors, also on all ranks",
        )
        mesh, where = core.group.shard.mesh(), core.plan.slot_of()
        if mesh is not None:
            core.say_once(
                f"{self.absent.why}: state_dict() gives each rank its rows of the parameters as DTensors, which "
                "torch.distributed.checkpoint saves together. torch.save would write this rank's rows alone: give it "
                "zc.full_state_dict(model), called on all ranks"
            )
        for bucket in sorted({where[name][0] for name in names}):
            flat = self._whole.gathered_once(bucket)
            for slot, param in params_in(core, core.plan.bucket(bucket)):
                if slot.name in names:
                    yield param, rows_of(in_shape(flat[slot.offset : slot.stop], slot), mesh)

    def load(self, param: nn.Parameter, value: Tensor) -> None:
        """See `WholeParams.load`; after `before_writes`."""
        self._whole.load(param, value)

    def were_written(self) -> None:
        """See `WholeParams.were_written`."""
        self._whole.were_written()

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """All parameters are whole inside, and what was written into them goes to the shards at the end."""
        core = self._core_alive()
        if self.is_exposed:
            yield
            return
        self.synchronize()
        before = set(self._whole.buckets)
        encoded = {index for index in before if core.plan.encodes_weights(core.plan.bucket(index))}
        self._whole.make(every_bucket(core), is_exact=True)
        self.absent.release()
        self.is_exposed = True
        try:
            yield
        finally:
            self.is_exposed = False
            self.synchronize()
            self._whole.write_shards(before - encoded)
            self._whole.make(encoded)  # as the forward has read them, for its backward
            self._leave(core)

    # --- updates ---

    def publish(self, buckets: Sequence[int], *, is_exact: bool = False) -> None:
        """The weights of ``buckets`` come from the masters, since `before_writes`: each rank writes its shard, and what
        all ranks keep whole is gathered."""
        core = self._core_alive()
        if core.plan.placement.shards_weights:
            self._write_shards(core, buckets)
        else:
            self._gather.fill(buckets, is_exact=is_exact)
        self.published(buckets)

    def _write_shards(self, core: Core, buckets: Sequence[int]) -> None:
        """weight <- this rank's masters of ``buckets``, cast to param_dtype."""
        for index in buckets:
            bucket, master = core.plan.buckets[index], core.buffers.master_shard[index].detach()
            if bucket.layout.owners is not None:
                spread_shards(core.buffers.weight[index], master.to(bucket.param_dtype), core.group.shard, bucket)
            elif bucket.has_master:
                core.buffers.weight[index].copy_(master)

    def published(self, buckets: Sequence[int]) -> None:
        """The shards of ``buckets`` have their new values: all ranks may gather them."""
        core = self._core_alive()
        self._reads.open(core)
        self._num_passes, self._is_trial = 0, False
        self._whole.end_update()
        slots = [slot for index in buckets for slot in core.plan.buckets[index].slots]
        torch.autograd.graph.increment_version([core.params[slot.name] for slot in slots])
        frozen = [bucket.index for bucket in core.plan.frozen if bucket.index in self._whole.buckets]
        eager = [param for index in frozen for _, param in params_in(core, core.plan.bucket(index))]
        torch.autograd.graph.increment_version(eager)
        # a backward through a forward of before fails by these versions, as in PyTorch
        self._whole.free([*buckets, *frozen])

    def synchronize(self) -> None:
        """Before an update, a save, or the end: no gather of this rank is on its way, and nothing is gathered."""
        core = self._core_alive()
        if self._depth or self.is_exposed:
            return
        if torch_private.current_graph_task() != -1:
            return
        self._end_pass()
        core.streams.join_main()
        core.buffers.drop_arena()

    def before_writes(self) -> None:
        """All ranks call it before masters or shards are written: no rank reads a shard from here on."""
        core = self._core_alive()
        if self.is_exposed:
            raise ZcError(
                "optimizer.step(), or a load, inside zc.whole_parameters: the whole weights would stay those of before "
                "it. Leave the block first"
            )
        self.synchronize()
        core.streams.join_main()
        self._whole.refuse_writes()
        self._reads.close(core)

    def may_be_read(self) -> None:
        """The shards have their first values."""
        self._reads.open(self._core_alive())

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
        core = self._core_alive()
        self.absent.release()
        for bucket in core.plan.sharded:
            for slot, param in params_in(core, bucket):
                if param.untyped_storage().nbytes() < slot.numel * param.element_size():
                    param.untyped_storage().resize_(slot.numel * param.element_size())
                    param.data.fill_(float("nan"))
        self._whole.buckets.clear()

    def grow(self) -> None:
        """The plan is about to get more buckets."""
        self.synchronize()
        self._uses.grow()
        self._whole.grow()
        self._gather.grow()

    @property
    def programs(self) -> list[Program]:
        """The schedules of whole buckets that have run so far, for explain."""
        return [*self._whole.programs, *self._gather.programs]

    @property
    def planned(self) -> list[PlannedPass]:
        """Those so far, for explain."""
        return self._uses.planned

    @property
    def clocked(self) -> list[PlannedPass]:
        """What a clocked step may have run of these, and of single uses."""
        return self._uses.clocked

    def _core_alive(self) -> Core:
        core = self._core()
        assert core is not None, "the model of these parameters is gone"
        return core


def named_plainly(weights: object) -> AbstractContextManager[None]:
    """`ShardedWeights.named_plainly`, where weights are sharded."""
    return weights.named_plainly() if isinstance(weights, ShardedWeights) else nullcontext()


def without_bytes(param: nn.Parameter, slot_dtype: torch.dtype) -> Tensor:
    """A tensor of the shape, strides and device of ``param``, whose storage has no bytes."""
    empty = torch.empty_like(param.detach(), dtype=slot_dtype, memory_format=torch.preserve_format)
    empty.untyped_storage().resize_(0)
    return empty


def forward_of(weights: ShardedWeights, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, the model's forward, inside `ShardedWeights.forward`."""
    known = weakref.ref(weights)

    def run(*args: Any, **kwargs: Any) -> Any:
        weights = known()
        if weights is None:
            return call(*args, **kwargs)
        with weights.forward():
            output = call(*args, **kwargs)
        weights.hook_outputs(output)
        return output

    # a caller who compiles more than the model gets a graph break here; the model's own graphs stay as they are
    disabled: Callable[..., Any] = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return disabled
