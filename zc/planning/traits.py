"""What zc knows of torch's optimizers, one record a class: a new one is entered here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zc.planning.layout import Rule

UNKNOWN_STATES = 2  # of a class that is not in the table: it counts as Adam
_CUT_ANYWHERE, _WHOLE = Rule(), Rule(whole=True)
_ADAM = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@dataclass(frozen=True)
class Traits:
    """A class of torch.optim.

    Attributes:
        num_states: how many fp32 tensors of a parameter's size it keeps; None: it keeps others, so that `zc.plan` does
            not take it.
        rule: what its update requires of the layout. By default it reads nothing of an element but its gradient and
            state, so a shard may cut a parameter anywhere.
        tensors: names of the tensors of a parameter's size that it may keep, those of some options included.
        sums: names of tensors that have one element along a dimension, and that dimension.
        has_fused: torch has one pass over a parameter for it on the CPU.
        refusal: why it can't work on shards, with a way out; None: it can.
    """

    num_states: int | None
    tensors: tuple[str, ...] = ()
    rule: Rule = _CUT_ANYWHERE
    sums: Mapping[str, int] = field(default_factory=dict)
    has_fused: bool = False
    refusal: str | None = None

    @property
    def is_elementwise(self) -> bool:
        return not self.rule.whole

    def shape_of(self, key: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the tensor ``key`` that it keeps for a parameter of this ``shape``; None: it keeps no such."""
        if key in self.tensors:
            return shape
        if key not in self.sums or len(shape) < 2:
            return None
        dim = self.sums[key] % len(shape)
        return (*shape[:dim], 1, *shape[dim + 1 :])


TRAITS = {
    "SGD": Traits(0, ("momentum_buffer",), has_fused=True),
    "Adam": Traits(2, _ADAM, has_fused=True),
    "AdamW": Traits(2, _ADAM, has_fused=True),
    "Adamax": Traits(2, ("exp_avg", "exp_inf")),
    "NAdam": Traits(2, ("exp_avg", "exp_avg_sq")),
    "RAdam": Traits(2, ("exp_avg", "exp_avg_sq")),
    "RMSprop": Traits(1, ("square_avg", "momentum_buffer", "grad_avg")),
    "Rprop": Traits(2, ("prev", "step_size")),
    "Adagrad": Traits(1, ("sum",)),
    "Adadelta": Traits(2, ("square_avg", "acc_delta")),
    "ASGD": Traits(1, ("ax",)),
    "Muon": Traits(1, ("momentum_buffer",), Rule(whole=True, cost="newton_schulz")),
    "Adafactor": Traits(None, ("variance",), _WHOLE, {"row_var": -1, "col_var": -2}),
    "LBFGS": Traits(
        None, rule=_WHOLE, refusal="it evaluates its closure several times, and keeps one history over all parameters. "
        "Use a first-order optimizer here, or DistributedDataParallel for LBFGS",
    ),
    "SparseAdam": Traits(
        None, rule=_WHOLE, refusal="it takes sparse gradients, zc reduces dense ones. Use Adam, which moves rows "
        "without a gradient as well, and embeddings made with sparse=False",
    ),
}  # fmt: skip


def elementwise_names() -> list[str]:
    return [name for name, traits in TRAITS.items() if traits.is_elementwise]


def counted_names() -> list[str]:
    """Those whose states `zc.plan` can count."""
    return [name for name, traits in TRAITS.items() if traits.num_states is not None]


def num_states(name: str) -> int:
    """How many fp32 tensors of a parameter's size the class keeps, by its name; those of an unknown one are a guess."""
    known = TRAITS[name].num_states if name in TRAITS else None
    return UNKNOWN_STATES if known is None else known
