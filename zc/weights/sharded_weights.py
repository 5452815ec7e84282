"""Sharded weights on one rank: all of them in stage 3, those of frozen parameters with ``shard_frozen``. This knows the
shards, and which buckets are whole at this moment.

The compiled graphs of a pass, a forward with its backward, read weights in windows (`zc.weights.weight_uses`). For code
that is not compiled, buckets become whole (`zc.weights.whole_params`). A forward without gradients frees its own again.

`ModelPasses` knows which forward or backward runs, and what the parameters are meanwhile. Inside of one, compiled code
finds plain parameters, and code that is not compiled finds whole ones. Outside, parameters are absent
(`zc.weights.param`), except inside `zc.whole_parameters`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.engine.core import Core, Part, weakly
from zc.engine.memory_order import in_shape
from zc.engine.owners import spread_run
from zc.engine.param_checks import Places, refuse_in_step
from zc.engine.program import Program
from zc.engine.weights import Weights
from zc.errors import ZcError
from zc.weights.param import ManagedParams, Use, give_bytes
from zc.weights.state_dicts import StateDicts
from zc.weights.weight_uses import BETWEEN, WeightUses
from zc.weights.whole_params import WholeParams


class ShardedWeights(Weights):
    """The weights of one model on one rank. The streams that read and write them are the plan's."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        core.accumulators.on_take = self.take
        self._states = states = StateDicts(self)
        before = torch_private.only_eager(weakly(self._before_module))
        self._on_modules = [
            # the first, since a hook of the module's own may read its weights, as torch's spectral_norm does
            partial(nn.Module.register_forward_pre_hook, hook=before, prepend=True),
            partial(nn.Module.register_state_dict_pre_hook, hook=weakly(states.begin_read)),
            partial(nn.Module.register_state_dict_post_hook, hook=weakly(states.end_read)),
            partial(nn.Module.register_load_state_dict_pre_hook, hook=weakly(states.begin_load)),
            partial(nn.Module.register_load_state_dict_post_hook, hook=weakly(states.end_load)),
        ]
        self.managed = ManagedParams(self, core.plan.why_sharded)
        self._uses = WeightUses(core)
        self.whole = WholeParams(core, self._programs)
        # bucket and slot of parameters that were frozen -> those of now. Dynamo does not compile a graph without
        # gradients again when a parameter begins to ask for one
        self._moved: dict[tuple[int, int], tuple[int, int]] = {}
        self.passes = ModelPasses(core, self.managed, self.whole, self._uses)

    # --- what compiled graphs read ---

    def take(self, places: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The next window of a compiled graph: its parameters, [shape] each, until the window after it."""
        core = self.core
        if self._moved:
            places = [self._moved.get(place, place) for place in places]
        # what zc.recompile has moved may have its whole weights on every rank
        asked = {bucket for bucket, _ in places if core.plan.is_sharded(core.plan.bucket(bucket))}
        self.passes.note_backward()
        if torch_private.saved_tensors_are_copied():
            self.whole.unshard_for("hooks on what autograd saves may read", asked)
        buckets = tuple(sorted(asked.difference(self.whole.buckets)))
        # inside zc.whole_parameters there is nothing to gather, and one rank alone may be here
        extents = () if self.passes.is_unsharded else self._uses.next(buckets)
        at = {extent.bucket: extent.start for extent in extents}
        flat = {b: core.buffers.gathered("arena[0]", core.plan.bucket(b), at[b]) for b in buckets}
        taken = []
        for bucket, number in places:
            slot = core.plan.bucket(bucket).slots[number]
            with torch_private.without_torch_function():
                param = core.placed[slot.name]
                part = in_shape(flat[bucket][slot.offset : slot.stop], slot) if bucket in flat else param.detach()
                # flex_attention's backward asks, and makes no gradient of a weight without
                taken.append(part.requires_grad_(param.requires_grad))
        return taken

    @contextmanager
    def with_bytes(self, params: Iterable[nn.Parameter]) -> Iterator[None]:
        with self.managed.lent(params) as lent:
            empty = [give_bytes(param) for param in lent]
            try:
                yield
            finally:
                for param, without in zip(lent, empty, strict=True):
                    param.data = without

    @contextmanager
    def leaving(self, moved: Iterable[str], left: Iterable[str]) -> Iterator[None]:
        """These parameters are whole inside, where they leave their buckets: ``moved`` for buckets that train, ``left``
        for good."""
        core = self.core
        if self.passes.is_unsharded:
            raise ZcError(
                "zc.recompile of new parameters inside zc.whole_parameters: its weights go back to the places "
                "of before at its end. Leave the block first"
            )
        where, sharded = core.plan.slot_of, core.plan.sharded_names  # shard_frozen: what trains has its bytes
        before = {name: where[name] for name in moved if name in sharded}
        lost = {name: where[name] for name in left if name in sharded}
        buckets = {bucket for bucket, _ in (*before.values(), *lost.values())}
        self.adopt_writes()
        self.whole.unshard(buckets, is_exact=True)
        for name in lost:
            self.managed.release([core.placed[name]])
        yield
        where = core.plan.slot_of
        self._moved.update({place: where[name] for name, place in before.items()})
        self.whole.reshard(core.sharded_buckets if lost else [bucket.index for bucket in core.plan.frozen])
        for index in buckets:
            self.whole.buckets.pop(index, None)

    # --- what eager code reads ---

    def read_param(self, param: nn.Parameter, is_raw: bool) -> bool:
        """True: it is whole now; False: it can't be."""
        if self.passes.is_unsharded:
            return True
        if self.passes.is_passing:
            self.read([param])
        elif self._states.is_reading or self.managed.update is not None or not self.whole.was_read(param):
            return False
        if is_raw:
            self.whole.lend(param)
        return True

    def load_value(self, param: nn.Parameter, value: Tensor) -> bool:
        return self._states.write(param, value)

    def _before_module(self, module: nn.Module) -> None:
        """A module runs eagerly."""
        if self.passes.is_unsharded:
            return
        self.passes.note_uncompiled()
        own = list(module.parameters(recurse=False))
        if own:
            self.read(own)

    def install_hooks(self, model: nn.Module) -> None:
        super().install_hooks(model)
        self.passes.make_absent()

    def call_of(self, module: nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any]:
        """Also a forward that is not compiled."""
        return self._inside(call or partial(torch_private.object_call, module))

    def forward(self) -> AbstractContextManager[None]:
        return self.passes.forward()

    def note_output(self, output: object) -> None:
        self.passes.hook_outputs(output)

    @property
    def around_block(self) -> Callable[[Places], AbstractContextManager[object]]:
        """Inside, its parameters are of their own class: a compiled block is guarded by it."""
        lent = self.managed.lent  # which holds the weights weakly
        return lambda places: lent(param for _, _, param in places)

    def read(self, params: Sequence[nn.Parameter], why: str = "code that is not compiled reads") -> None:
        self.whole.unshard_for(why, self.whole.buckets_of(params))
        with torch_private.without_torch_function():  # another stream than the reader's may have made them whole
            self.core.streams.hand_to_main(params)

    def refuse_without_bytes(self, what: str, module: nn.Module) -> None:
        if not self.passes.is_unsharded and self.whole.buckets_of(module.parameters()):
            raise ZcError(
                f"{what} with {self.managed.why}: a rank has flat shards, and no whole parameter. On all ranks, use "
                "zc.full_state_dict(model) for whole tensors on rank 0, model.state_dict() for DTensors, "
                "zc.state_dict(model, optimizer) for torch.distributed.checkpoint, zc.load_state_dict and "
                "zc.load_pretrained to load; or `with zc.whole_parameters(model):`, inside which it works as for a "
                "plain model"
            )

    # --- values from and to the caller ---

    def named_plainly(self) -> AbstractContextManager[None]:
        return self.passes.named_plainly()

    @property
    def is_unsharded(self) -> bool:
        return self.passes.is_unsharded

    def units(self, *, is_wanted: bool) -> Generator[dict[str, Tensor], None, None]:
        """A unit of what is sharded is a bucket, in memory that the next but one takes. All ranks gather them together:
        before each, they tell each other whether one still wants more. A rank that leaves the loop comes here by
        GeneratorExit, and goes on for the others.

        Raises ZcError inside of a forward or backward, or if one of them, an update, a save or a load comes between two
        units."""
        refuse_in_step(lambda: "a gather of the model's weights")
        core = self.core
        sharded = {} if self.is_unsharded else core.plan.sharded_names
        if sharded and self.passes.is_passing:
            raise ZcError(f"whole weights are asked for inside of a forward or backward: {BETWEEN}")
        if sharded:
            self.synchronize()
            self.adopt_writes()
            yield from self._uses.each_once(is_wanted=is_wanted)
        for name, param in core.placed.items() if is_wanted else ():  # last: who leaves here owes nothing any more
            if name not in sharded:
                yield {name: param.detach()}

    def displaced(self) -> dict[str, Tensor]:
        return self.whole.empty()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        core = self.core
        if self.passes.is_unsharded:
            yield
            return
        refuse_in_step(lambda: "zc.whole_parameters")
        self.synchronize()
        before = set(self.whole.buckets)
        rounded = {index for index in core.sharded_buckets if core.plan.encodes_gathers(core.plan.bucket(index))}
        encoded, pending = before & rounded, self.whole.saved(rounded)  # a backward reads what its forward has read
        self.unshard()
        self.managed.release()
        self.passes.is_unsharded = True
        try:
            yield
        finally:
            self.passes.is_unsharded = False
            self.synchronize()
            try:
                self.adopt_writes()
                self.whole.note_first_values()
                # what a backward may read stays whole, and is as its forward has read it
                stays = (before - encoded) | (self.whole.saved(core.sharded_buckets) - pending)
                self.whole.reshard(set(core.sharded_buckets) - stays)
                self.whole.unshard(encoded)
            finally:
                self.passes.make_absent()

    # --- updates ---

    def publish(self, buckets: Sequence[int], *, is_exact: bool = False) -> None:
        """The weights of ``buckets`` come from the masters, since `before_writes`: each rank writes its shard, and what
        all ranks keep whole is gathered."""
        core = self.core
        if core.plan.placement.shards_weights:
            self._write_shards(buckets)
        else:
            self._fill(buckets, is_exact=is_exact)  # shard_frozen: all ranks keep what trains whole
        self.published(buckets)

    def _write_shards(self, buckets: Sequence[int]) -> None:
        """weight <- this rank's masters of ``buckets``, cast to param_dtype."""
        core = self.core
        for index in buckets:
            bucket, master = core.plan.buckets[index], core.buffers.master_shard[index].detach()
            if bucket.layout.owners is not None:
                spread_run(core.buffers.weight[index], master.to(bucket.param_dtype), core.group.shard, bucket)
            elif bucket.has_master:
                core.buffers.weight[index].copy_(master)

    def published(self, buckets: Sequence[int]) -> None:
        """The shards of ``buckets`` have their new values: all ranks may gather them."""
        core = self.core
        self.managed.update = None
        core.accumulators.open_shards()
        self.passes.end_update()
        frozen = [bucket.index for bucket in core.plan.frozen if bucket.index in self.whole.buckets]
        super().published([*buckets, *frozen])
        self.managed.end_views()
        self.whole.say_kept_views(buckets)
        self.whole.reshard([*buckets, *frozen])

    def synchronize(self) -> None:
        """Before an update, a save, or the end: no gather of this rank is on its way, and nothing is gathered."""
        core = self.core
        if self.passes.is_passing or self.passes.is_unsharded:
            return
        self.passes.end()
        core.streams.join_main()
        core.buffers.arena.clear()

    def before_writes(self) -> None:
        """All ranks call it before masters or shards are written: no rank reads a shard from here on."""
        core = self.core
        if self.passes.is_unsharded:
            raise ZcError(
                "optimizer.step(), or a load, inside zc.whole_parameters: the whole weights would stay those of before "
                "it. Leave the block first"
            )
        with self.managed.used("an update or a load"):
            self.synchronize()
            core.streams.join_main()
            self.whole.adopt()
            self.managed.update = self.managed.enter("an update or a load")

    def adopt_writes(self) -> None:
        """All ranks call it before they read shards for a save: what the program has written into whole parameters is
        in the shards then."""
        if not self.passes.is_unsharded:
            self.whole.adopt()
            self.core.accumulators.open_shards()

    def unshard(self) -> None:
        self.adopt_writes()
        self.whole.unshard(self.core.sharded_buckets, is_exact=True)

    @torch.no_grad()
    def let_go(self) -> None:
        """Plain parameters with bytes of their own again: what is whole, and NaN where ranks that were to send their
        shards are lost."""
        core = self.core
        if core.plan.world_size == 1:
            self.whole.unshard(set(core.sharded_buckets).intersection(core.buffers.filled), is_exact=True)
        self.managed.release()
        for bucket in core.plan.sharded:
            for slot, param in core.params_in(bucket):
                if param.untyped_storage().nbytes() < slot.numel * param.element_size():
                    param.untyped_storage().resize_(slot.numel * param.element_size())
                    param.data.fill_(float("nan"))
        self.whole.buckets.clear()

    def grow(self) -> None:
        """The plan is about to get more buckets."""
        super().grow()
        self._uses.grow()
        self.whole.grow()

    @property
    def passes_so_far(self) -> list[tuple[str, Program]]:
        return self._uses.passes_so_far


MANY_EVALUATED = 32


class ModelPasses(Part):
    """The passes of one model on one rank, a pass being a forward with its backward."""

    def __init__(self, core: Core, managed: ManagedParams, whole: WholeParams, uses: WeightUses) -> None:
        super().__init__(core)
        self.managed, self._whole, self._uses = managed, whole, uses
        self._num_evaluated = 0  # forwards without gradients, in a row
        self._num_passes = 0  # with gradients, since the last update
        self._backwards: weakref.WeakValueDictionary[int, Use] = weakref.WeakValueDictionary()  # by autograd's number
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
        core.accumulators.open_shards()
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

    def note_backward(self) -> None:
        """Weights are read. In a backward they are in use until that ends; on a device autograd has a thread of its own
        for it, which may serve the thread of a forward.

        In a backward through a forward that may have broken, what was compiled beside the model's frame may run again
        (activation checkpointing), and finds plain parameters, which are whole until the update. In any other backward
        compiled code has what it reads from `take`, and hooks of the program find parameters that get their bytes when
        they are read."""
        number = torch_private.current_graph_task()
        if number == -1 or number in self._backwards or self.is_unsharded:
            return
        is_on_cpu = self.core.plan.buckets[0].device.type == "cpu"
        use = self._backwards[number] = self.managed.enter("a backward", beside_others=not is_on_cpu)
        torch_private.queue_callback(use.end)
        if self._is_trial and self._depth == 0:
            self.managed.release()
            use.call_at_end(weakly(self.make_absent))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The model's forward runs inside: compiled code finds plain parameters."""
        refuse_in_step(lambda: "the model's forward")
        core = self.core
        is_part = self.is_unsharded or torch_private.current_graph_task() != -1  # of a use that has begun, a backward
        is_outer = self._depth == 0 and not self.is_unsharded
        before, was_trial, has_grad = set(self._whole.buckets), self._is_trial, torch.is_grad_enabled()
        with nullcontext() if is_part else self.managed.used("a forward"):
            if is_outer:
                core.unset.check("a forward")
                core.group.record_call("a forward", shared=False)
                self._begin()
                if self.is_one_graph:
                    if self.may_break:
                        self._is_trial = True
                        self._whole.unshard(core.sharded_buckets)
                    self.managed.release()
            self._depth += 1
            try:
                with self._watching_dynamo() if is_outer and self.is_one_graph else nullcontext():
                    yield
            finally:
                self._depth -= 1
                if is_outer:
                    if not has_grad:
                        self.end()
                        self._is_trial = was_trial
                        self._whole.reshard_unwritten(self._whole.buckets.keys() - before)
                        core.buffers.arena.clear()
                    self.make_absent()

    def note_uncompiled(self) -> None:
        """A module runs as it is. Inside a forward that is to be compiled nothing else need tell: the limit of
        recompiles, ``torch.compiler.set_stance``, ``TORCHDYNAMO_DISABLE``. That code may read weights beside modules,
        so all are whole before it does."""
        if self._depth and self.is_one_graph and not self._is_trial:
            self._is_trial = True
            self._whole.unshard_for("code that Dynamo leaves uncompiled may read", {*self.core.sharded_buckets})

    @contextmanager
    def _watching_dynamo(self) -> Iterator[None]:
        """Inside, a frame that Dynamo compiles anew may leave code uncompiled, which reads parameters past any hook of
        ours. Ranks that read each other's memory have whole parameters first. Ranks that exchange messages must do so
        together, so they wait until Dynamo has broken the graph, as it does on all of them. What it breaks in another
        thread meanwhile, for another model, is no matter of this one, and other ranks would know nothing of it."""
        breaks_before: dict[str, int] | None = None  # those before this thread's last compilation of a frame
        num_skipped, is_broken = torch_private.graph_breaks().get(torch_private.SKIPPED, 0), False

        def breaks() -> dict[str, int]:  # a frame that is being compiled counts as skipped so far
            return {why: n for why, n in torch_private.graph_breaks().items() if why != torch_private.SKIPPED}

        def unshard() -> None:
            if not self._is_trial:
                self._whole.unshard_for("code that Dynamo compiles anew may read", {*self.core.sharded_buckets})

        def before() -> None:
            nonlocal breaks_before
            breaks_before = breaks()
            if self.core.accumulators.routes.shards is not None:
                unshard()

        def after() -> None:
            nonlocal is_broken
            if breaks() != breaks_before:
                is_broken = True
                unshard()

        try:
            with torch_private.before_compiling(before, after):
                yield
        finally:
            is_skipped = torch_private.graph_breaks().get(torch_private.SKIPPED, 0) != num_skipped
            is_broken |= breaks_before is not None and is_skipped
            self.may_break = is_broken or (self.may_break and not self._is_first)
            self._is_first = False

    def hook_outputs(self, output: object) -> None:
        """A backward through this output of a forward that may have broken begins with `note_backward`."""
        if not torch.is_grad_enabled() or self.is_unsharded or not self._is_trial:
            return
        begin = weakly(self.note_backward)
        for leaf in torch_private.tensors_in(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(lambda _: begin())  # type: ignore[no-untyped-call]

    def make_absent(self) -> None:
        """Parameters are absent where no forward runs, and outside of zc.whole_parameters."""
        core = self.core
        if not self.is_unsharded and self._depth == 0:
            self.managed.add(param for bucket in core.plan.sharded for _, param in core.params_in(bucket))

    @contextmanager
    def named_plainly(self) -> Iterator[None]:
        """Inside, parameters are of their own class, for code that asks them for no element."""
        self.managed.release()
        try:
            yield
        finally:
            self.make_absent()

    def end_update(self) -> None:
        """The weights are new."""
        self._num_passes, self._is_trial = 0, False
