"""Each private name of torch that zc relies on, by itself and in under a second, on whatever torch is installed.

Where a new torch breaks one, the failure says which function of zc.torch_private (or zc.kernels._private) relies on
what. Nothing here trains: what zc makes of these names is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch

TESTED: set[str] = set()


def contract(names: str, relies_on: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test of these functions of ours; a failure says on what they rely."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        TESTED.update(names.split())

        @wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  (whatever it is, it says that)
                pytest.fail(f"torch {torch.__version__} has changed {relies_on}, on which {names} relies: {error!r}")

        return run

    return decorate
