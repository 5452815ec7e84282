"""Whole states for frameworks that write one file from rank 0. They equal DDP's, so either can load the other's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from zc.checkpoint.export import gather_parts
from zc.checkpoint.save_load import load_state_dict, synchronized
from zc.checkpoint.state import state_of
from zc.registry import COMPILED
from zc.whole import full_state_dict


def shards_weights(model: nn.Module) -> bool:
    """Whether ranks keep shards of weights of ``model``: all in stage 3, frozen ones with ``shard_frozen``."""
    sharded_model = COMPILED.get(model)
    return sharded_model is not None and bool(sharded_model.runtime.plan.sharded)


@contextmanager
def names_in_state(model: nn.Module) -> Iterator[None]:
    """Inside, ``model.state_dict()`` of stage 3 has parameters without bytes, for who reads its names, not its values,
    before a ``load_state_dict``."""
    if not shards_weights(model):
        yield
        return
    vars(model)["state_dict"] = partial(model.state_dict, keep_vars=True)
    try:
        yield
    finally:
        del vars(model)["state_dict"]


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()``; on rank 0 with fp32 masters instead of narrower parameters. Every rank calls it. In stage
    3 the other ranks get an empty dict."""
    state: dict[str, Any] = full_state_dict(model) if shards_weights(model) else model.state_dict()
    sharded_model = COMPILED.get(model)
    if sharded_model is None or not any(bucket.has_master for bucket in sharded_model.runtime.plan.buckets):
        return state
    synchronized(model, sharded_model.container)
    shards = {name: {"master": shard} for name, shard in state_of(model, sharded_model)["model"].items()}
    masters: dict[str, Tensor] = {}
    for one in sharded_model.optimizers:
        whole = gather_parts(sharded_model, one, shards, "the fp32 masters")
        masters.update({name: values["master"] for name, values in whole.items()})
    names = _first_names(model)
    return {key: masters.get(names.get(key, ""), value) for key, value in state.items()}


def load_masters(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """The fp32 masters take what narrower parameters have lost of ``weights``, a state that ``model.load_state_dict``
    has loaded: with ``strict=False`` it may lack names and have others. Optimizer states, and masters that are not in
    it, stay. Every rank calls it; gradients are dropped."""
    sharded_model = COMPILED.get(model)
    if sharded_model is None or not any(bucket.has_master for bucket in sharded_model.runtime.plan.buckets):
        return
    synchronized(model, sharded_model.container)
    state, names = state_of(model, sharded_model), _first_names(model)
    state["model"].update({names[name]: value for name, value in weights.items() if name in names})
    load_state_dict(model, sharded_model.container, state)


def _first_names(model: nn.Module) -> dict[str, str]:
    """The name that each parameter's master has, by all names: a tied weight has one master."""
    firsts = {id(param): name for name, param in model.named_parameters()}
    return {name: firsts[id(param)] for name, param in model.named_parameters(remove_duplicate=False)}
