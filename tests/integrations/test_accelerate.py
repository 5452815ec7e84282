"""zc.integrations.accelerate against Accelerate's own DDP, on 2 ranks: the same script, one line apart."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-integrations")

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType, DynamoBackend, set_seed
from harness import run_ranks
from launched import TOLERANCE, furthest, mlp, regression, torchrun, whole
from safetensors.torch import load_file
from tiers import FULL, full_only
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from training_runs import message_of

import zc
from zc.integrations.accelerate import prepare
from zc.registry import sharded

Found = dict[str, Any]


def _train(
    rank: int,
    world_size: int,
    options: dict[str, Any] | None,
    precision: str = "no",
    folder: str = "",
    resume_at: int = 0,
) -> Found:
    """Six updates of two microbatches; ``options`` of zc.compile, None for DDP. Saves after the third one into
    ``folder``, or goes on from there at ``resume_at``."""
    with torchrun(rank, world_size):
        accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        set_seed(3)
        model = mlp()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
        loader = DataLoader(regression(), batch_size=2, shuffle=True)
        objects = (model, optimizer, loader, scheduler)
        if options is None:
            model, optimizer, loader, scheduler = accelerator.prepare(*objects)
        else:
            model, optimizer, loader, scheduler = prepare(accelerator, *objects, **options)
        result: Found = {"losses": [], "norms": [], "lr": [], "declared": True}
        if resume_at:
            accelerator.load_state(folder)
        for number, (x, y) in enumerate(loader, 1):
            if number <= 2 * resume_at:
                continue
            with accelerator.accumulate(model):
                if options is not None:  # else each microbatch would be announced and, in stage 1, reduced
                    result["declared"] &= sharded(model).runtime.is_boundary == accelerator.sync_gradients
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    result["norms"].append(accelerator.clip_grad_norm_(model.parameters(), 0.1).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            result["losses"].append(accelerator.gather(loss.detach()).tolist())
            if number == 6 and folder and not resume_at:
                accelerator.save_state(folder)
        result["lr"] = scheduler.get_last_lr()
        plain = accelerator.unwrap_model(model)
        with zc.whole_parameters(plain) if options is not None else nullcontext():
            result["weights"] = whole(plain)
        result["moments"] = None
        if options is not None and resume_at == 0 and folder:
            whole_state = zc.full_optimizer_state(model, optimizer.optimizer)
            result["moments"] = whole_state and {k: v["exp_avg"] for k, v in whole_state["state"].items()}
        accelerator.end_training()
        return result


def _same(got: Found, wanted: Found, tolerance: float) -> None:
    assert furthest(got["weights"], wanted["weights"]) < tolerance
    for key in ("losses", "norms", "lr"):
        assert len(got[key]) == len(wanted[key]) > 0, key
        torch.testing.assert_close(torch.tensor(got[key]), torch.tensor(wanted[key]), rtol=tolerance, atol=1e-7)


CASES = [
    pytest.param({"backend": "eager", "stage": 1}, "no", TOLERANCE, id="eager, stage 1"),
    pytest.param({"backend": "aot_eager", "stage": 2, "bucket_nbytes": 256}, "no", TOLERANCE, id="aot_eager, stage 2"),
    pytest.param({"backend": "eager", "stage": 3, "bucket_nbytes": 256}, "no", TOLERANCE, id="eager, stage 3"),
    pytest.param({"backend": "aot_eager", "stage": 2}, "bf16", 2e-2, id="bf16"),
    pytest.param({"backend": "inductor", "stage": 2}, "no", TOLERANCE, id="inductor", marks=full_only),
]


@pytest.mark.parametrize(("options", "precision", "tolerance"), CASES if FULL else CASES[1:3])
def test_the_loop_is_ddp_s(tmp_path: Path, options: dict[str, Any], precision: str, tolerance: float) -> None:
    """Accumulation, clipping, gather, schedulers; and a run that is saved in its middle and taken up again."""
    wanted = run_ranks(_train, 2, None, precision, str(tmp_path / "ddp"))
    results = run_ranks(_train, 2, options, precision, str(tmp_path / "zc"))
    again = run_ranks(_train, 2, options, precision, str(tmp_path / "zc"), 3)
    from_ddp = run_ranks(_train, 2, options, precision, str(tmp_path / "ddp"), 3)
    for rank in range(2):
        _same(results[rank], wanted[rank], tolerance)
        assert results[rank]["declared"]
        assert furthest(again[rank]["weights"], results[rank]["weights"]) == 0, "a run that was resumed is another one"
        assert furthest(from_ddp[rank]["weights"], wanted[rank]["weights"]) < tolerance
        assert again[rank]["lr"] == results[rank]["lr"]
    files = (load_file(tmp_path / where / "model.safetensors") for where in ("zc", "ddp"))
    saved, of_ddp = ({k.removeprefix("module."): v for k, v in file.items()} for file in files)
    assert furthest(saved, of_ddp) < tolerance


def _masters(rank: int, world_size: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """fp32 masters of bf16 parameters before a save and after the load, in another number of ranks' plan."""
    with torchrun(rank, world_size):
        accelerator = Accelerator(cpu=True)
        model = mlp()
        optimizer = AdamW(model.parameters(), lr=1e-3)
        model, optimizer = prepare(accelerator, model, optimizer, backend="eager", param_dtype=torch.bfloat16)
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 6, dtype=torch.bfloat16)).sum())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(folder)
        accelerator.save_state(folder)  # once more into the same folder

        def read() -> dict[str, Tensor]:
            state = zc.state_dict(model, optimizer.optimizer)["model"]
            return {k: getattr(v, "local", v).detach().float().clone() for k, v in state.items()}

        before = read()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        accelerator.load_state(folder)
        accelerator.backward(0 * model(torch.ones(2, 6, dtype=torch.bfloat16)).sum())
        optimizer.zero_grad()
        return before, read()


