"""What a model that was made on the meta device has no values for yet (stage 3)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from zc import torch_private
from zc.errors import ZcError


class MetaBuffer(NamedTuple):
    """A buffer that stood on meta, by its place, and the version of the memory that it got."""

    name: str
    module: weakref.ref[nn.Module]
    key: str
    tensor: weakref.ref[Tensor]
    version: int

    def unset(self) -> Tensor | None:
        """The buffer, while nobody has written to it or put another one in its place."""
        module, tensor = self.module(), self.tensor()
        is_there = module is not None and tensor is not None and getattr(module, self.key, None) is tensor
        return tensor if is_there and tensor is not None and torch_private.version(tensor) == self.version else None


def poison(values: Tensor) -> None:
    """NaN where the dtype has it: memory that has no value yet."""
    if values.is_floating_point():
        values.fill_(float("nan"))


class Unset:
    """``params``: names, each until it is given a value. ``buffers``: (name, module, name in the module)."""

    def __init__(self, params: Iterable[str] = (), buffers: Iterable[tuple[str, nn.Module, str]] = ()) -> None:
        self.params = set(params)
        self.buffers: list[MetaBuffer] = []
        for name, module, key in buffers:
            buffer = module.get_buffer(key)
            version = torch_private.version(buffer)
            self.buffers.append(MetaBuffer(name, weakref.ref(module), key, weakref.ref(buffer), version))

    def buffers_of(self, module: nn.Module) -> list[Tensor]:
        """Those of ``module`` itself that have no value."""
        own = [each.unset() for each in self.buffers if each.module() is module]
        return [buffer for buffer in own if buffer is not None]

    def check(self, what: str) -> None:
        """Raises ZcError, which names what has no value, if there is something. ``what`` is about to read all."""
        if not self.params and not self.buffers:
            return
        self.buffers = [each for each in self.buffers if each.unset() is not None]
        for kind, names in (("parameter", sorted(self.params)), ("buffer", [each.name for each in self.buffers])):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                direct = ", or write to it in place" if kind == "buffer" else ""
                raise ZcError(
                    f"{what}: {len(names)} {kind}(s) of this model, which was made on meta, have no value yet "
                    f"({', '.join(names[:3])}{more}). Load them by zc.load_pretrained or zc.load, call "
                    f"zc.initialize(model){direct}, on all ranks"
                )
