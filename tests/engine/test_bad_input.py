"""Bad input: one specific error each, naming the object and what to do, before anything has changed.

All of it is in this process and without a group; tests/distributed/test_ranks_that_differ.py has several.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import mean_square, mlp, vectors
from torch import nn
from torch.optim import AdamW
from training_runs import adamw, message_of

import zc


def state_of(model: Any, optimizer: Any) -> list[Any]:
    """Everything that an error must leave as it was: values, storages, groups, hooks, and whether it is compiled."""
    state: list[Any] = []
    if isinstance(model, nn.Module):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            pointer = tensor.data_ptr() if tensor.device.type == "cpu" and tensor.layout == torch.strided else 0
            hooks = len(tensor._post_accumulate_grad_hooks or ()) if tensor.is_leaf and tensor.requires_grad else 0
            state.append((name, id(tensor), pointer, tensor.dtype, tensor.requires_grad, hooks))
        state.append(model._compiled_call_impl)
        state.append("zero_grad" in vars(model))
    if isinstance(optimizer, torch.optim.Optimizer):
        state += [[id(p) for p in g["params"]] for g in optimizer.param_groups]
        state.append((len(optimizer._optimizer_step_pre_hooks), "zero_grad" in vars(optimizer)))
    return state


def refused(
    kind: type[Exception], *words: str, model: Any = None, optimizer: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Asserts that zc.compile raises ``kind`` with all ``words`` in its text, and that nothing has changed."""
    model = mlp() if model is None else model
    optimizer = adamw(model) if optimizer is None else optimizer
    values = {n: t.clone() for n, t in model.state_dict().items()} if isinstance(model, nn.Module) else {}
    before = state_of(model, optimizer)
    with pytest.raises(kind) as raised:
        zc.compile(model, optimizer, **options)
    for word in words:
        assert word in str(raised.value), f"{word!r} is missing in: {raised.value}"
    assert state_of(model, optimizer) == before, "an error changed something"
    for name, value in values.items():
        if value.device.type == "cpu" and value.layout == torch.strided:
            assert torch.equal(value, model.state_dict()[name])
    return model, optimizer


# --- options ---


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"stage": 4}, ["stage", "1, 2, 3", "4"]),
        ({"stage": "two"}, ["stage", "'two'"]),
        ({"stage": True}, ["stage", "True"]),
        ({"backend": "nvfuser"}, ["backend", "'nvfuser'", "'inductor', 'aot_eager', 'eager'"]),
        ({"reduce": "sum"}, ["reduce", "'sum'", "'exact', 'native'"]),
        ({"param_dtype": torch.int8}, ["param_dtype", "torch.int8", "torch.bfloat16"]),
        ({"param_dtype": "bf16"}, ["param_dtype", "'bf16'", "torch.bfloat16"]),
        ({"reduce_dtype": torch.complex64}, ["reduce_dtype", "torch.complex64", "torch.float32"]),
        ({"offload": "nvme"}, ["offload", "'nvme'"]),
        ({"bucket_nbytes": 0}, ["bucket_nbytes", "0"]),
        ({"bucket_nbytes": 1.5}, ["bucket_nbytes", "1.5"]),
        ({"num_buffers": 0}, ["num_buffers", "0"]),
        ({"overlap": "yes"}, ["overlap", "'yes'"]),
        ({"fullgraph": 1}, ["fullgraph", "1"]),
        ({"dynamic": "auto"}, ["dynamic", "'auto'", "None, True, False"]),
        ({"mode": "fast"}, ["mode='fast'"]),
        ({"mode": "reduce-overhead"}, ["mode='reduce-overhead'", "CUDA graphs", "max-autotune-no-cudagraphs"]),
        ({"options": {"triton.cudagraphs": True}}, ["options", "CUDA graphs", "overwrites"]),
        ({"options": {"max_fusion": 7}}, ["max_fusion"]),
        ({"options": "max_fusion"}, ["options", "'max_fusion'", "dict"]),
        ({"mode": "default", "options": {}}, ["mode='default'", "options={}", "one of them"]),
        ({"mode": "default", "backend": "aot_eager"}, ["mode='default'", "'aot_eager'", "'inductor'"]),
        ({"dynamic": True, "backend": "eager"}, ["dynamic=True", "'eager'", "'aot_eager'"]),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_unknown_options_list_the_valid_ones(option: dict[str, Any], words: list[str]) -> None:
    """A misspelt option that is taken for a default trains something else than what was asked for."""
    refused(zc.PlanError, *words, **option)
    assert issubclass(zc.PlanError, ValueError)


