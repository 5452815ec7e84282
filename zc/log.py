"""The logger ``zc``. ``ZC_LOG=debug`` (or info, warning) in the environment prints one line per event, with the rank:
it follows each bucket from its gradients to its gathered weights. Without it nothing is configured, and the program's
own logging setup decides."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger("zc")


def tell(text: str) -> None:
    """Prints one line on stderr for a person who waits. Prints nothing with ZC_LOG, which decides by its level."""
    if not os.environ.get("ZC_LOG"):
        print(f"zc: {text}", file=sys.stderr, flush=True)


def configure() -> None:
    """Reads ZC_LOG. Raises ValueError for a level that logging does not know."""
    level = os.environ.get("ZC_LOG", "").upper()
    if not level:
        return
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"ZC_LOG must be one of debug, info, warning, error, got {os.environ['ZC_LOG']!r}")
    if not log.handlers:
        handler = logging.StreamHandler()
        rank = os.environ.get("RANK", "0")
        line_format = f"[rank {rank}] %(relativeCreated)9.1f ms %(threadName)s zc: %(message)s"
        handler.setFormatter(logging.Formatter(line_format))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(level)
