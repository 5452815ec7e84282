"""Keys of dicts as text, and empty dicts, in a state that DCP writes.

DCP flattens dicts: all of their keys become text, so 0 could not be told from "0", and of an empty dict nothing is
left. Here other keys become text that says what they were::

    {0: a, (1, "x"): b, "c": {}}
    {"zc key: 0": a, "zc key: (1, 'x')": b, "c": {"zc key: {}": None}}        as DCP gets it
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from zc.errors import CheckpointError

_MARK = "zc key: "
_EMPTY = "zc key: {}"


def with_text_keys(what: str, value: Any) -> Any:
    """A nested value as DCP keeps it. Raises CheckpointError, with ``what``, where a key can't be told from its text;
    lists and dicts are looked into, as DCP does."""
    if isinstance(value, Mapping):
        return {_text_of(what, key): with_text_keys(what, item) for key, item in value.items()} or {_EMPTY: None}
    return [with_text_keys(what, item) for item in value] if isinstance(value, list) else value


def with_own_keys(value: Any) -> Any:
    """What `with_text_keys` was given, or an equal copy of what another program has written."""
    if isinstance(value, Mapping):
        return {} if set(value) == {_EMPTY} else {own_key(key): with_own_keys(item) for key, item in value.items()}
    return [with_own_keys(item) for item in value] if isinstance(value, list) else value


def own_key(text: Any) -> Any:
    """The key that became this text."""
    if isinstance(text, str) and text.startswith(_MARK):
        try:
            key = ast.literal_eval(text.removeprefix(_MARK))
            hash(key)
        except (ValueError, SyntaxError, TypeError):  # another program's own
            return text
        return key
    return text


def _text_of(what: str, key: Any) -> str:
    if type(key) is str and not key.startswith(_MARK):
        return key
    text = f"{_MARK}{key!r}"
    if not _is_same(own_key(text), key):
        raise CheckpointError(
            f"{what} has the key {key!r}, a {type(key).__name__}: zc saves keys that are text, numbers, or tuples of "
            "these"
        )
    return text


def _is_same(one: Any, other: Any) -> bool:
    """Also in type: True is no 1."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)
