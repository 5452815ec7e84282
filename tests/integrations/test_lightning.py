"""zc.integrations.lightning against Lightning's own DDPStrategy, on 2 ranks: its Trainer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed: make test-integrations")

import lightning
from harness import run_ranks
from launched import TOLERANCE, furthest, mlp, regression, torchrun, whole
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from tiers import FULL, full_only
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler
from training_runs import message_of

import zc
from zc.integrations import shards_weights
from zc.integrations.lightning import ZcFabricStrategy, ZcStrategy
from zc.registry import COMPILED, sharded

Options = dict[str, Any] | None  # of zc.compile; None: DDP


class Forward(lightning.LightningModule):
    """training_step calls self(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.boundaries: list[bool] = []

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def cpu(self) -> Any:
        """The last act of a fit. On a GPU it would move parameters whose bytes lie in shards."""
        assert not shards_weights(self), "moved in stage 3"
        return super().cpu()

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self in COMPILED:
            self.boundaries.append(sharded(self).runtime.is_boundary)
        loss = mse_loss(self(batch[0]).float(), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", mse_loss(self(batch[0]).float(), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [StepLR(optimizer, 1, gamma=0.8)]


class Parts(lightning.LightningModule):
    """Has no forward, two optimizers, and steps by hand; the second one's step is given a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = mlp(), nn.ModuleList([nn.Linear(2, 2)])
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        x, y = batch
        with first.toggle_model():
            loss = mse_loss(self.body(x), y)
            self.manual_backward(loss)
            self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            first.step()
            first.zero_grad()

        def closure() -> Tensor:
            second.zero_grad()
            loss = mse_loss(self.heads[0](self.body(x).detach()), y)
            self.manual_backward(loss)
            return loss

        second.step(closure)

    def configure_optimizers(self) -> Any:
        return [SGD(self.body.parameters(), lr=0.05, momentum=0.9), AdamW(self.heads.parameters(), lr=1e-2)]


def trainer_of(world_size: int, folder: str, strategy: Any, **more: Any) -> lightning.Trainer:
    """On CPU ranks, without what is printed."""
    return lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **more,
    )


def _fit(
    rank: int,
    world_size: int,
    kind: str,
    options: Options,
    folder: str,
    more: dict[str, Any],
    resume: str | None = None,
) -> dict[str, Any]:
    with torchrun(rank, world_size):
        torch.manual_seed(5)
        module = {"forward": Forward, "parts": Parts}[kind]()
        keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True, monitor=None)
        # a step by hand uses some parameters, which DDP must be told
        strategy = DDPStrategy(find_unused_parameters=kind == "parts") if options is None else ZcStrategy(**options)
        short = {"max_epochs": 3, "limit_train_batches": 4, "limit_val_batches": 2}
        trainer = trainer_of(world_size, folder, strategy, callbacks=[keep], **short, **more)
        trainer.fit(
            module,
            DataLoader(regression(), batch_size=2),
            DataLoader(regression(8), batch_size=2) if kind == "forward" else None,
            ckpt_path=resume,
        )
        compiled = len(zc.registry.sharded(module).runtime.programs) if options is not None else 0
        numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
        numbers["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        with zc.whole_parameters(module) if options is not None else contextlib.nullcontext():
            result = {"weights": whole(module), "numbers": numbers, "programs": compiled}
        if kind == "forward":
            result["boundaries"] = module.boundaries
            if options is not None and (full := zc.full_state_dict(module)):  # of rank 0, after the last epoch
                plain, x = Forward(), torch.ones(2, 6)
                plain.load_state_dict(full)
                read = Forward.load_from_checkpoint(folder + "/last.ckpt", map_location="cpu")
                result["outputs"] = torch.equal(plain(x), read(x))
            data = DataLoader(regression(8), batch_size=2)
            result["validated"] = trainer.validate(module, data, verbose=False)
            first = trainer.validate(module, data, verbose=False, ckpt_path=f"{resume or folder + '/epoch=0.ckpt'}")
            result["validated first"] = first[0]["val"]
            if options is not None:  # to validate, DDPStrategy had to read past it
                with pytest.raises(zc.PlanError, match="leave DDP out"):
                    DistributedDataParallel(module)
        return result


ACCUMULATE = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
CASES = [
    pytest.param("forward", {"backend": "eager", "stage": 1}, ACCUMULATE, TOLERANCE, id="eager, stage 1"),
    pytest.param("forward", {"backend": "eager", "stage": 3, "bucket_nbytes": 64}, ACCUMULATE, TOLERANCE, id="stage 3"),
    pytest.param("parts", {"backend": "aot_eager", "stage": 3}, {}, TOLERANCE, id="stage 3, manual, several"),
    pytest.param("forward", {"backend": "aot_eager", "stage": 3}, ACCUMULATE, TOLERANCE, id="stage 3, automatic"),
    pytest.param("forward", {"backend": "aot_eager"}, ACCUMULATE, TOLERANCE, id="automatic"),
    pytest.param("parts", {"backend": "aot_eager", "stage": 2}, {}, TOLERANCE, id="manual, several"),
    pytest.param("forward", {"backend": "aot_eager"}, {"precision": "bf16-mixed"}, 2e-2, id="bf16-mixed"),
    pytest.param("forward", {"backend": "inductor"}, ACCUMULATE, TOLERANCE, id="inductor"),
]


@pytest.mark.parametrize(("kind", "options", "more", "tolerance"), CASES if FULL else CASES[:2])
def test_fit_is_ddp_s(
    tmp_path: Path, kind: str, options: dict[str, Any], more: dict[str, Any], tolerance: float
) -> None:
    """Validation, schedulers and checkpoints; resumed from its own checkpoint, and from DDP's; DDP from zc's."""
    ddp, ours = tmp_path / "ddp", tmp_path / "zc"
    wanted = run_ranks(_fit, 2, kind, None, str(ddp), more, timeout=300.0)
    results = run_ranks(_fit, 2, kind, options, str(ours), more, timeout=300.0)
    again = run_ranks(_fit, 2, kind, options, str(tmp_path / "a"), more, str(ours / "epoch=0.ckpt"), timeout=300.0)
    ways = [(options, ddp), (None, ours)]
    crossed = [
        run_ranks(_fit, 2, kind, how, str(tmp_path / f"c{k}"), more, str(source / "epoch=0.ckpt"), timeout=300.0)
        for k, (how, source) in enumerate(ways)
    ]
    for rank in range(2):
        assert results[rank]["programs"] == (0 if options["backend"] == "eager" else results[0]["programs"])
        for other in (results, again, *crossed):
            assert furthest(other[rank]["weights"], wanted[rank]["weights"]) < tolerance
            assert other[rank]["numbers"] == pytest.approx(wanted[rank]["numbers"], rel=max(tolerance, 1e-4))
        assert furthest(again[rank]["weights"], results[rank]["weights"]) == 0, "a run that was resumed is another one"
        if kind == "forward":
            assert results[0]["outputs"], "last.ckpt computes something else than zc.full_state_dict"
            first, other = results[rank]["validated first"], wanted[rank]["validated first"]
            assert first == pytest.approx(other, rel=max(tolerance, 1e-4)), "validated with other weights"
            every = more.get("accumulate_grad_batches", 1)
            # no_sync around all but the last microbatch
            assert results[rank]["boundaries"] == [k % every == every - 1 for k in range(3 * 4)]
    assert options["backend"] == "eager" or results[0]["programs"] > 0, "nothing was compiled"
    files = [torch.load(folder / "last.ckpt", weights_only=True) for folder in (ours, ddp)]
    assert furthest(files[0]["state_dict"], files[1]["state_dict"]) < tolerance
    assert files[0].keys() == files[1].keys()
    for state, other in zip(files[0]["optimizer_states"], files[1]["optimizer_states"], strict=True):
        assert state["state"].keys() == other["state"].keys()


class Unfreezes(BaseFinetuning):
    """Trains the last layer alone, then the first one as well."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=5e-3)


class Finetuned(Forward):
    def configure_optimizers(self) -> Any:
        return AdamW((param for param in self.parameters() if param.requires_grad), lr=1e-2)


def _finetune(rank: int, world_size: int, options: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], Any]:
    with torchrun(rank, world_size):
        module, callback = Finetuned(), Unfreezes()
        short = {"max_epochs": 3, "limit_train_batches": 4, "enable_checkpointing": False}
        trainer = trainer_of(
            world_size, folder, ZcStrategy(**options), callbacks=[callback], use_distributed_sampler=False, **short
        )
        sampler = DistributedSampler(regression(), world_size, rank, shuffle=False)
        trainer.fit(module, DataLoader(regression(), batch_size=2, sampler=sampler))
        return whole(module.net), callback.state_dict()["internal_optimizer_metadata"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"] if FULL else ["eager"])
def test_layers_that_a_callback_unfreezes(tmp_path: Path, backend: str) -> None:
    """Against a loop in plain PyTorch over both ranks' batches: DDP would leave what is unfrozen later unreduced."""
    net = mlp()
    optimizer = AdamW(net[2].parameters(), lr=1e-2)
    net[0].requires_grad_(False)
    x, y = regression().tensors
    for epoch in range(3):
        if epoch == 1:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(net[0].parameters()), "lr": 5e-3})
        for start in range(0, 16, 4):  # two of each rank
            optimizer.zero_grad()
            mse_loss(net(x[start : start + 4]), y[start : start + 4]).backward()
            optimizer.step()
    for result, groups in run_ranks(_finetune, 2, {"backend": backend}, str(tmp_path)):
        assert furthest(result, whole(net)) < TOLERANCE
        assert [group["params"] for group in groups[0]] == [
            ["net.2.weight", "net.2.bias"],
            ["net.0.weight", "net.0.bias"],
        ]


