"""Notices a parameter that another one has replaced under its name: a new layer in the place of an old one, a resized
embedding, ``load_state_dict(assign=True)``. The new one has no place in a bucket, so nothing would reduce its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

from zc import torch_private
from zc.errors import ZcError

Places = Sequence[tuple[dict[str, Any], str, nn.Parameter]]  # of parameters: a module's dict, the key in it, its value

BlockPlaces = tuple[weakref.ref[nn.Module], list[tuple[dict[str, Any], str, nn.Parameter]]]  # of one block


class Names:
    """A model's parameters by name, as `compile` or `recompile` has found them. The model keeps this object, since it
    refers to the model's modules; a runtime that did so could keep the model alive. ``placed``: those in buckets."""

    def __init__(self, model: nn.Module, placed: Mapping[str, nn.Parameter]) -> None:
        self._model, self._placed = weakref.ref(model), placed
        self._params = dict(model.named_parameters(remove_duplicate=False))
        self._remember(model)

    def _remember(self, model: nn.Module) -> None:
        self._dicts = torch_private.registered_in(model)
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))

    def check(self) -> None:
        """Raises ZcError for a parameter that was replaced. Called at every boundary, so that what has not changed
        costs some 30 ns for a module or parameter: the interpreter runs no code of ours for it."""
        if all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._values)):
            return
        model = self._model()
        assert model is not None, "the model keeps this object"
        placed = {id(param) for param in self._placed.values()}
        for name, now in model.named_parameters(remove_duplicate=False):
            before = self._params.get(name, now)
            is_lost = id(before) in placed or (now.requires_grad and id(now) not in placed)
            if before is not now and is_lost:
                what = (
                    "the plan has it under another name. Call"
                    if id(now) in placed
                    else "it has no place in a bucket (a new layer or a resized embedding, "
                    "load_state_dict(assign=True), or a tensor set by hand). Give it to an optimizer by "
                    "add_param_group, and call"
                )
                raise ZcError(
                    f"parameter {name} is another one now: it was {_text(before)}, and is {_text(now)}; {what} "
                    "zc.recompile(model) on all ranks: the old one's place and optimizer state go. Or put the old one "
                    "back"
                )
        self._remember(model)  # modules came, went or moved


def _text(param: nn.Parameter) -> str:
    return f"{tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ' without a gradient'}"
