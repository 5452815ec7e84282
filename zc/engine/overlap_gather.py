"""The parameters after an update: every rank's shards into flat_param, as a proved schedule of its own.

As a rule ``optimizer.step()`` ends with all of it done::

       comm | gather(1, "flat_param[1]")
       comm | gather(0, "flat_param[0]")
    compute | publish(1, "flat_param[1]")
    compute | publish(0, "flat_param[0]")

With ``overlap_gather`` it ends with the gathers launched, in the order in which modules were registered, and the next
forward, a schedule as well, waits for each bucket where it first reads it (PyTorch FSDP's and Megatron's
overlap_param_gather have the idea; megatron-lm#950 is what a forgotten wait does)::

       comm | gather(1, "gathered[1]")                  compute | wait_event("done/gathered[1]")
       comm | record_event("done/gathered[1]")    ...   compute | segment("segment_0", %primals_1, %primals_9)
       comm | gather(0, "gathered[0]")                  compute | wait_event("done/gathered[0]")
       comm | record_event("done/gathered[0]")          compute | segment("segment_1", %getitem_2, %primals_2)

Where weights leave a host as differences (`zc.planning.wire`), what is gathered is not the weights::

       comm | encode_update(0, "update[0]", "flat_param[0]")
       comm | exchange_updates(0, "update[0]")
       comm | apply_update(0, "flat_param[0]", "update[0]")

``gathered[b]`` is flat_param[b] under the name that carries an event from schedule to schedule. The end of a compiled
forward graph publishes every bucket, so that backward, loss and whatever the caller does next may read them all; and so
does `WeightGather.synchronize`, which hooks call before anything of the module's own that is not compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils.hooks import RemovableHandle

from zc import torch_private
from zc.engine.pending import Pending, can_be_watched
from zc.engine.program import Program, Segment, build
from zc.passes import cut_forward, insert_events, outline_segments, place_on_streams, signal_peers, verify
from zc.passes.base import Pass
from zc.planning.plan import Plan
from zc.schedule.buffer import Buffer
from zc.schedule.nodes import put
from zc.schedule.spec import ApplyUpdate, EncodeUpdate, ExchangeUpdates, Gather, GatherNet, Publish, Spread

if TYPE_CHECKING:
    from zc.engine.core import Core

_GATHER = (signal_peers.PASS, place_on_streams.PASS, insert_events.PASS, verify.PASS)
_FORWARD = (cut_forward.PASS, outline_segments.PASS, *_GATHER)


def gather_graph(plan: Plan, buckets: Sequence[int]) -> fx.Graph:
    """Gathers these buckets, the last of the plan (the first that a forward reads) first."""
    graph = fx.Graph()
    order = sorted(buckets, reverse=True)
    for bucket in order if plan.world_size > 1 else ():
        if plan.buckets[bucket].layout.owners is not None:
            put(graph, Spread(bucket, Buffer.named(plan.weights_buffer(bucket))))
        weights = Buffer.named(plan.weights_buffer(bucket))
        if plan.gather_bits:
            update = Buffer("update", 0)  # one is enough: these three follow each other on one stream
            put(graph, EncodeUpdate(bucket, update, weights))
            put(graph, ExchangeUpdates(bucket, update))
            put(graph, ApplyUpdate(bucket, weights, update))
        elif plan.has_levels:
            put(graph, GatherNet(bucket, weights))
        if plan.has_levels or not plan.gather_bits:
            put(graph, Gather(bucket, weights))
    for bucket in () if plan.overlap_gather else order:
        put(graph, Publish(bucket, Buffer.named(plan.weights_buffer(bucket))))
    graph.output(())
    return graph


def publish_graph(plan: Plan) -> fx.Graph:
    """The main stream may read all parameters."""
    graph = fx.Graph()
    for bucket in plan.buckets:
        put(graph, Publish(bucket.index, Buffer.named(plan.weights_buffer(bucket.index))))
    graph.output(())
    return graph


class WeightGather:
    """The gathers of one model on one rank, and the compiled forward graphs that wait for them."""

    def __init__(self, core: Core) -> None:
        self._core = weakref.ref(core)
        self._programs: dict[tuple[int, ...], Program] = {}
        self._is_open = False  # a gather may be in flight that the main stream has not waited for
        self._pending = Pending(self.synchronize)
        self._num_sharing: dict[str, int] = {}  # of each parameter's storage: the parameter alone
        self.hooks: list[RemovableHandle] = []  # on modules
        self._unseen: str | None = None  # why a read after the present update might not be noticed

    @property
    def programs(self) -> list[Program]:
        """The schedules that have run so far, for explain."""
        return list(self._programs.values())

    def publish(self, buckets: Sequence[int], *, is_exact: bool = False) -> None:
        """flat_param <- all ranks' masters of ``buckets``, cast to param_dtype; afterwards the main stream may read
        them, or, with overlap_gather, what has waited for them may. Differences that travel encoded bring it close to
        the masters; ``is_exact``: equal to them in that case too."""
        core = self._found()
        if core.plan.overlap_gather:  # now, since a gather that is on its way holds views of its own
            self._unseen = self._why_unseen(core)
        for index in buckets:
            bucket = core.plan.buckets[index]
            if bucket.has_master and (is_exact or not core.plan.gather_bits):
                shard = core.buffers.owned(core.buffers.flat_param[index], bucket)
                shard.copy_(core.buffers.master_shard[index].detach())
                core.buffers.remember_shard(bucket)
        self._program(tuple(buckets), is_exact=is_exact and core.plan.gather_bits > 0)([], core.streams)
        self._is_open = core.plan.overlap_gather
        # the parameters changed behind autograd's back (their memory is flat_param): a backward through a forward from
        # before this step must fail as it does in PyTorch
        slots = (slot for index in buckets for slot in core.plan.buckets[index].slots)
        torch.autograd.graph.increment_version([core.params[slot.name] for slot in slots])

    def count_sharing(self) -> None:
        """New buckets are ready: their parameters' storages are new, and nobody but the parameters can hold them."""
        for name, param in self._found().params.items():
            if name not in self._num_sharing:
                self._num_sharing[name] = torch_private.num_sharing(param)

    def watch(self) -> None:
        """The step is over: who reads a parameter before the next forward waits for all gathers. Where a read could not
        be seen, the step itself waits, and says so."""
        if not self._is_open:
            return
        core = self._found()
        if self._unseen is None:
            self._pending.leave(core.params.values())
        else:
            core.say_once(f"overlap_gather: {self._unseen}: step() waits for the weights wherever that is so")
            self.synchronize()

    def _why_unseen(self, core: Core) -> str | None:
        """Through what new weights might be read unseen, and which; None: nothing."""
        others = sorted({type(p).__name__ for p in core.params.values() if not can_be_watched(p)})
        if others:
            return f"parameters of class {', '.join(others)} can't be watched"
        for name, known in self._num_sharing.items():
            if torch_private.num_sharing(core.params[name]) > known:
                return (
                    f"something other than the parameter holds the memory of {name} (a view, p.data, p.detach() or an "
                    "array kept from before the step), and may be read unseen"
                )
        return None

    def let_read(self) -> None:
        """A compiled forward begins: its schedule waits for what it reads."""
        self._pending.release()

    def synchronize(self) -> None:
        """Whoever comes next on the main stream may read every parameter. No host synchronisation on CUDA."""
        self._pending.release()
        if self._is_open:
            self._program(None)([], self._found().streams)
            self._is_open = False

    def compile_forward(
        self, graph: fx.Graph, compile_segment: Callable[[fx.GraphModule], Segment]
    ) -> Callable[[list[Any]], tuple[Any, ...]]:
        """A forward graph as a schedule. Its parameters' placeholders name their buffer in ``meta["buffer"]``."""
        core = self._found()
        program = build(
            graph,
            core.plan,
            self._proved(_FORWARD),
            core.bind,
            compile_segment,
            name=f"forward_{len(core.forwards)}",
            dump_dir=core.config.dump_dir,
        )
        core.forwards.append(program)
        # weak: Dynamo keeps ``run``, see `zc.compiler.backend.make_backend`
        this, known = weakref.proxy(self), weakref.proxy(program)

        def run(args: list[Any]) -> tuple[Any, ...]:
            core = this._found()
            outputs = known(args, core.streams)
            # its last nodes publish every bucket of its plan, which zc.recompile may have extended since
            this._is_open = this._is_open and known.plan is not core.plan
            return outputs

        return run

    def grow(self) -> None:
        """The plan is about to get more buckets: what publishes all has to be built anew."""
        self.synchronize()
        self._programs.clear()

    def install_hooks(self, model: nn.Module) -> None:
        """What reads parameters outside of a compiled forward waits first: a module that runs eagerly, state_dict and
        load_state_dict of the model or of a part."""
        known = weakref.ref(self)

        def synchronize(*_: object) -> None:
            found = known()
            if found is not None:
                found.synchronize()

        wait = torch_private.only_eager(synchronize)
        for module in model.modules():
            self.hooks += [
                module.register_forward_pre_hook(wait),
                module.register_state_dict_pre_hook(wait),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(wait),  # type: ignore[no-untyped-call]
            ]

    def _program(self, buckets: tuple[int, ...] | None, *, is_exact: bool = False) -> Program:
        """Gathers these buckets; None: publishes all."""
        key = (-1,) if buckets is None else (*buckets, *((-2,) if is_exact else ()))
        if key not in self._programs:
            core = self._found()
            plan = core.plan.exact_gathers() if is_exact else core.plan
            graph = publish_graph(plan) if buckets is None else gather_graph(plan, buckets)
            name = "publish" if buckets is None else f"gather_{len(self._programs)}"
            self._programs[key] = build(graph, plan, self._proved(_GATHER), core.bind, name=name)
        return self._programs[key]

    def _proved(self, passes: Sequence[Pass]) -> list[Pass]:
        chosen = [p for p in passes if self._found().config.verify or p.name != "verify"]
        return [p._replace(requires=frozenset()) for p in chosen]

    def _found(self) -> Core:
        core = self._core()
        assert core is not None, "the model of these parameters is gone"
        return core
