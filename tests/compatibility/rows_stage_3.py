"""What stage 3 refuses of the table's rows: loops that read or write parameters outside of forward and backward, where
they have no bytes. Each gets the error that names the way out. All other rows are right in stage 3, or refused in every
stage."""

from __future__ import annotations

from collections.abc import Mapping

_BYTES = "ZcError: with stage=3"
_ERRORS = {
    _BYTES: (
        "torch.func.functional_call with other values (a look ahead)",
        "param.data = other after zc.compile",
        "param.data = other of another shape after zc.compile",
        "fp16 overflow in one element of one rank: no rank steps",
        "bf16 parameters changed by hand between steps",
        "param.data.clamp_ after each step (WGAN)",
        "averaged weights swapped in through param.data",
        "averaged weights swapped in through param.data, offload",
        "param.data.clamp_ after each step (WGAN), param_dtype=torch.bfloat16",
        "an averaged copy (EMA by deepcopy)",
        "weights changed by hand between steps (clamped)",
        "a regulariser on parameters in the loop",
        "a layer initialised anew between steps",
        "overlap_gather: fp16 overflow in one element of one rank",
        "overlap_gather: parameters read right after step()",
        "overlap_gather: parameters written right after step()",
        "slow weights every second step (lookahead), an average by _foreach_lerp_",
    ),
    "ZcError: its bytes lie in shards": ("model.to(dtype) after zc.compile",),
}  # fmt: skip
# In eager code what the forward has read stays whole to the update, and what the program writes into it arrives
_COMPILED_ERRORS = {
    _BYTES: (
        "SAM around AdamW",
        "SAM around AdamW, param_dtype=torch.bfloat16",
        "SAM around AdamW, offload",
        "a step pre-hook that adds decay to matrices, registered before zc.compile",
        "a step pre-hook that adds decay to matrices, registered after zc.compile",
        "clipping by parameter (AGC) over param_groups",
        "a norm read before a GradScaler's step that one rank's overflow skips",
        "losses weighted by learned scalars in the loop",
        "sharpness-aware minimisation: weights move up, a second backward, weights move back",
    ),
    ": compiled code of the forward writes parameter": (
        "an embedding with max_norm, the same tokens on all ranks",
        "a weight written in forward, compiled: param.data.clamp_()",
        "a weight written in forward, compiled: param.data = other",
    ),
}
_IN_STAGE_3: Mapping[str, str] = {name: error for error, names in _ERRORS.items() for name in names}
_COMPILED: Mapping[str, str] = {name: error for error, names in _COMPILED_ERRORS.items() for name in names}


def error_in_stage_3(row: str, backend: str) -> str | None:
    """What stage 3 alone raises in this row."""
    return _IN_STAGE_3.get(row) or (_COMPILED.get(row) if backend != "eager" else None)
