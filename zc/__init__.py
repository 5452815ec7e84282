"""zc: ZeRO, compiled. ``model, optimizer = zc.compile(model, optimizer)`` and the loop stays as it is."""

from zc.api import clip_grad_norm_, compile, full_grad, no_sync, persistent_nbytes  # noqa: A004
from zc.checkpoint import Saving, latest, load, load_state_dict, save, state_dict
from zc.errors import CheckpointError, PassError, PlanError, RaceError, RankMismatchError, UncoveredGradientError, ZcError
from zc.explain import explain
from zc.passes.verify import Verdict, verify

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "PassError",
    "PlanError",
    "RaceError",
    "RankMismatchError",
    "Saving",
    "UncoveredGradientError",
    "Verdict",
    "ZcError",
    "__version__",
    "clip_grad_norm_",
    "compile",
    "explain",
    "full_grad",
    "latest",
    "load",
    "load_state_dict",
    "no_sync",
    "persistent_nbytes",
    "save",
    "state_dict",
    "verify",
]
