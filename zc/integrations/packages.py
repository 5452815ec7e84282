"""What an integration needs that zc does not install by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import Any

from zc.errors import ZcError


def needed(module: str, extra: str) -> Any:
    """The module. Raises ImportError that names the extra which installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(
            f"zc.integrations.{extra} needs {module}: pip install 'zero-compile[{extra}]'", name=module
        ) from error


def seam(cls: type, distribution: str, seen: str, names: Mapping[str, str]) -> None:
    """Raises ZcError where ``cls`` lacks a private method that we override: overridden in vain, it would lose state or
    numbers without a word. ``names``: with what each is for; ``seen``: the version that had them all."""
    for name, purpose in names.items():
        if not isinstance(getattr(cls, name, None), Callable):  # type: ignore[arg-type]
            raise ZcError(
                f"{cls.__name__} of {distribution} {metadata.version(distribution)} has no {name}, through which zc "
                f"{purpose}: it was there in {distribution} {seen}. Install that version"
            )
