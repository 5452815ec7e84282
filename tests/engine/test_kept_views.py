"""Views of weights that a forward of stage 3 has made, or the program before zc.compile, and that it reads after an
update. In plain PyTorch they have the new values; here they are refused by name, or said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zc

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Keeping(nn.Module):
    """``before``: a view that the forward has kept, made by ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.before = nn.Linear(8, 4), how, []

    @torch.compiler.disable
    def keep(self) -> None:
        weight = self.layer.weight
        made = {"detach": weight.detach, "data": lambda: weight.data, "row": lambda: weight[1], "t": weight.t}
        self.before.append(made[self.how]())

    def forward(self, x: Tensor) -> Tensor:
        self.keep()
        out: Tensor = self.layer(x)
        return out


def trained(net: Keeping, backend: str) -> tuple[Keeping, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    zc.compile(net, optimizer, stage=3, backend=backend)
    net(X).square().mean().backward()
    return net, optimizer


@pytest.mark.parametrize("how", ["detach", "data", "row", "t"])
def test_a_view_that_outlives_an_update_is_refused_by_name(how: str) -> None:
    net, optimizer = trained(Keeping(how), "eager")
    wanted = net.layer.weight.detach().sum() if how != "row" else net.layer.weight[1].sum()
    assert net.before[0].sum() == wanted, "before the update it has the values"
    kept, copy = net.before[0], net.before[0].clone()
    with pytest.warns(UserWarning, match="shares memory with layer.weight outlives the update") as warned:
        optimizer.step()
    assert {record.filename for record in warned} == {__file__}, "a warning stands at a line of the program"
    assert kept.shape == copy.shape, "what reads no element is answered"
    with pytest.raises(zc.ZcError, match=r"shape \(4, 8\) that was made before the last update"):
        kept.sum()
    assert copy.sum() == wanted
    optimizer.zero_grad()
    net(X).square().mean().backward()  # the next forward makes it again
    assert net.before[1].sum().isfinite()
    zc.close(net)


def test_it_is_refused_by_name_in_inference_mode() -> None:
    """"Inference tensors do not track version counter": the question, on the meta device, met that mode."""
    net, optimizer = trained(Keeping("detach"), "eager")
    with pytest.warns(UserWarning, match="shares memory with layer.weight outlives the update"):
        optimizer.step()
    with torch.inference_mode(), pytest.raises(zc.ZcError, match="that was made before the last update"):
        net.before[0].mean()
    zc.close(net)


def test_a_view_that_nobody_keeps_is_nobodys_matter(recwarn: pytest.WarningsRecorder) -> None:
    net, optimizer = trained(Keeping("detach"), "eager")
    for _ in range(2):
        net.before.clear()
        optimizer.step()
        optimizer.zero_grad()
        net(X).square().mean().backward()
    assert not [str(w.message) for w in recwarn if "outlives the update" in str(w.message)]
    zc.close(net)


def test_code_between_compiled_parts_is_told() -> None:
    """It finds plain parameters, so a view is told from nothing else."""
    net, optimizer = trained(Keeping("detach"), "aot_eager")
    with pytest.warns(UserWarning, match="shares memory with layer.weight outlives the update"):
        optimizer.step()
    assert "outlives the update" in str(zc.explain(net))
    zc.close(net)


def delayed(**options: Any) -> list[Tensor]:
    """The weights, where each backward goes through the forward of before the update before it (PipeDream)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    if options:
        zc.compile(net, optimizer, backend="eager", **options)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        before = net(X).square().mean()
        for _ in range(3):
            loss = net(X).square().mean()
            before.backward()
            optimizer.step()
            optimizer.zero_grad()
            before = loss
    weights = list(zc.full_state_dict(net).values()) if options else list(net.state_dict().values())
    zc.close(net)
    return weights


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 2}, {"stage": 2, "offload": "cpu"}, {"stage": 3}])
def test_what_autograd_has_saved_is_copied_before_an_update_where_torch_does_so(options: dict[str, Any]) -> None:
    """An update writes flat_param, which that mode does not see: stages 1 and 2 took the new weights, in silence."""
    for one, other in zip(delayed(), delayed(**options), strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)


def flattened(net: nn.Module) -> Tensor:
    flat = nn.utils.parameters_to_vector(net.parameters()).detach()
    nn.utils.vector_to_parameters(flat, net.parameters())
    return flat


def tied(net: nn.Module) -> Tensor:
    net[1].weight = net[0].weight
    return nn.utils.parameters_to_vector(net.parameters())


HELD: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "data": (lambda net: net[1].weight.data, "1.weight lay"),
    "state_dict": (nn.Module.state_dict, "0.weight, 0.bias, 1.weight, 1.bias lay"),
    "flat tensor": (flattened, "0.weight, 0.bias, 1.weight, 1.bias lay"),
    "flat tensor that is dropped": (lambda net: flattened(net).sum(), ""),
    "tied": (tied, ""),
    "spectral_norm": (lambda net: nn.utils.spectral_norm(net[0]), ""),
    "backward": (lambda net: net(X).sum().backward() or net.zero_grad(), ""),
}


@pytest.mark.parametrize("case", HELD)
def test_what_held_a_weights_memory_before_zc_compile_is_said(case: str) -> None:
    """It follows the updates in plain PyTorch. Here it kept the first values, in silence."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    make_tensor, said = HELD[case]
    kept = make_tensor(net)
    zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), backend="eager")
    notes = zc.explain(net).sections["notes"]
    assert (f"holds the memory in which {said}" in notes) == bool(said) == ("holds the memory" in notes), notes
    del kept
    zc.close(net)
