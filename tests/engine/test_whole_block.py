"""Stage 3: tensors that leave `zc.whole_parameters`, or come in there, keep their memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import zc
from zc.weights.whole_params import WholeBucket, WholeParams

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def compiled(net: nn.Module | None = None, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = net or nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    zc.compile(net, optimizer, stage=3, **{"backend": "eager", **options})
    return net, optimizer


def test_a_tensor_of_another_kind_is_refused_and_changes_nothing() -> None:
    net, optimizer = compiled()
    state = zc.full_state_dict(net)
    for other in (torch.ones(8, 8, dtype=torch.float64), torch.ones(4, 8)):
        with pytest.raises(zc.ZcError, match=r"parameter 0\.weight is .* now"), zc.whole_parameters(net):
            net[0].weight.data = other
    assert all(value.equal(state[key]) for key, value in zc.full_state_dict(net).items())
    net(X).sum().backward()
    optimizer.step()
    zc.close(net)


def test_what_outlives_the_block_has_its_memory() -> None:
    net, optimizer = compiled()
    given = torch.full((8, 8), 0.5)
    with zc.whole_parameters(net):
        state = net.state_dict()
        array = net[2].weight.detach().numpy()
        net[0].weight.data = given
    wanted = {"0.weight": given.clone(), "2.weight": torch.from_numpy(array).clone()}
    kept = state["2.bias"].clone()
    for _ in range(2):
        assert zc.full_state_dict(net)["0.weight"].equal(wanted["0.weight"])
        net(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted["0.weight"] = zc.full_state_dict(net)["0.weight"]
    assert given.equal(torch.full((8, 8), 0.5)) and state["2.bias"].equal(kept)
    assert torch.from_numpy(array).equal(wanted["2.weight"]) and not state["0.weight"].equal(given)
    zc.close(net)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_loss_of_inside_may_go_backward_outside(backend: str) -> None:
    net, optimizer = compiled(backend=backend)
    twin = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    twin.load_state_dict(zc.full_state_dict(net))
    with zc.whole_parameters(net):
        loss = net(X).square().mean() + sum((p * p).sum() for p in net.parameters())
    loss.backward()
    (twin(X.double()).square().mean() + sum((p * p).sum() for p in twin.parameters())).backward()
    optimizer.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    for key, value in zc.full_state_dict(net).items():
        assert torch.allclose(value.double(), twin.state_dict()[key], rtol=1e-5, atol=1e-7), key
    zc.close(net)


def test_a_write_into_another_ranks_elements_is_seen_where_the_values_before_are_there() -> None:
    """Without them only this rank's shard can tell, or what came, where that was rounded."""
    slot = SimpleNamespace(name="weight", offset=0, stop=4)
    param, exact = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.tensor([1.0, 2.0])
    core = Mock(
        params_in=lambda bucket: [(slot, param)],
        buffers=SimpleNamespace(weight_part=lambda bucket, slot: (exact, slice(0, 2))),
    )
    bucket: Any = SimpleNamespace(index=0)
    whole = WholeParams(core, None)  # type: ignore[arg-type]
    whole.buckets[0] = WholeBucket({}, {}, None)
    came = param.detach().clone()
    assert not whole._is_written(bucket) and not whole._is_written(bucket, came)
    param.data[3] = 5.0
    assert not whole._is_written(bucket) and whole._is_written(bucket, came)
    exact.add_(0.01)
    assert whole._is_written(bucket)
    whole.buckets[0].encoded = param.detach().clone()
    assert not whole._is_written(bucket)
