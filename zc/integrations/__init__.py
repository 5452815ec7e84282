"""zc inside other people's loops. Nothing here is imported by zc itself; each module needs its framework.

docs/integrations.md has a script for each, and what is refused. The two functions here import and check the packages,
which zc does not install.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import Any

from zc.errors import ZcError


def needed(module: str, extra: str) -> Any:
    """Imports the module. Raises an ImportError that names the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(
            f"zc.integrations.{extra} needs {module}: pip install 'zero-compile[{extra}]'", name=module
        ) from error


def seam(cls: type, distribution: str, seen: str, names: Mapping[str, str]) -> None:
    """Raises ZcError if ``cls`` lacks a private method that zc overrides. Without this check, state or results would
    silently be lost. ``names`` gives each method's purpose; ``seen`` is the version that had all of them."""
    for name, purpose in names.items():
        if not isinstance(getattr(cls, name, None), Callable):  # type: ignore[arg-type]
            raise ZcError(
                f"{cls.__name__} of {distribution} {metadata.version(distribution)} has no {name}, through which zc "
                f"{purpose}: it was there in {distribution} {seen}. Install that version"
            )
