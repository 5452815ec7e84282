"""zc.integrations.lightning against Lightning's own DDPStrategy, on 2 ranks: Fabric."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed: make test-integrations")

from pathlib import Path

import lightning
from harness import run_ranks
from launched import TOLERANCE, furthest, mlp, regression, torchrun, whole
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from tiers import FULL
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import AdamW
from torch.utils.data import DataLoader

import zc
from zc.integrations.lightning import ZcFabricStrategy

Options = dict[str, Any] | None  # of zc.compile; None: DDP


def _with_fabric(
    rank: int, world_size: int, options: Options, folder: str, precision: str, resume: bool
) -> tuple[dict[str, Tensor], list[float]]:
    with torchrun(rank, world_size):
        strategy = FabricDDP() if options is None else ZcFabricStrategy(**options)
        fabric = lightning.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision=precision)
        fabric.launch()
        module = mlp()
        model, optimizer = fabric.setup(module, AdamW(module.parameters(), lr=1e-2))
        loader = fabric.setup_dataloaders(DataLoader(regression(), batch_size=2))
        norms: list[float] = []
        state = {"optimizer": optimizer, "model": model, "number": 0}
        if resume:
            fabric.load(folder + "/state.ckpt", state)
        for number, (x, y) in enumerate(loader, 1):
            if number <= state["number"]:
                continue
            is_last = number % 2 == 0
            with fabric.no_backward_sync(model, enabled=not is_last):
                fabric.backward(mse_loss(model(x).float(), y) / 2)
            if is_last:
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.1).item())
                fabric.clip_gradients(model, optimizer, clip_val=0.01)
                optimizer.step()
                optimizer.zero_grad()
            if number == 6 and not resume:
                state["number"] = number
                fabric.save(folder + "/state.ckpt", state)
        with zc.whole_parameters(module) if options is not None else contextlib.nullcontext():
            return whole(module), norms


FABRIC = [
    pytest.param({"backend": "aot_eager", "stage": 1}, "32-true", TOLERANCE, id="stage 1"),
    pytest.param({"backend": "eager", "stage": 3, "bucket_nbytes": 64}, "32-true", TOLERANCE, id="stage 3"),
    pytest.param({"backend": "aot_eager", "stage": 2}, "bf16-mixed", 2e-2, id="bf16-mixed"),
    pytest.param(
        {"backend": "eager", "stage": 3, "param_dtype": torch.bfloat16}, "bf16-true", 5e-2, id="stage 3, bf16-true"
    ),
    pytest.param({"backend": "eager", "param_dtype": torch.bfloat16}, "bf16-true", 5e-2, id="bf16-true"),
]


@pytest.mark.parametrize(("options", "precision", "tolerance"), FABRIC if FULL else FABRIC[:2])
def test_fabric_is_ddp_s(tmp_path: Path, options: dict[str, Any], precision: str, tolerance: float) -> None:
    ddp, ours = str(tmp_path / "ddp"), str(tmp_path / "zc")
    exact = precision if precision != "bf16-true" else "32-true"  # zc has fp32 masters there
    wanted = run_ranks(_with_fabric, 2, None, ddp, exact, False)
    results = run_ranks(_with_fabric, 2, options, ours, precision, False)
    again = run_ranks(_with_fabric, 2, options, ours, precision, True)
    crossed = run_ranks(_with_fabric, 2, options, ddp, precision, True)
    for rank in range(2):
        assert furthest(results[rank][0], wanted[rank][0]) < tolerance
        assert furthest(crossed[rank][0], wanted[rank][0]) < tolerance
        assert furthest(again[rank][0], results[rank][0]) == 0, "a run that was resumed is another one"
        assert results[rank][1] == pytest.approx(wanted[rank][1], rel=max(tolerance, 1e-4))


def _loads_a_part(
    rank: int, world_size: int, options: Options, path: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Whole weights before and after a load of one layer, and of a name that the model lacks, and two updates later."""
    with torchrun(rank, world_size):
        strategy = FabricDDP() if options is None else ZcFabricStrategy(**options)
        precision: Any = "bf16-true" if "param_dtype" in (options or {}) else "32-true"
        fabric = lightning.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, precision=precision)
        fabric.launch()
        module = mlp()
        model, optimizer = fabric.setup(module, AdamW(module.parameters(), lr=1e-2))
        if rank == 0:
            generator = torch.Generator().manual_seed(2)
            part = {"2.weight": torch.randn(2, 8, generator=generator), "4.weight": torch.ones(3)}
            torch.save({"model": part}, path)
        fabric.barrier()
        x, y = regression().tensors

        def update() -> None:
            fabric.backward(mse_loss(model(x[rank::2]).float(), y[rank::2]))
            optimizer.step()
            optimizer.zero_grad()

        def now() -> dict[str, Tensor]:
            state = fabric.strategy.get_module_state_dict(module if options else model.module)
            return {name: value.clone() for name, value in state.items()}

        update()
        update()
        before = now()
        with pytest.raises(RuntimeError, match="Unexpected key"):
            fabric.load(path, {"model": model})
        fabric.load(path, {"model": model}, strict=False)
        after = now()
        update()
        update()
        return before, after, now()


PARTS = [
    pytest.param({"stage": 1}, TOLERANCE, id="stage 1"),
    pytest.param({"stage": 2, "param_dtype": torch.bfloat16}, 5e-2, id="narrow"),
    pytest.param({"stage": 3, "bucket_nbytes": 64}, TOLERANCE, id="stage 3"),
    pytest.param({"stage": 3, "param_dtype": torch.bfloat16}, 5e-2, id="stage 3, narrow"),
]


@pytest.mark.parametrize(("options", "tolerance"), PARTS)
def test_a_part_of_a_state_is_loaded_without_strict(tmp_path: Path, options: dict[str, Any], tolerance: float) -> None:
    """What the state lacks keeps its masters, and everything its optimizer's state, as under DDP."""
    wanted = run_ranks(_loads_a_part, 2, None, str(tmp_path / "part.ckpt"))[0]
    before, after, trained = run_ranks(_loads_a_part, 2, {"backend": "eager", **options}, str(tmp_path / "part.ckpt"))[
        0
    ]
    given = torch.load(tmp_path / "part.ckpt", weights_only=True)["model"]
    assert furthest(after, {**before, "2.weight": given["2.weight"]}) == 0
    assert furthest(trained, wanted[2]) < tolerance
