"""Stage 3: what the program writes into whole parameters reaches the shards, or is refused by name."""

from __future__ import annotations

import torch
from test_whole_block import X, compiled
from torch import Tensor, nn

import zc


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.mul_(2)
        out: Tensor = self.layer(x)
        return out


def test_a_write_in_forward_is_there_before_the_update() -> None:
    """For whoever reads the shards: zc.full_state_dict, model.state_dict(), zc.state_dict, zc.close."""
    net, optimizer = compiled(Doubling())
    wanted = 2 * zc.full_state_dict(net)["layer.weight"]
    net(X)
    assert zc.full_state_dict(net)["layer.weight"].equal(wanted)
    net(X)
    assert net.state_dict()["layer.weight"].equal(2 * wanted)
    with torch.no_grad():
        net(X)
    assert zc.state_dict(net, optimizer)["model"]["layer.weight"].local.equal((4 * wanted).flatten())
    with torch.no_grad():
        net(X)
    with zc.whole_parameters(net):
        assert net.layer.weight.equal(8 * wanted)
    net(X)
    zc.close(net)
    assert net.layer.weight.equal(16 * wanted)


def test_a_write_between_backward_and_step_counts() -> None:
    """Code that is not compiled has read the weight in the forward, so it is whole to the update."""
    net, optimizer = compiled()
    twin = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    twin.load_state_dict(zc.full_state_dict(net))
    descent = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        for model, its, x in ((net, optimizer, X), (twin, descent, X.double())):
            model(x).square().mean().backward()
            with torch.no_grad():
                model[0].weight.data.clamp_(-0.1, 0.1)
                model[2].weight.mul_(0.5)
            its.step()
            its.zero_grad()
    for key, value in zc.full_state_dict(net).items():
        assert torch.allclose(value.double(), twin.state_dict()[key], rtol=1e-5, atol=1e-7), key
    zc.close(net)
