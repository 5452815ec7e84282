"""``optimizer.state`` under zc as the dict that it is in plain PyTorch: parameters with and without a state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import mlp
from torch import nn

import zc

Optimizers = tuple[list[nn.Parameter], torch.optim.Optimizer]


def trained(*, is_zc: bool, updates: int) -> Optimizers:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if is_zc:
        zc.compile(model, optimizer, backend="eager")
    for _ in range(updates):
        model(torch.ones(3, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters()], optimizer


@pytest.fixture(params=[0, 1])
def both(request: pytest.FixtureRequest) -> list[Optimizers]:
    """Of zc, and plain: after so many updates."""
    return [trained(is_zc=is_zc, updates=request.param) for is_zc in (True, False)]


def plain(value: Any) -> Any:
    """Without what is zc's."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return torch.as_tensor(value).flatten().tolist() if isinstance(value, torch.Tensor) else value


def test_a_state_is_popped_where_there_is_one(both: list[Optimizers]) -> None:
    """`pop` with a default raised KeyError for a parameter without a state, and returned an empty one for another."""
    popped = [plain(optimizer.state.pop(params[0], "none")) for params, optimizer in both]
    assert popped[0] == popped[1]
    again = [plain(optimizer.state.pop(params[0], "none")) for params, optimizer in both]
    assert again == ["none", "none"]
    for params, optimizer in both:
        with pytest.raises(KeyError):
            optimizer.state.pop(params[0])


def test_all_states_are_popped_from_the_last(both: list[Optimizers]) -> None:
    seen: list[list[Any]] = []
    for params, optimizer in both:
        places = {id(param): k for k, param in enumerate(params)}
        seen.append([])
        while optimizer.state:
            param, state = optimizer.state.popitem()
            seen[-1].append((places[id(param)], plain(state)))
        with pytest.raises(KeyError):
            optimizer.state.popitem()
    assert seen[0] == seen[1]


def test_a_default_is_set_where_there_is_none(both: list[Optimizers]) -> None:
    """`setdefault` returned an empty state, and set nothing."""
    for params, optimizer in both:
        optimizer.state.setdefault(params[0], {"momentum_buffer": torch.ones_like(params[0])})
    states = [plain(optimizer.state[params[0]]) for params, optimizer in both]
    assert states[0] == states[1]


def test_what_is_written_into_a_replaced_state_stays_there(both: list[Optimizers]) -> None:
    """Of each: the state that was replaced, which the caller writes to, and the one in its place."""
    states = []
    for params, optimizer in both:
        replaced = optimizer.state[params[0]]
        optimizer.state[params[0]] = {"momentum_buffer": torch.ones_like(params[0])}
        replaced["momentum_buffer"] = torch.zeros_like(params[0])
        states.append([plain(replaced), plain(optimizer.state[params[0]])])
    assert states[0] == states[1]


def test_a_state_of_another_shape_is_refused_by_name() -> None:
    """The step raised torch's error, which names no parameter, and on a rank whose slice had that shape it did not."""
    (param, *_), optimizer = trained(is_zc=True, updates=1)
    before = plain(optimizer.state[param])
    for wrong in ({"momentum_buffer": torch.ones(3)}, {"momentum_buffer": param.detach().flatten()}):
        for write in (optimizer.state[param].update, lambda items: optimizer.state.__setitem__(param, items)):
            with pytest.raises(zc.ZcError, match=r"'momentum_buffer' of 0.weight was given .* have \(\d+, 16\)"):
                write(wrong)
    with pytest.raises(TypeError):
        optimizer.state[param] = None
    kept, optimizer.state = optimizer.state, {param: wrong}  # type: ignore[assignment]
    with pytest.raises(zc.ZcError, match=r"'momentum_buffer' of 0.weight was given"):
        optimizer.step()  # cleared the state that was to be replaced
    optimizer.state = kept
    assert plain(optimizer.state[param]) == before


def test_a_loaded_state_takes_the_place_of_a_later_one() -> None:
    """torch's load_state_dict brings groups and state by ``__setstate__``, to an optimizer that has gone on."""
    states = []
    for is_zc in (True, False):
        params, optimizer = trained(is_zc=is_zc, updates=1)
        saved = copy.deepcopy(optimizer.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        for param in params:
            optimizer.state[param]["momentum_buffer"].fill_(7.0)
        optimizer.load_state_dict(saved)
        states.append([optimizer.param_groups[0]["lr"], *(plain(optimizer.state[param]) for param in params)])
    assert states[0] == states[1]
