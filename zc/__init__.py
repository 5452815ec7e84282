"""zc: ZeRO, compiled. ``model, optimizer = zc.compile(model, optimizer)`` and the loop stays as it is."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # Zope's zc.lockfile, zc.buildout and others share the name

from zc.api import (
    close,
    compile,  # noqa: A004
    recompile,
)
from zc.checking.check import check
from zc.checking.loop import Report
from zc.checkpoint.deepspeed import load_universal
from zc.checkpoint.files import latest
from zc.checkpoint.first_values import initialize
from zc.checkpoint.safetensors_files import export, load_pretrained
from zc.checkpoint.save_load import load, load_state_dict, save, state_dict
from zc.checkpoint.saving import Saving
from zc.checkpoint.stock_state import full_optimizer_state
from zc.errors import (
    CheckpointError,
    PassError,
    PlanError,
    RaceError,
    RankLostError,
    RankMismatchError,
    UncoveredGradientError,
    ZcError,
)
from zc.log import configure as _configure_log
from zc.optim.assignment import elementwise
from zc.optim.one_rank import one_rank
from zc.passes.pipeline import verify
from zc.passes.verify import Verdict
from zc.registry import (
    clip_grad_norm_,
    count,
    flush_state,
    full_grad,
    full_state_dict,
    grads_are_finite,
    iter_weights,
    join,
    no_sync,
    persistent_nbytes,
    synchronize,
    whole_parameters,
)
from zc.report.explain import explain
from zc.report.prediction import Estimate, plan
from zc.version import __version__

_configure_log()

__all__ = [
    "CheckpointError",
    "Estimate",
    "PassError",
    "PlanError",
    "RaceError",
    "RankLostError",
    "RankMismatchError",
    "Report",
    "Saving",
    "UncoveredGradientError",
    "Verdict",
    "ZcError",
    "__version__",
    "check",
    "clip_grad_norm_",
    "close",
    "compile",
    "count",
    "elementwise",
    "explain",
    "export",
    "flush_state",
    "full_grad",
    "full_optimizer_state",
    "full_state_dict",
    "grads_are_finite",
    "initialize",
    "iter_weights",
    "join",
    "latest",
    "load",
    "load_pretrained",
    "load_state_dict",
    "load_universal",
    "no_sync",
    "one_rank",
    "persistent_nbytes",
    "plan",
    "recompile",
    "save",
    "state_dict",
    "synchronize",
    "verify",
    "whole_parameters",
]
