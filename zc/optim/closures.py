"""``optimizer.step(closure)``: zc runs the closure once, before the step, and then finishes the gradients.

torch's optimizers call the closure at the start of their step, which is too late to finish gradients. So zc calls it
first, and the optimizer gets a function that only returns the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.optim import Optimizer

from zc.errors import PlanError, ZcError
from zc.optim.kinds import is_known
from zc.optim.trials import num_closure_calls

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of ``step``, of which the optimizer is the first."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


class Closures:
    """Runs the closures that one optimizer's ``step`` gets."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._name = optimizer, type(optimizer).__name__

    @cached_property
    def _num_calls(self) -> int | None:
        """How often ``step`` calls its closure; None where that can't be tried."""
        return 1 if is_known(self._optimizer) else num_closure_calls(self._optimizer)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Calls the closure among the arguments of ``step``, of which the optimizer is the first. Returns the arguments
        for the real step.

        Raises PlanError if the optimizer does not call its closure exactly once; nothing has changed.
        """
        closure = closure_in(args, kwargs)
        if closure is None:
            return args, kwargs
        if self._num_calls != 1:
            times = "can't be tried on small data" if self._num_calls is None else f"calls it {self._num_calls} times"
            raise PlanError(
                f"{self._name}.step was given a closure, and {times}: zc finishes the gradients between the closure "
                "and the update, so it takes optimizers that call it once. Call the closure yourself, then step()"
            )
        with torch.enable_grad():
            loss = closure()
        answer = self._once(loss)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": answer}
        return (args[0], answer, *args[2:]), kwargs

    def _once(self, loss: Any) -> Callable[[], Any]:
        """A closure that returns ``loss``, and may be called once."""
        is_called = False

        def call() -> Any:
            nonlocal is_called
            if is_called:
                raise ZcError(
                    f"{self._name}.step called its closure a second time, after an update of this rank's weights: zc "
                    "takes optimizers that call it once"
                )
            is_called = True
            return loss

        return call
