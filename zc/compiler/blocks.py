"""Blocks are compiled on their own: one forward and one backward graph for all members of a kind.

A block's call is taken out of the model's own graph, so that Dynamo traces it once; what stands outside of blocks is
compiled as the rest of any model. A run tells its block by the parameters that it gets (`Blocks.member_of`).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from zc import torch_private
from zc.engine.instead import instead
from zc.engine.param_checks import BlockPlaces, Places
from zc.planning.plan import BlockKind, Plan, block_of, split_name
from zc.schedule.rebase import rebased, shifts

if TYPE_CHECKING:
    from zc.engine.program import Program
    from zc.engine.runtime import Runtime


class Blocks:
    """The blocks of one compiled model, and which of them has a parameter."""

    def __init__(self, runtime: Runtime, kinds: Sequence[BlockKind]) -> None:
        self.kinds = tuple(kinds)
        self.positions = block_of(kinds)
        self._runtime = runtime
        self._plan: Plan | None = None  # of `_members`
        self._members: dict[int, str | None] = {}  # lasting storage of a parameter in a bucket -> its block
        self._split = functools.cache(partial(split_name, members=self.positions))

    def split(self, name: str | None) -> tuple[str, str] | None:
        """A parameter's name as (member, name in it); None: it is outside of blocks."""
        return None if name is None else self._split(name)

    def member_of(self, params: Sequence[object]) -> str | None:
        """The one block of these parameters, or of tensors that share their memory (checkpointing detaches what a
        forward saves); None: of none, or of several."""
        runtime = self._runtime
        displaced = runtime.weights.displaced()
        if self._plan is not runtime.plan:
            self._plan = runtime.plan
            lasting = {**runtime.placed, **displaced}.items()
            self._members = {torch_private.storage_number(tensor): self._named(name) for name, tensor in lasting}
        passing = {torch_private.storage_number(runtime.placed[name]): name for name in displaced}
        members = set()
        for param in params:
            number = torch_private.storage_number(param) if isinstance(param, Tensor) else 0
            members.add(self._named(passing[number]) if number in passing else self._members.get(number))
        return members.pop() if len(members) == 1 else None

    def _named(self, name: str | None) -> str | None:
        """The block of the parameter with this name; None: it is outside of blocks."""
        parts = self.split(name)
        return None if parts is None else parts[0]

    def num_after(self, member: str) -> int:
        """How many blocks of its kind come after ``member``, so that their backwards come before its own."""
        kind, position = self.positions[member]
        return len(self.kinds[kind].members) - 1 - position

    def find_block(self, names: Sequence[str | None]) -> Block | None:
        """The block whose parameters are among ``names``; None: there are none, or of several blocks."""
        members = {member for name in names if (member := self._named(name)) is not None}
        return Block(self, members.pop(), self.member_of) if len(members) == 1 else None


@dataclass(frozen=True)
class Block:
    """The block that a graph was traced for, which runs for all blocks of its kind. A *member* is the name of such a
    block."""

    blocks: Blocks
    name: str
    member_of: Callable[[Sequence[object]], str | None]  # of its `Blocks`

    def __str__(self) -> str:
        """Its kind, as the log names it."""
        number, _ = self.blocks.positions[self.name]
        kind = self.blocks.kinds[number]
        return f"block kind {number + 1} of {len(self.blocks.kinds)} ({len(kind.members)} x {kind.name})"

    def path(self, name: str | None) -> str | None:
        """A parameter's name in this block; None: it is not of this block."""
        parts = self.blocks.split(name)
        return parts[1] if parts is not None and parts[0] == self.name else None

    def in_block(self, name: str, member: str) -> str:
        """The name in ``member`` of a parameter of this block; any other name as it is."""
        path = self.path(name)
        return name if path is None else f"{member}.{path}"

    def moved(self, template: Program, source: str, member: str, names: Sequence[str]) -> fx.Graph | None:
        """The schedule of member ``source``, moved to ``member`` (`zc.schedule.rebase`). ``names``: the parameters that
        it names, as in this block. None: their places differ by more than a shift."""
        renamed = {self.in_block(name, source): self.in_block(name, member) for name in names}
        moves = shifts(template.plan, renamed)
        if moves is None:
            return None
        turn = self.blocks.num_after(member) * template.num_writes  # buckets that pass through the ring before
        return rebased(template.graph, template.plan, renamed, moves, turn)


def install_call(block: nn.Module, call: Callable[..., Any]) -> None:
    """Makes ``block(...)`` run ``call(...)``; what `zc.guards.install` has returned undoes it."""
    torch_private.set_call(block, instead(block, "_call_impl", call))


Context = Callable[[Places], contextlib.AbstractContextManager[object]]


def compile_blocks(
    model: nn.Module,
    kinds: Sequence[BlockKind],
    make_backend: Callable[[], Callable[..., Any]],
    dynamic: bool | None,
    context: Context | None = None,
) -> list[BlockPlaces]:
    """Each member of a kind runs one compiled function from now on, with one backend per kind. The function runs inside
    ``context(places)``, with the places of the block's parameters, which are returned."""
    found = []
    for kind in kinds:
        compiled = torch_private.compiled_call(torch_private.class_call, make_backend(), dynamic=dynamic)
        for name in kind.members:
            block = model.get_submodule(name)
            places = torch_private.places_of_params(block)
            found.append((weakref.ref(block), places))
            run = partial(_run, weakref.ref(block), compiled, places, context)
            install_call(block, torch.compiler.disable(run, reason=torch_private.BLOCK))  # type: ignore[no-untyped-call]
    return found


def find_again(runtime: Runtime) -> None:
    """The blocks have other parameters now. Where weights are sharded, one that has those of several blocks, or others
    beside its own, runs op by op: the graph of its kind takes one block's."""
    names = {id(param): name for name, param in runtime.placed.items()}
    split = Blocks(runtime, runtime.plan.kinds).split
    for block_ref, places in runtime.block_places:
        block = block_ref()
        if block is None:
            continue
        places[:] = torch_private.places_of_params(block)
        parts = [split(names[id(param)]) for _, _, param in places if id(param) in names]
        members = sorted({"no block" if part is None else part[0] for part in parts})
        if len(members) > 1 and runtime.plan.sharded:
            runtime.say_once(f"a block has parameters of {' and '.join(members)} now, and runs op by op")
            places.append(({}, "", places[0][2]))  # never found there: see `_run`


def _run(
    block_ref: weakref.ref[nn.Module],
    compiled: Callable[..., Any],
    places: Places,
    context: Context | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A block's forward. With other tensors in the place of its parameters (torch.func.functional_call) it runs op by
    op: the compiled backward would take their gradients for the parameters' own."""
    block = block_ref()
    assert block is not None, "a block is called through itself"
    if any(params.get(name) is not param for params, name, param in places):
        return torch_private.class_call(block, *args, **kwargs)
    if context is None:
        return compiled(block, *args, **kwargs)
    with context(places):
        return compiled(block, *args, **kwargs)
