"""The loop through zc: on a copy, on all ranks, as a program would run it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zc.checking.copies import copied, names_of
from zc.checking.loop import Key, Loop, Moment, kept
from zc.checking.values import Randomness, map_tensors
from zc.errors import CheckpointError
from zc.optim.assignment import given_in, parts_of


def run(loop: Loop, backend: str, advance: Callable[[], None]) -> Iterator[Moment]:
    """One moment for each update. What one rank alone knows stands under its number; optimizer states on rank 0."""
    import zc  # what a program calls, once all of it is there

    with contextlib.ExitStack() as stack:
        options = loop.options_for(backend)
        if options.get("offload_dir") is not None:  # the program's own files are not touched
            options["offload_dir"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="zc-check-"))
        model, optimizer = copied(loop.model, loop.optimizer)
        names = names_of(model, optimizer)
        first = {name: kept(param) for name, param in model.named_parameters() if param.requires_grad}
        if loop.config.param_dtype is not None:
            first = {name: weight.to(loop.config.param_dtype) for name, weight in first.items()}
        zc.compile(model, optimizer, **options)
        stack.callback(zc.close, model)
        generators = Randomness(loop.device)
        generators.set(loop.random[loop.rank])
        for number in range(loop.num_updates):
            moment = Moment()
            for k in range(loop.microbatches):
                is_last = k + 1 == loop.microbatches
                with contextlib.nullcontext() if is_last else zc.no_sync(model):
                    batch = map_tensors(loop.batch(loop.rank, number, k), torch.clone)
                    loss = loop.loss(model, batch)
                    loss.backward()  # type: ignore[no-untyped-call]
                moment.values[Key("loss", f"microbatch {k}", loop.rank)] = float(loss.detach())
                advance()
            for name, grad in zc.full_grad(model).items():
                moment.values[Key("gradient", name)] = None if grad is None else kept(grad)
            for name, buffer in model.named_buffers():
                moment.values[Key("buffer", name, loop.rank)] = kept(buffer)
            loop.update(model, optimizer)
            for each in given_in(optimizer):
                each.zero_grad()
            with zc.whole_parameters(model), torch.no_grad():
                moment.add_weights({n: p for n, p in model.named_parameters() if p.requires_grad}, first)
            _add_state(moment, model, optimizer, names)
            yield moment


def _add_state(moment: Moment, model: nn.Module, optimizer: Any, names: list[dict[int, str]]) -> None:
    import zc

    try:
        states = zc.full_optimizer_state(model, optimizer)
    except CheckpointError as error:  # on all ranks: parts of a state that no single parameter has
        moment.notes.append(f"optimizer states were not compared: {error}")
        return
    if states is not None:
        moment.add_state(parts_of(optimizer, states) or [states], names)