@full_only
def test_masters_outlive_narrow_weights(tmp_path: Path) -> None:
    for before, after in run_ranks(_masters, 2, str(tmp_path)):
        assert furthest(after, before) == 0
        assert any(not torch.equal(v, v.bfloat16().float()) for v in before.values()), "nothing that bf16 would lose"
    assert len(list((tmp_path / "zc").iterdir())) == 1, "the first save of the same folder is still there"


def _with_teacher(rank: int, world_size: int) -> tuple[type, bool]:
    with torchrun(rank, world_size):
        accelerator = Accelerator(cpu=True)
        model, teacher = mlp(), mlp().requires_grad_(False)
        loader = DataLoader(regression(), batch_size=2)
        *_, prepared, _ = prepare(
            accelerator, model, SGD(model.parameters(), lr=0.1), teacher, loader, backend="eager"
        )  # fmt: skip
        return type(prepared), isinstance(accelerator.unwrap_model(prepared), nn.Sequential)


def _saved_with_a_teacher(rank: int, world_size: int, folder: str, order: str) -> list[bool]:
    """Job: whether each of two modules, the last one frozen, has its own weights after save_state and load_state."""
    with torchrun(rank, world_size):
        accelerator = Accelerator(cpu=True)
        model, teacher = mlp(), mlp().requires_grad_(False)
        with torch.no_grad():
            teacher[0].weight.add_(1.0)
        before = [whole_values(model), whole_values(teacher)]
        optimizer = SGD(model.parameters(), lr=0.1)
        if order == "teacher first":
            accelerator.prepare_model(teacher, evaluation_mode=True)
        rest = (teacher,) if order == "student first" else ()
        prepare(accelerator, model, optimizer, *rest, stage=3, backend="eager")
        accelerator.save_state(folder)
        with zc.whole_parameters(model), torch.no_grad():
            for param in (*model.parameters(), *teacher.parameters()):
                param.zero_()
        accelerator.load_state(folder)
        with zc.whole_parameters(model):
            after = [whole_values(model), whole_values(teacher)]
        return [torch.equal(a, b) for a, b in zip(after, before, strict=True)]


