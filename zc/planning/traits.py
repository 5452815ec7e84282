"""What zc knows of torch's optimizers, one record a class: a new one is entered here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

from zc.planning.layout import Rule

UNKNOWN_STATES = 2  # of a class that is not in the table: it counts as Adam
_CUT_ANYWHERE, _WHOLE = Rule(), Rule(whole=True)


@dataclass(frozen=True)
class Traits:
    """A class of torch.optim.

    Attributes:
        num_states: how many fp32 tensors of a parameter's size it keeps; None: it keeps others, so that `zc.plan` does
            not take it.
        rule: what its update requires of the layout. By default it reads nothing of an element but its gradient and
            state, so a shard may cut a parameter anywhere.
        has_fused: torch has one pass over a parameter for it on the CPU.
        refusal: why it can't work on shards, with a way out; None: it can.
    """

    num_states: int | None
    rule: Rule = _CUT_ANYWHERE
    has_fused: bool = False
    refusal: str | None = None

    @property
    def is_elementwise(self) -> bool:
        return not self.rule.whole


TRAITS = {
    "SGD": Traits(0, has_fused=True),
    "Adam": Traits(2, has_fused=True),
    "AdamW": Traits(2, has_fused=True),
    "Adamax": Traits(2),
    "NAdam": Traits(2),
    "RAdam": Traits(2),
    "RMSprop": Traits(1),
    "Rprop": Traits(2),
    "Adagrad": Traits(1),
    "Adadelta": Traits(2),
    "ASGD": Traits(1),
    "Muon": Traits(1, Rule(whole=True, cost="newton_schulz")),
    "Adafactor": Traits(None, _WHOLE),
    "LBFGS": Traits(
        None, _WHOLE, refusal="it evaluates its closure several times, and keeps one history over all parameters. Use "
        "a first-order optimizer here, or DistributedDataParallel for LBFGS",
    ),
    "SparseAdam": Traits(
        None, _WHOLE, refusal="it takes sparse gradients, zc reduces dense ones. Use Adam, and embeddings made with "
        "sparse=False",
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
