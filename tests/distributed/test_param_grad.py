"""What a ShardedGrad answers, and what the optimizer holds, against plain values."""

from __future__ import annotations

import torch
from harness import run_ranks
from torch import Tensor, nn
from training_runs import message_of

import zc


def one_row_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(200, 1, bias=False)


def _norms(rank: int, world_size: int) -> dict[str, object]:
    model = one_row_model()
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager", stage=2)
    model(torch.full((2, 200), 1.0 + rank)).sum().backward()
    grad = model.weight.grad
    assert grad is not None
    with model.no_sync():
        early = message_of(lambda: grad.norm(dim=1))
    norms = {
        "early": early,
        "all": grad.norm(),
        "all dims": grad.norm(dim=(0, 1)),
        "kept": grad.norm(dim=(0, 1), keepdim=True),
        "float64": torch.linalg.vector_norm(grad, dtype=torch.float64),
        "rows": grad.norm(dim=1, keepdim=True),
        "columns": grad.norm(dim=0),
        "places": grad.max(dim=-1).values,
    }
    factor = torch.full((1, 1), 0.5)
    return norms | {"halved": grad.mul_(factor).full_tensor(), "doubled": grad.div_(factor).full_tensor()}


def test_a_norm_is_of_all_elements_or_of_rows_and_a_factor_of_one_has_any_number_of_dimensions() -> None:
    """A norm of rows was that of the whole gradient, so row-wise clipping trained wrong numbers; then it was refused,
    and with it timm's AGC. A shard of a row that is cut over ranks is 1-D: a factor [1, 1] raised there."""
    whole = torch.full((1, 200), 2 * 1.5)  # mean over ranks of the sum over two samples
    for norms in run_ranks(_norms, 2):
        for name, shape in (("all", ()), ("all dims", ()), ("kept", (1, 1)), ("float64", ())):
            value = norms[name]
            assert isinstance(value, Tensor) and tuple(value.shape) == shape
            torch.testing.assert_close(value.float().reshape(()), whole.norm())
        assert norms["float64"].dtype == torch.float64
        kind, text = norms["early"]
        assert kind == "ZcError" and "norm(dim=[1]) of the gradient of weight inside no_sync" in text
        wanted = {"rows": whole.norm(dim=1, keepdim=True), "columns": whole.norm(dim=0), "places": whole.amax(dim=1)}
        wanted |= {"halved": whole / 2, "doubled": whole}
        for name, value in wanted.items():
            torch.testing.assert_close(norms[name], value)


@zc.elementwise
class Rebinds(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - 0.1 * param.grad


def _rebound(rank: int, world_size: int) -> tuple[str, str]:
    model = one_row_model()
    optimizer = Rebinds(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager")
    model(torch.ones(2, 200)).sum().backward()
    return message_of(optimizer.step)


def test_slices_that_are_bound_to_other_memory_are_named() -> None:
    """Their updates reached nobody, and the model never trained again, without a word."""
    for kind, text in run_ranks(_rebound, 2):
        assert kind == "ZcError" and "was set to another tensor" in text and "weight" in text, (kind, text)


def _added(rank: int, world_size: int) -> tuple[list[float], tuple[str, str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].named_parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager")
    model[1].requires_grad_(True)
    refused = message_of(lambda: optimizer.add_param_group({"params": set(model[1].parameters())}))
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.add_param_group({"params": model[1].named_parameters()})
    zc.recompile(model)
    optimizer.add_param_group(optimizer.param_groups.pop(0))  # what the caller has taken out comes back
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    moved = [float((a - b).abs().max()) for a, b in zip(before, model.parameters(), strict=True)]
    return moved, refused


def test_named_parameters_are_added_and_a_set_is_refused() -> None:
    for moved, (kind, text) in run_ranks(_added, 2):
        assert all(distance > 0 for distance in moved), moved
        assert kind == "TypeError" and "set" in text


def _shown(rank: int, world_size: int) -> list[list[bool]]:
    """Which parameters show a ``.grad``: of a backward on rank 1 alone, before and after the update's boundary."""
    model = nn.Linear(3, 2)
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    if rank == 1:
        with zc.no_sync(model):
            model(torch.ones(2, 3)).sum().backward()
    before = [param.grad is not None for param in model.parameters()]
    zc.clip_grad_norm_(model, 1.0)
    return [before, [param.grad is not None for param in model.parameters()]]


def test_the_boundary_shows_the_gradients_of_other_ranks() -> None:
    assert run_ranks(_shown, 2) == [[[False] * 2, [True] * 2], [[True] * 2, [True] * 2]]