def _resumed_past_hooks(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Job: the weights of a run that saves half-way, and of one that goes on from there. Hooks of the program, which
    come before `prepare`, keep the weights themselves and take models out of the list, as diffusers' scripts do."""

    def run(resumes: bool) -> Tensor:
        with torchrun(rank, world_size):
            accelerator = Accelerator(cpu=True)

            def save_weights(models: list[Any], weights: list[Any], output_dir: str) -> None:
                state = accelerator.get_state_dict(models[0])
                if rank == 0:
                    Path(output_dir).mkdir(parents=True, exist_ok=True)
                    torch.save({name: value.clone() for name, value in state.items()}, Path(output_dir, "own.pt"))
                    weights.clear()

            def load_weights(models: list[Any], input_dir: str) -> None:
                while models:
                    models.pop().load_state_dict(torch.load(Path(input_dir, "own.pt")))

            accelerator.register_save_state_pre_hook(save_weights)
            accelerator.register_load_state_pre_hook(load_weights)
            set_seed(3)
            model = mlp()
            model, optimizer = prepare(
                accelerator, model, AdamW(model.parameters(), lr=1e-2), backend="eager", **options
            )  # fmt: skip
            if resumes:
                accelerator.load_state(folder)
            for step in range(3 if resumes else 0, 6):
                torch.manual_seed(10 * step + rank)
                accelerator.backward(model(torch.randn(4, 6)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if step == 2 and not resumes:
                    accelerator.save_state(folder)
            with zc.whole_parameters(model):
                return whole_values(model)

    return run(resumes=False), run(resumes=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_hooks_that_take_models_away_leave_the_optimizer_its_state(stage: int, tmp_path: Path) -> None:
    for through, resumed in run_ranks(_resumed_past_hooks, 2, str(tmp_path / "state"), {"stage": stage}):
        assert torch.equal(resumed, through)


def _early(rank: int, world_size: int) -> list[str]:
    """Job: what is said where a microbatch that is not the last clips, or steps, as LocalSGD does. The loop goes
    on after each."""
    with torchrun(rank, world_size):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = mlp()
        model, optimizer = prepare(accelerator, model, SGD(model.parameters(), lr=0.1), backend="eager")
        said: list[str] = []
        for x, y in DataLoader(regression(8), batch_size=2):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x + rank), y))
                if not accelerator.sync_gradients:
                    for grad in (param.grad for param in model.parameters() if param.grad is not None):
                        grad.mul_(2.0).div_(2.0)
                    said.append(message_of(lambda: accelerator.clip_grad_norm_(model.parameters(), 0.1))[1])
                    said.append(message_of(lambda: accelerator.clip_grad_value_(model.parameters(), 0.1))[1])
                    said.append(message_of(lambda: zc.clip_grad_norm_(model, 0.1))[1])
                    said.append(message_of(optimizer.optimizer.step)[1])
                optimizer.step()
                optimizer.zero_grad()
        return said


def test_clipping_and_steps_before_the_last_microbatch_are_refused() -> None:
    """Under DDP they clip, and step by, the gradients of each rank alone."""
    written = [f"{name} of the gradient of 0.weight" for name in ("mul_", "clamp_")]
    words = [*written, "zc.clip_grad_norm_", "SGD.step()"]
    for said in run_ranks(_early, 2):
        assert [text.partition(" inside no_sync: ")[0] for text in said] == 2 * words


def _pointer_alone(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    with torchrun(rank, world_size):
        accelerator = Accelerator(cpu=True)
        model = mlp()
        model, optimizer = prepare(accelerator, model, AdamW(model.parameters(), lr=1e-2), backend="eager")
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        return message_of(lambda: optimizer.load_state_dict(torch.load(Path(folder, "optimizer.bin"))))


def test_a_pointer_whose_folder_nobody_read_is_refused(tmp_path: Path) -> None:
    for _, message in run_ranks(_pointer_alone, 2, str(tmp_path / "state")):
        assert "the folder zc beside the file" in message and "no such folder was read" in message


def whole_values(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten().clone() for param in model.parameters()])


@pytest.mark.parametrize("order", ["student first", "teacher first"])
def test_in_stage_3_each_module_finds_its_own_weights(order: str, tmp_path: Path) -> None:
    """Accelerate numbers the files by the position of a model, also of those that have their weights already."""
    assert run_ranks(_saved_with_a_teacher, 2, str(tmp_path / "state"), order) == [[True, True]] * 2


def _closed(rank: int, world_size: int, is_refused: bool) -> bool:
    with torchrun(rank, world_size):
        accelerator, model = Accelerator(cpu=True, mixed_precision="bf16"), mlp()
        if is_refused:
            with pytest.raises(zc.PlanError):
                prepare(accelerator, model, SGD(model[0].parameters(), lr=0.1), backend="eager")
            assert not accelerator._models and "forward" not in vars(model)  # it was saved, and autocast, twice
        else:
            prepare(accelerator, model, SGD(model.parameters(), lr=0.1), backend="eager")
            zc.close(model)
        return isinstance(accelerator.prepare(model), nn.parallel.DistributedDataParallel)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_model_that_is_not_compiled_gets_ddp(is_refused: bool) -> None:
    assert run_ranks(_closed, 2, is_refused) == [True, True]


def test_a_frozen_module_stays_without_ddp() -> None:
    assert run_ranks(_with_teacher, 2) == [(nn.Sequential, True)] * 2


def _refusals(rank: int, world_size: int) -> list[str]:
    messages = []

    def ask(make: Any, wrap: Any = None, **kwargs: Any) -> None:
        with torchrun(rank, world_size):
            accelerator = make(Accelerator(cpu=True, **kwargs))
            model = mlp()
            optimizer: Any = SGD(model.parameters(), lr=0.1)
            if wrap is not None:
                model, optimizer = wrap(accelerator, model, optimizer)
            kind, text = message_of(lambda: prepare(accelerator, model, optimizer, backend="eager"))
            messages.append(f"{kind}: {text}")

    class Told:
        """An Accelerator of another kind, as far as prepare asks."""

        def __init__(self, accelerator: Any, **other: Any) -> None:
            self.__dict__.update(other)
            self._accelerator = accelerator

        def __getattr__(self, name: str) -> Any:
            return getattr(self._accelerator, name)

    class Kind:
        value = "FSDP"

    ask(lambda a: Told(a, distributed_type=Kind))
    ask(lambda a: Told(a, mixed_precision="fp8"))
    ask(lambda a: a, dynamo_backend=DynamoBackend.EAGER)
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    ask(lambda a: a, kwargs_handlers=[hook])
    ask(lambda a: a, lambda accelerator, model, optimizer: (model, accelerator.prepare(optimizer)))
    ask(lambda a: a, lambda accelerator, model, optimizer: (accelerator.prepare(model), optimizer))
    ask(lambda a: a, lambda accelerator, model, optimizer: (optimizer, model))
    return messages


def test_what_is_refused() -> None:
    words = [
        "the Accelerator runs FullyShardedDataParallel (FSDP)",
        "mixed_precision='fp8'",
        "the Accelerator compiles models itself (dynamo backend EAGER)",
        "comm_hook=bf16",
        "the optimizer was given to accelerator.prepare before",
        "the model was given to accelerator.prepare before",
        "takes (accelerator, model, optimizer, *rest) in this order, and was given a SGD as model",
    ]
    for result in run_ranks(_refusals, 2):
        assert len(result) == len(words)
        for text, part in zip(result, words, strict=True):
            assert text.startswith("PlanError: ") and part in text, text
