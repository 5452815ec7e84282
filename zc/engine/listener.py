"""What the runtime tells, and asks, those around it. It knows none of them; each method does nothing where it is not
overridden."""

from __future__ import annotations


class Listener:
    """Of one compiled model: its optimizers, its buffers."""

    def before_meeting(self) -> None:
        """This rank is at the boundary of an update, and has waited for no other rank there."""

    def after_meeting(self) -> None:
        """All ranks are at the boundary."""

    def backward_ended(self) -> None:
        """The gradients of a backward are in; `Rounds.known` says of which parameters."""

    def gradients_finished(self) -> None:
        """Every rank's shard holds the mean over ranks of the sum over backwards."""

    def gradients_cleared(self, optimizer: int | None) -> None:
        """No gradient is left of one optimizer, by its number, or of all: nobody may hold a view of one."""

    def cleared_optimizers(self) -> list[int]:
        """Numbers of the optimizers whose own tensors the caller has taken the gradients of."""
        return []

    def may_be_cleared(self) -> bool:
        """The same, by a look at one tensor of each optimizer."""
        return False
