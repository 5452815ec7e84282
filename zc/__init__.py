"""zc: ZeRO, compiled. ``model, optimizer = zc.compile(model, optimizer)`` and the loop stays as it is."""

from zc.api import clip_grad_norm_, compile, full_grad, no_sync, persistent_nbytes  # noqa: A004
from zc.errors import PassError, PlanError, RaceError, RankLostError, RankMismatchError, UncoveredGradientError, ZcError
from zc.explain import explain
from zc.log import configure as _configure_log
from zc.passes.verify import Verdict, verify

__version__ = "0.1.0"
_configure_log()

__all__ = [
    "PassError",
    "PlanError",
    "RaceError",
    "RankLostError",
    "RankMismatchError",
    "UncoveredGradientError",
    "Verdict",
    "ZcError",
    "__version__",
    "clip_grad_norm_",
    "compile",
    "explain",
    "full_grad",
    "no_sync",
    "persistent_nbytes",
    "verify",
]
