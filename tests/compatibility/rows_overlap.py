"""The loops that read parameters in ways of their own, with overlap_gather=True: step() returns before the updated
weights are there (megatron-lm#950). The comm stream is slowed down, so that whoever does not wait reads old weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rows_backward
import rows_params
import rows_precision
import rows_several_models
import rows_structure
import rows_tasks
import rows_unfreezing
import rows_updates
from models import GPT, Broken, Heads, PartlyEager, frozen, mlp
from rows import STEPS, Loop, Row, Script, add, plain
from torch import nn

ITEM = 10


def overlapped(name: str, loop: Loop, make: Callable[[], nn.Module] = mlp, **options: Any) -> None:
    add(Row(f"overlap_gather: {name}", ITEM, loop, make, options={"overlap_gather": True}, **options))


overlapped("evaluation between a forward and its backward", rows_updates.evaluation_inside)
overlapped("inference_mode between steps", rows_updates.inference)
overlapped("a layer under torch.compiler.disable", plain, PartlyEager)
overlapped("a graph break, a layer used on both sides", plain, Broken)
overlapped("tasks in varying order and number, a backward each", rows_tasks.varying_backwards, Heads)
overlapped("submodules called from the loop", rows_structure.submodules)
overlapped("dynamic sequence lengths", rows_structure.dynamic_lengths, rows_structure.Sequences)
overlapped("two steps on one gradient", rows_updates.two_steps)
overlapped("two models in one process", rows_several_models.two_models)
overlapped("checkpointing, reentrant", rows_params.language,
           lambda: GPT(dim=16, layers=1, use_checkpoint=True, reentrant=True))  # fmt: skip
# test_overlap_gather_of_blocks.py trains both
overlapped("blocks", rows_params.language, lambda: GPT(dim=16, layers=4), full_only=True)
overlapped("blocks, checkpointing, non-reentrant", rows_params.language,
           lambda: GPT(dim=16, layers=4, use_checkpoint=True))  # fmt: skip
overlapped("blocks, checkpointing, reentrant", rows_params.language,
           lambda: GPT(dim=16, layers=4, use_checkpoint=True, reentrant=True), full_only=True)  # fmt: skip
overlapped("a layer unfrozen, zc.recompile(model)", rows_unfreezing.unfrozen, frozen)
overlapped("an eager layer unfrozen, then trained alone", rows_unfreezing.unfrozen_eager, rows_unfreezing.partly_frozen)
overlapped("load_state_dict between steps", rows_updates.load_between)
overlapped("a backward through a forward of before the step", rows_backward.stale_forward, note=rows_backward.STALE,
           refused={"always": "RuntimeError: modified by an inplace operation"})  # fmt: skip
overlapped("fp16 overflow in one element of one rank", rows_precision.overflow, **rows_precision.FP16)


def state_dicts(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        for name, value in s.model.state_dict().items():
            s.note(f"{name} {step}", value.full_tensor() if hasattr(value, "full_tensor") else value)


def raw_reads(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        for name, param in s.model.named_parameters():
            s.note(f"{name} {step}", param.detach())


overlapped("state_dict after every step", state_dicts)
overlapped("parameters read right after step()", raw_reads, full_only=True)  # test_overlap_gather.py reads them
overlapped("parameters written right after step()", rows_updates.by_hand)
