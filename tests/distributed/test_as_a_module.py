"""What frameworks do to any module, done to a compiled one: moved to where it is, wrapped, flattened, copied."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import mean_square, mlp, vectors
from oracle import weights
from test_bad_input import refused
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_runs import adamw, message_of

import zc


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        return output


MOVES: tuple[Callable[[nn.Module], Any], ...] = (
    lambda model: model.to("cpu:0"),
    lambda model: model.cpu(),
    lambda model: Around(model).to(torch.device("cpu", 0)),
    lambda model: model.to("cpu:0", torch.float32),
    lambda model: model.float(),
)


def _moved(rank: int, world_size: int, options: dict[str, Any], is_moved: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, batch = mlp(), vectors()
    model.register_buffer("table", torch.ones(2))
    model, optimizer = zc.compile(model, adamw(model), bucket_nbytes=512, **options)
    places = [param.data_ptr() for param in model.parameters()]
    for step, move in enumerate(MOVES):
        for point in range(3):
            if is_moved:
                move(model)
            if point == 0:
                mean_square(model, batch(rank, step, 0)).backward()
            elif point == 1:
                optimizer.step()
        optimizer.zero_grad()
    assert places == [param.data_ptr() for param in model.parameters()]
    assert all(param.device == torch.device("cpu") for param in model.parameters())
    trained = weights(model)
    if is_moved:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] = float("nan")
        model.to("cpu:0")
        assert places == [param.data_ptr() for param in model.parameters()], "a NaN has not changed"
        _ = model.double() if rank else model.bfloat16()
        dtype = next(model.parameters()).dtype
        said = message_of(lambda: mean_square(model, [t.to(dtype) for t in batch(rank, 9, 0)]).backward())
        assert said[0] == "ZcError" and "has left its bucket" in said[1], "one that changes something"
    return trained


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"backend": "aot_eager", "overlap_gather": True}], ids=str)
def test_a_move_that_changes_nothing_is_none(options: dict[str, Any]) -> None:
    """After .to("cpu:0") every parameter had left its bucket."""
    moved, stayed = (run_ranks(_moved, 2, options, is_moved) for is_moved in (True, False))
    for one, other in zip(moved, stayed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_function_applied_to_sharded_weights_changes_them_or_is_refused() -> None:
    """``model._apply(function)`` did nothing in stage 3, wherever it was called."""
    model, halve = nn.Linear(4, 4), lambda tensor: tensor * 0.5
    halved = model.weight.detach() * 0.5
    zc.compile(model, adamw(model), stage=3, backend="eager")
    with pytest.raises(zc.ZcError, match=r"makes \[-150.25, 0.390625\] of \[-300.5, 0.78125\]"):
        model._apply(halve)
    with zc.whole_parameters(model):
        model._apply(halve).double().float()  # a cast was refused here, where weights can be written
    with zc.whole_parameters(model):
        assert torch.equal(model.weight, halved)
    quantized = nn.Linear(4, 4)
    quantized.codes = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
    zc.compile(quantized, adamw(quantized), stage=3, backend="eager")
    quantized.cpu().float()  # no number stands for values that its dtype has not


@pytest.mark.parametrize("options", [{"overlap_gather": True}, {"stage": 3}], ids=str)
def test_a_copy_has_no_hooks_of_the_weights(options: dict[str, Any]) -> None:
    """With overlap_gather ``torch.save(model)`` could not pickle them, nor those of a layer that had come later."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = adamw(model)
    zc.compile(model, optimizer, backend="eager", **options)
    model[1] = nn.Linear(4, 2)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    zc.recompile(model)
    with zc.whole_parameters(model):
        x, copied = torch.ones(1, 4), pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), copied(x))
    assert not any(module._forward_pre_hooks for module in copied.modules())


class Moving(nn.LSTM):
    """A stand-in for what torch does on a GPU: all weights into one new buffer."""

    def flatten_parameters(self) -> None:
        weights = [w for w in getattr(self, "_flat_weights", ()) if isinstance(w, Tensor)]
        flat = torch.cat([w.detach().reshape(-1) for w in weights]) if weights else torch.empty(0)
        for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
            weight.data = part.view(weight.shape)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.last = Moving(4, 8, batch_first=True), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()  # as many scripts have it
        output: Tensor = self.last(self.rnn(x.view(-1, 4, 4))[0][:, -1])
        return output


def _recurrent(rank: int, world_size: int, backend: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = Recurrent(), vectors()
    plain = DistributedDataParallel(copy.deepcopy(model))
    its = adamw(plain)
    model, optimizer = zc.compile(model, adamw(model), bucket_nbytes=512, backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            for each, other in ((model, optimizer), (plain, its)):
                mean_square(each, batch(rank, step, 0)).backward()
                other.step()
                other.zero_grad()
    said = [str(w.message) for w in caught if "flatten_parameters" in str(w.message)]
    assert ["rnn.flatten_parameters() does nothing" in text for text in said] == [True] * (rank == 0), said  # for all
    assert "rnn.flatten_parameters() does nothing" in zc.explain(model).sections["notes"]
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = copied.rnn.weight_ih_l0.data_ptr()
        copied.rnn.flatten_parameters()
        assert copied.rnn.weight_ih_l0.data_ptr() != before, "a plain module has its class's method"
        assert copied.to("meta").last.weight.is_meta
    trained = weights(model)
    zc.close(model)
    assert "flatten_parameters" not in vars(model.rnn) and not {"_apply"} & vars(model).keys()
    DistributedDataParallel(model)
    return trained, weights(plain.module)


@pytest.mark.filterwarnings("ignore:zc")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_rnn_stays_in_its_bucket(backend: str) -> None:
    for result, wanted in run_ranks(_recurrent, 2, backend):
        torch.testing.assert_close(result, wanted, rtol=2e-5, atol=1e-7)


class _FabricModule(Around):
    """By name: Fabric's, which knows the module inside as its own attributes."""


class LightningOptimizer:
    """By name: Lightning's is no torch.optim.Optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class _FabricOptimizer(torch.optim.AdamW):
    """By name: Fabric's takes the class of the one inside on."""


def test_what_frameworks_put_around_model_and_optimizer() -> None:
    model = mlp()
    inside = adamw(model)
    refused(zc.PlanError, "_FabricModule", "model.module", model=_FabricModule(model), optimizer=inside)
    refused(zc.PlanError, "LightningOptimizer", ".optimizer", model=model, optimizer=LightningOptimizer(inside))
    refused(zc.PlanError, "_FabricOptimizer", model=model, optimizer=_FabricOptimizer(model.parameters()))
    refused(zc.PlanError, "optimizer['a']", "LightningOptimizer", model=model,
            optimizer={"a": LightningOptimizer(inside)})  # fmt: skip
    zc.compile(model, inside, backend="eager")


def test_accelerates_optimizer() -> None:
    """An AttributeError, after the buckets were filled."""
    accelerate = pytest.importorskip("accelerate")
    model = mlp()
    inside = adamw(model)
    prepared = accelerate.Accelerator(cpu=True).prepare(inside)
    before = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(zc.PlanError, match=r"AcceleratedOptimizer, which wraps .* attribute \.optimizer"):
        zc.compile(model, prepared, backend="eager")
    assert before == [param.data_ptr() for param in model.parameters()]
    zc.compile(model, prepared.optimizer, backend="eager")