def _fit_twice(rank: int, world_size: int, options: Options, folder: str) -> Tensor:
    with torchrun(rank, world_size):
        torch.manual_seed(5)
        module = Forward()
        for _ in range(2):
            strategy = DDPStrategy() if options is None else ZcStrategy(**options)
            short = {"max_epochs": 1, "limit_train_batches": 4, "enable_checkpointing": False}
            trainer = trainer_of(world_size, folder, strategy, **short)
            trainer.fit(module, DataLoader(regression(), batch_size=2))
        with zc.whole_parameters(module) if options is not None else contextlib.nullcontext():
            return whole(module)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_module_is_fit_once_more(tmp_path: Path, stage: int) -> None:
    wanted = run_ranks(_fit_twice, 2, None, str(tmp_path))
    for found, by_ddp in zip(
        run_ranks(_fit_twice, 2, {"backend": "eager", "stage": stage}, str(tmp_path)), wanted, strict=True
    ):  # fmt: skip
        assert furthest(found, by_ddp) < TOLERANCE


def _narrow(rank: int, world_size: int, folder: str, resume: str | None) -> dict[str, Tensor]:
    """Masters of param_dtype=bf16 go into the checkpoint, and come back."""
    with torchrun(rank, world_size):
        module = Forward()
        strategy = ZcStrategy(backend="eager", param_dtype=torch.bfloat16)
        short = {"max_epochs": 2 if resume else 1, "limit_train_batches": 3, "limit_val_batches": 0}
        more = {"precision": "bf16-true", "enable_checkpointing": False}
        trainer = trainer_of(world_size, folder, strategy, **short, **more)
        seen: dict[str, Tensor] = {}
        if resume:  # before the first update of what was resumed

            def read(self: Any) -> None:
                seen.update(self.trainer.strategy.lightning_module_state_dict())

            Forward.on_train_start = read  # type: ignore[method-assign]
        trainer.fit(module, DataLoader(regression(), batch_size=2), ckpt_path=resume)
        if not resume:
            trainer.save_checkpoint(folder + "/narrow.ckpt")
        return {name: value.clone() for name, value in seen.items()}