def test_stage_1_does_not_round_what_it_summed() -> None:
    """deepspeed#7985: a narrower reduce_dtype would round the fp32 sum of microbatches, so stage 1 says no."""
    refused(zc.PlanError, "stage 1", "torch.bfloat16", stage=1, reduce_dtype=torch.bfloat16)


def test_float64_gradients_are_not_rounded_on_the_wire() -> None:
    """reduce_rows sums rows of float64 into float64 alone: the first backward would fail on the comm thread."""
    refused(zc.PlanError, "float64", "torch.float32", model=mlp().double(), reduce_dtype=torch.float32)


# --- models ---


def test_no_trainable_parameter() -> None:
    """The optimizer of a frozen model steps without an effect, which nobody wants to find out later."""
    model = mlp()
    optimizer = adamw(model)
    refused(zc.PlanError, "no trainable parameter", model=model.requires_grad_(False), optimizer=optimizer)


def test_not_a_module_and_not_an_optimizer() -> None:
    """The arguments the other way round are the commonest mistake."""
    model = mlp()
    refused(TypeError, "nn.Module", "AdamW", model=adamw(model), optimizer=model)
    refused(TypeError, "Optimizer", "list", model=model, optimizer=list(model.parameters()))


def test_several_devices() -> None:
    """One flat buffer lies on one device."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    refused(zc.PlanError, "1.weight", "meta", model=model)


def test_two_parameters_share_part_of_a_storage() -> None:
    """DDP and DeepSpeed reduce such a storage twice; flat_param would tear it apart."""
    model = mlp()
    base = torch.randn(40)
    model.register_parameter("left", nn.Parameter(base[:30]))
    model.register_parameter("right", nn.Parameter(base[20:]))
    refused(zc.PlanError, "left", "right", "storage", model=model)


def test_parameters_side_by_side_in_one_storage_are_fine() -> None:
    """The control: neighbours that do not overlap (cuDNN's flat RNN weights) are no mistake."""
    model = mlp()
    base = torch.randn(40)
    model.register_parameter("left", nn.Parameter(base[:20]))
    model.register_parameter("right", nn.Parameter(base[20:]))
    zc.compile(model, adamw(model), backend="eager")
    assert torch.equal(model.left, base[:20]) and torch.equal(model.right, base[20:])


def test_a_gradient_that_is_there_already() -> None:
    """It was not reduced over ranks: to take it or to drop it would both be wrong in silence."""
    model = mlp()
    mean_square(model, vectors()(0, 0, 0)).backward()
    refused(zc.PlanError, "0.weight", "zero_grad", model=model)


def test_compiling_twice() -> None:
    """The second call would take slices of slices."""
    model = mlp()
    optimizer = adamw(model)
    zc.compile(model, optimizer, backend="eager")
    refused(zc.PlanError, "compiled already", model=model, optimizer=optimizer)


def test_an_optimizer_that_another_model_has_compiled() -> None:
    """A deepcopy of the model with the first one's optimizer: the optimizer holds slices that the model lacks."""
    model = mlp()
    optimizer = adamw(model)
    zc.compile(model, optimizer, backend="eager")
    other = mlp()
    refused(zc.PlanError, "model lacks", model=other, optimizer=optimizer)


def test_functions_on_a_model_that_was_not_compiled() -> None:
    """zc.no_sync on the wrong object (the wrapper, a submodule) would declare nothing."""
    model = mlp()
    calls: list[Callable[[], Any]] = [
        lambda: zc.explain(model),
        lambda: zc.clip_grad_norm_(model, 1.0),
        lambda: zc.full_grad(model),
        lambda: zc.persistent_nbytes(model),
        lambda: zc.no_sync(model).__enter__(),
    ]
    for call in calls:
        kind, text = message_of(call)
        assert kind == "PlanError" and "zc.compile" in text
    optimizer = adamw(model)
    for other in (None, optimizer):
        assert f"not a {type(other).__name__}" in message_of(partial(zc.close, other))[1]
    zc.compile(model, optimizer, backend="eager")
    mean_square(model, vectors()(0, 0, 0)).backward()
    before = zc.full_grad(model)["0.weight"]
    for bad in ("1", -1.0, float("nan"), None):
        kind, text = message_of(partial(zc.clip_grad_norm_, model, bad))
        assert kind == "ValueError" and repr(bad) in text
    assert before.equal(zc.full_grad(model)["0.weight"])


@pytest.mark.parametrize("make", [torch.jit.script, lambda part: torch.jit.trace(part, torch.ones(2, 16))])
def test_modules_of_torchscript_read_parameters_from_cpp(make: Callable[..., nn.Module]) -> None:
    """Its code meets no class of parameters, and a module of torch.jit.script takes no hook."""
    for is_whole in (True, False):
        model = make(mlp()) if is_whole else nn.Sequential(nn.Linear(16, 16), make(mlp()))
        name = "the model" if is_whole else "1 was"
        for options in ({"stage": 3}, {"overlap_gather": True}):
            refused(zc.PlanError, name, "torch.jit", next(iter(options)), model=model, optimizer=sgd(model), **options)
    zc.compile(model, sgd(model), stage=2, backend="eager")
    before = model[0].weight.detach().clone()
    model(torch.ones(2, 16)).sum().backward()
    assert next(model[1].parameters()).grad is not None and model[0].weight.equal(before)
    zc.close(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# --- optimizers ---


def test_an_optimizer_with_a_parameter_that_the_model_lacks() -> None:
    """An optimizer made before the model was replaced: its parameters would never change again."""
    model, old = mlp(), mlp()
    optimizer = AdamW([*model.parameters(), old[0].weight])
    refused(zc.PlanError, "(16, 16)", "model lacks", model=model, optimizer=optimizer)


def test_after_an_error_the_corrected_call_works() -> None:
    """Nothing half-made stays behind: the same two objects compile and train."""
    model, optimizer = refused(zc.PlanError, "stage", stage=4)
    zc.compile(model, optimizer, backend="eager")
    before = model[0].weight.detach().clone()
    mean_square(model, vectors()(0, 0, 0)).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


# --- ranks ---


def test_torchrun_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would train alone, and nobody would notice until the losses are compared."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(zc.PlanError, "WORLD_SIZE is 2", "init_process_group")


@pytest.mark.parametrize(
    ("says", "options"),
    [
        ("that zc has compiled and whose", {}),
        ("that zc has compiled with stage=3: ", {"stage": 3}),
        ("that zc has compiled with shard_frozen=True: ", {"shard_frozen": True}),
    ],
)
def test_a_parameter_of_another_compiled_model_is_named(says: str, options: dict[str, Any]) -> None:
    """It was said to have a post-accumulate-grad hook, which is zc's own of the other model; where that has shards, to
    be a frozen one's fault, or a broadcast of zc.compile raised."""
    first = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    first[0].weight.requires_grad_("shard_frozen" not in options)
    of_first = torch.optim.SGD((p for p in first.parameters() if p.requires_grad), lr=0.1)
    zc.compile(first, of_first, backend="eager", **options)
    second = nn.Sequential(first[0], nn.Linear(4, 4))
    if options:  # there a frozen one is refused, too
        first[0].requires_grad_(False)
    of_second = torch.optim.SGD((p for p in second.parameters() if p.requires_grad), lr=0.1)
    with pytest.raises(zc.PlanError, match=f"parameter 0.weight is one of another model, Sequential, {says}"):
        zc.compile(second, of_second, backend="eager")


@pytest.mark.parametrize("name", ["", "step", "zero_grad", "state_dict", "load_state_dict", "add_param_group", "eval"])
def test_another_method_than_the_class_had_is_refused(name: str) -> None:
    """The one of before ran on, in silence: with ``step``, 38 % off. No name: another class."""

    class Own(torch.optim.SGD):
        def eval(self) -> None:
            for param in (param for group in self.param_groups for param in group["params"]):
                param.data.mul_(2)

    model = nn.Linear(4, 4)
    optimizer = Own(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before, method = model.weight.detach().clone(), getattr(optimizer, name or "step")
    if name:
        setattr(Own, name, lambda *_: None)
    else:
        optimizer.__class__ = torch.optim.Adam  # type: ignore[assignment]
    says = f"the {name or 'step'} of (Own|Adam) is another one than that which zc.compile has taken"
    with pytest.raises(zc.ZcError, match=says):
        method(*[{}][: name in ("load_state_dict", "add_param_group")])
    assert torch.equal(before, model.weight) and model.weight.grad is not None


@pytest.mark.parametrize("says", ["has layout torch.sparse_coo", "is nested"])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_what_takes_no_values_of_rank_0_is_refused_by_name(kind: str, says: str) -> None:
    """torch's error named no tensor, and came when hooks were in place."""
    model, eye = nn.Linear(4, 4), torch.eye(4)
    eye = eye.to_sparse() if "sparse" in says else torch.nested.nested_tensor([eye])
    model.eye = nn.Buffer(eye) if kind == "buffer" else nn.Parameter(eye, requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    with pytest.raises(zc.PlanError, match=rf"{kind} eye {says}.*: zc can't copy rank 0's values into it"):
        zc.compile(model, optimizer, backend="eager")
    del model.eye
    model.eye = eye
    zc.compile(model, optimizer, backend="eager")
    zc.close(model)


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_what_lies_in_a_weights_memory_is_refused_by_name(kind: str) -> None:
    """Under DDP it follows the updates. It kept the first values, in silence: 97 % off in a forward that reads both."""
    model = nn.Linear(4, 4)
    row = model.weight.data[1]
    model.row = nn.Buffer(row) if kind == "buffer" else nn.Parameter(row, requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
    with pytest.raises(zc.PlanError, match=r"weight and row share a part of one storage .* give row memory of its own"):
        zc.compile(model, optimizer, backend="eager")
    model.row = type(model.row)(row.clone(), requires_grad=False) if kind == "parameter" else nn.Buffer(row.clone())
    zc.compile(model, optimizer, backend="eager")
    zc.close(model)


@pytest.mark.parametrize("kind", ["buffer", "frozen", "trained", "inference"])
def test_what_a_recompile_adds_is_checked_as_zc_compile_checks_it(kind: str) -> None:
    """Only what was added together was compared. In stage 3 zc.close then met a frozen bucket that was empty."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager", stage=3 if kind == "frozen" else 2)
    with torch.inference_mode(kind == "inference"):
        model[0] = nn.Linear(4, 4)
    row = model[1].weight.data[1] if kind == "trained" else model[0].weight.data[1]
    if kind in ("frozen", "buffer"):
        model.row = nn.Parameter(row, requires_grad=False) if kind == "frozen" else nn.Buffer(row)
    elif kind == "trained":
        model[0].bias = nn.Parameter(row)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(zc.PlanError, match="under torch.inf" if kind == "inference" else "share a part of one storage"):
        zc.recompile(model)
    if kind in ("frozen", "buffer"):
        model.row.data = row.clone()
        zc.recompile(model)
    zc.close(model)


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_what_inference_mode_made_is_refused_by_name(kind: str) -> None:
    """torch's error named no tensor: for a buffer in zc.compile, for a parameter in the first forward."""
    model = nn.Linear(4, 4)
    with torch.inference_mode():
        if kind == "buffer":
            model.mask = nn.Buffer(torch.ones(4))
        else:
            model = nn.Linear(4, 4)
    refused(zc.PlanError, f"{kind} {'mask' if kind == 'buffer' else 'weight'} was made under", ".clone()", model=model)


@pytest.mark.parametrize(
    "call", ["compile", "recompile", "load", "load_state_dict", "optimizer", "full_grad", "close"]
)
@pytest.mark.parametrize("stage", [2, 3])
def test_calls_inside_inference_mode_make_plain_tensors(call: str, stage: int, tmp_path: Path) -> None:
    """The next forward or step ended in torch's error, "Inference tensors cannot be saved for backward"."""
    model = mlp()
    model[0].requires_grad_(call != "recompile")
    optimizer, options = adamw(model), {"backend": "eager", "stage": stage}
    x = torch.randn(4, model[0].in_features)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.inference_mode(call == "compile"):
        zc.compile(model, optimizer, **options)
    step()
    zc.save(tmp_path / "saved", model, optimizer)
    state = {"model": zc.full_state_dict(model), "optimizer": zc.full_optimizer_state(model, optimizer)}
    model[0].requires_grad_()
    calls: dict[str, Callable[[], object]] = {
        "recompile": lambda: zc.recompile(model),
        "load": lambda: zc.load(tmp_path / "saved", model, optimizer),
        "load_state_dict": lambda: zc.load_state_dict(model, optimizer, state),
        "optimizer": lambda: optimizer.load_state_dict(state["optimizer"]),
        "full_grad": lambda: zc.full_grad(model),
        "close": lambda: zc.close(model),
    }
    with torch.inference_mode():
        calls.get(call, bool)()
    if call == "close":
        assert not any(param.is_inference() for param in model.parameters())
    else:
        step()
    zc.close(model)


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_what_was_expanded_is_refused_by_name(kind: str, shape: tuple[int, ...]) -> None:
    """torch's error named no tensor, and came when hooks were in place. Dimensions of one element do no harm."""
    model, mask = torch.nn.Linear(4, 4), torch.ones((*shape[:-1], 1)).expand(shape)
    if kind == "buffer":
        model.register_buffer("mask", mask)
    else:
        model.mask = nn.Parameter(mask, requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: param.data_ptr() for name, param in model.named_parameters()}
    with pytest.raises(zc.PlanError, match=rf"{kind} mask \(.*4,?\) was made by expand: its strides .* by \.clone\(\)"):
        zc.compile(model, optimizer, backend="eager")
    assert before == {name: param.data_ptr() for name, param in model.named_parameters()}
    model.mask.data = model.mask.clone()
    model.register_buffer("one", torch.ones(1).expand(1, 1))
    model.register_buffer("none", torch.ones(1, 0).expand(4, 0))
    zc.compile(model, optimizer, backend="eager")
    zc.close(model)
