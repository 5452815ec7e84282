"""How the record of a node (`zc.schedule.spec`) stands in its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
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


class _Type(NamedTuple):
    """How a field of one type is read from an argument, and written as one."""

    read: Callable[[Any], Any]  # TypeError, ValueError: the argument does not look like that
    write: Callable[[Any], Any] = lambda value: value


_TYPES = {
    "int": _Type(_of(int)),
    "str": _Type(_of(str)),
    "tuple[int, ...]": _Type(_all(_of(int))),
    "Extent": _Type(_span),
    "Spans": _Type(_all(_span)),
    "EventName": _Type(_event),
    "Buffer": _Type(lambda name: Buffer.named(_of(str)(name)), str),
    "fx.Node": _Type(_of(fx.Node)),
    "Nodes": _Type(_all(_of(fx.Node)), list),
    "Operands": _Type(_all(_of(fx.Node))),  # one argument each
}


class _Layout(NamedTuple):
    """Fields by name. Keywords are left out where they have their default."""

    positional: dict[str, _Type]
    keywords: dict[str, _Type]
    defaults: dict[str, Any]  # of keywords; those that lack one are None
    has_operands: bool  # in the last positional field


_LAYOUTS: dict[type[Op], _Layout] = {}  # made when a kind is first used


def _layout(kind: type[Op]) -> _Layout:
    if kind not in _LAYOUTS:
        types = {f.name: str(f.type) for f in fields(kind)}
        positional = [f.name for f in fields(kind) if f.default is MISSING and not f.kw_only]
        _LAYOUTS[kind] = _Layout(
            {name: _TYPES[types[name]] for name in positional},
            {name: _TYPES[text.removesuffix(" | None")] for name, text in types.items() if name not in positional},
            {f.name: f.default for f in fields(kind) if f.default is not MISSING},
            types[positional[-1]] == "Operands",
        )
    return _LAYOUTS[kind]


def read(kind: type[Op], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Op:
    """The record of a node with these arguments. TypeError, ValueError: no node of this kind has them."""
    layout = _layout(kind)
    names = list(layout.positional)
    if layout.has_operands:
        args = (*args[: len(names) - 1], args[len(names) - 1 :])
    elif len(args) != len(names):
        raise ValueError(f"{len(args)} arguments, for {', '.join(names)}")
    types = layout.positional | layout.keywords
    items: dict[str, Any] = {}
    for name, item in (*zip(names, args, strict=False), *kwargs.items()):
        try:
            items[name] = types[name].read(item)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}={item!r}: {error}") from None
    return kind(**items)


def written(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node with this record."""
    layout = _layout(type(op))
    args = [type_.write(getattr(op, name)) for name, type_ in layout.positional.items()]
    if layout.has_operands:
        args += args.pop()
    items = ((name, type_, getattr(op, name)) for name, type_ in layout.keywords.items())
    return tuple(args), {name: t.write(item) for name, t, item in items if item != layout.defaults.get(name)}
