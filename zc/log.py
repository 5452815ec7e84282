"""The logger ``zc``. ``ZC_LOG=debug`` (or info, warning) in the environment prints it, one line an event, with the
rank: each bucket is followed from its gradients to its gathered weights. Without it nothing is configured: the logger
is an ordinary one, and the program's own logging setup decides."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger("zc")


def tell(text: str) -> None:
    """One line on stderr for a person who waits; with ZC_LOG the log says what goes on, or is to be silent."""
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
        form = f"[rank {rank}] %(relativeCreated)9.1f ms %(threadName)s zc: %(message)s"
        handler.setFormatter(logging.Formatter(form))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(level)
