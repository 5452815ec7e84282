"""How the record of a node (`zc.schedule.spec`) stands in its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from zc.schedule.buffer import Buffer, carried_by

if TYPE_CHECKING:
    from zc.schedule.spec import Op


def _of(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind:  # a bool is no number
            raise TypeError(f"no {kind.__name__}")
        return value

    return check


def _all(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def check_all(values: Any) -> Any:
        if not isinstance(values, (list, tuple)):
            raise TypeError("no tuple")
        return tuple(check(value) for value in values)

    return check_all


def _span(value: Any) -> Any:
    start, stop = _all(_of(int))(value)
    return start, stop


def _event(name: Any) -> Any:
    carried_by(_of(str)(name))
    return name


class _Field(NamedTuple):
    read: Callable[[Any], Any]  # TypeError, ValueError: it may not look like that
    write: Callable[[Any], Any] = lambda value: value


_NUMBER, _TEXT, _NODE = _Field(_of(int)), _Field(_of(str)), _Field(_of(fx.Node))
_NODES, _BUFFER = _Field(_all(_of(fx.Node)), list), _Field(lambda name: Buffer.named(_of(str)(name)), str)
_FIELDS = {
    "bucket": _NUMBER, "slot": _NUMBER, "start": _NUMBER, "stop": _NUMBER, "slots": _Field(_all(_of(int))),
    "buffer": _BUFFER, "dst": _BUFFER, "src": _BUFFER, "via": _BUFFER, "spans": _Field(_all(_span)),
    "grad": _NODE, "work": _NODE, "grads": _NODES, "inputs": _NODES, "values": _NODES, "key": _TEXT, "how": _TEXT,
    "among": _TEXT,
    "event": _Field(_event), "places": _Field(_all(_span)), "use": _NUMBER, "buckets": _Field(_all(_of(int))),
}  # fmt: skip
_EACH = ("inputs", "values")  # one argument each
_KEYWORDS = ("spans", "how", "among")  # left out where they are None


def read(kind: type[Op], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Op:
    """The record of a node with these arguments. TypeError, ValueError: no node of this kind has them."""
    names = [f.name for f in fields(kind) if f.name not in _KEYWORDS]
    items: dict[str, Any] = dict(zip(names, args, strict=False))
    if names[-1] in _EACH:
        items[names[-1]] = tuple(args[len(names) - 1 :])
    elif len(args) != len(names):
        raise ValueError(f"{len(args)} arguments, for {', '.join(names)}")
    for name, item in (*items.items(), *kwargs.items()):
        try:
            items[name] = _FIELDS[name].read(item)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}={item!r}: {error}") from None
    return kind(**items)


def written(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node with this record."""
    args: list[Any] = []
    kwargs = {name: item for name, item in vars(op).items() if name in _KEYWORDS and item is not None}
    for name, item in vars(op).items():
        if name in _EACH:
            args += item
        elif name not in _KEYWORDS:
            args.append(_FIELDS[name].write(item))
    return tuple(args), kwargs