@full_only
def test_masters_of_narrow_weights(tmp_path: Path) -> None:
    run_ranks(_narrow, 2, str(tmp_path), None)
    saved = torch.load(tmp_path / "narrow.ckpt", weights_only=True)["state_dict"]
    back = run_ranks(_narrow, 2, str(tmp_path), str(tmp_path / "narrow.ckpt"))[0]
    assert all(value.dtype == torch.float32 for value in saved.values())
    assert any(not torch.equal(v, v.bfloat16().float()) for v in saved.values()), "nothing that bf16 would lose"
    assert furthest(back, saved) == 0


def _refusals(rank: int, world_size: int) -> list[str]:
    messages = [": ".join(message_of(lambda: ZcStrategy(find_unused_parameters=True)))]
    with torchrun(rank, world_size):
        fabric = lightning.Fabric(accelerator="cpu", devices=world_size, strategy=ZcFabricStrategy(backend="eager"))
        fabric.launch()
        module = mlp()
        plain = SGD(module.parameters(), lr=0.1)
        messages.append(": ".join(message_of(lambda: fabric.setup(mlp()))))
        messages.append(": ".join(message_of(lambda: fabric.setup_optimizers(plain))))
    return messages


def test_what_is_refused() -> None:
    words = [
        "PlanError: find_unused_parameters is an option of DistributedDataParallel",
        "PlanError: Sequential was given to Fabric without its optimizer",
        "PlanError: SGD was given to Fabric without its model",
    ]
    for result in run_ranks(_refusals, 2):
        assert len(result) == len(words)
        for text, part in zip(result, words, strict=True):
            assert text.startswith(part), text
