"""What hooks hold of a compiled model does not keep it alive."""

from __future__ import annotations

import weakref

from zc.engine.core import weakly


class _Owner:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def add(self, *args: object) -> int:
        self.calls.append(args)
        return len(self.calls)


def test_a_weak_callback_calls_the_method_while_its_object_lives() -> None:
    owner = _Owner()
    call, calls, reference = weakly(owner.add), owner.calls, weakref.ref(owner)
    assert call(1, "two") == 1 and calls == [(1, "two")]
    del owner
    assert reference() is None, "nothing but the callback is left"
    assert call(3) is None and calls == [(1, "two")]
