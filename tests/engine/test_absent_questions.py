"""Stage 3: every function of torch's that takes one tensor, on a parameter without bytes: as on a plain parameter, or
refused by name. This file runs as a program of its own, since a read that is let through ends the process."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import zc
from zc import torch_private

X = torch.ones(3, 4)
# what code asks of parameters that it only counts, prints, compares or cuts; a plain parameter is the oracle
ASKED: dict[str, Callable[[nn.Parameter], Any]] = {
    "result_type": lambda p: torch.result_type(p, X.double()),
    "result_type of another": lambda p: torch.result_type(X, p),
    "can_cast": lambda p: torch.can_cast(p.dtype, torch.float64),
    "typename": torch.typename,
    "T": lambda p: p.T.shape,
    "T.T": lambda p: p.T.T.is_contiguous(),
    "a row": lambda p: p[0].stride(),
    "some rows": lambda p: p[1:, ::2].stride(),
    "rows": lambda p: [row.shape for row in p],
    "view": lambda p: p.view(-1).numel(),
    "reshape": lambda p: p.reshape(2, 6).shape,
    "permute": lambda p: p.permute(1, 0).stride(),
    "chunk": lambda p: [part.shape for part in p.chunk(2)],
    "unsqueeze": lambda p: p.unsqueeze(0).shape,
    "expand": lambda p: p.expand(2, 3, 4).stride(),
    "expand_as": lambda p: p.expand_as(torch.ones(2, 3, 4)).grad_fn is not None,
    "its node": lambda p: p.expand_as(p).grad_fn.next_functions[0][0].name(),  # type: ignore[union-attr]
    "a view of data": lambda p: p.data.T[0].shape,
    "data's dtype": lambda p: p.data.is_signed(),
    "as another's view": lambda p: X.view_as(p).shape,
    "equal to nothing": lambda p: p == None,  # noqa: E711
    "float() of a float32": lambda p: p.float() is p,
    "empty_strided": lambda p: p.new_empty_strided((2,), (1,)).shape,
}
NAMES = (
    "dim_order", "is_signed", "is_conj", "is_neg", "is_pinned", "is_shared", "is_inference", "is_distributed", "type",
    "storage_type", "retain_grad", "sparse_dim", "dense_dim", "get_device", "__len__", "__dir__", "contiguous", "t",
)  # fmt: skip
ATTRIBUTES = ("is_cpu", "is_mps", "is_xpu", "is_xla", "is_sparse_csr", "names", "_base", "T", "mT", "H", "real")
ASKED |= {name: lambda p, name=name: getattr(p, name)() for name in NAMES}
ASKED |= {name: lambda p, name=name: getattr(p, name) for name in ATTRIBUTES}
OWN = frozenset(f"Tensor.{name}" for name in (  # of the object, or of the class that zc gives it
    "__firstlineno__", "__static_attributes__",  # since Python 3.13
    "__hash__", "__module__", "__repr__", "__weakref__", "_cdata", "_post_accumulate_grad_hooks",
))  # fmt: skip


def every_function() -> dict[str, Callable[[nn.Parameter], Any]]:
    functions: dict[str, Callable[[nn.Parameter], Any]] = {}
    for name in sorted(set(dir(Tensor)) - set(dir(object)) | {"__hash__", "__repr__"}):
        if not name.startswith("__torch_"):
            functions[f"Tensor.{name}"] = lambda p, name=name: call(getattr(p, name))
    for func in torch.overrides.get_testing_overrides():
        name = torch.overrides.resolve_name(func) or str(func)
        if not name.startswith("torch.Tensor"):
            functions[name] = lambda p, func=func: func(p)
    return functions


def call(attribute: Any) -> Any:
    is_of_tensor = callable(attribute) and not isinstance(attribute, (Tensor, type))
    return attribute() if is_of_tensor else attribute


def described(value: Any) -> Any:
    """Numbers and names as they are, of a tensor its geometry."""
    if isinstance(value, Tensor):
        return ["tensor", list(value.shape), list(value.stride()), str(value.dtype), str(value.device)]
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    return (
        str(value)
        if isinstance(value, (bool, int, float, str, torch.dtype, torch.device, type))
        else type(value).__name__
    )


def outcome(function: Callable[[nn.Parameter], Any], param: nn.Parameter) -> Any:
    try:
        return described(function(param))
    except zc.ZcError as error:
        return "refused" if "has no bytes" in str(error) else "error"
    except Exception:  # noqa: BLE001  (torch's own, whatever the function is)
        return "error"


def ask_all() -> None:
    """Prints the name before each call, since one may be the last; then [name, of the absent one, of the plain one]."""
    warnings.simplefilter("ignore")
    net = nn.Sequential(nn.Linear(4, 3))
    zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, backend="eager")
    for name, function in {**ASKED, **every_function()}.items():
        print(name, file=sys.stderr, flush=True)
        plain = nn.Linear(4, 3).weight  # a new one: some of the functions write
        print(json.dumps([name, outcome(function, net[0].weight), outcome(function, plain)]))  # type: ignore[arg-type]


def test_functions_that_read_no_element_work_and_others_are_refused() -> None:
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, f"the process ended in {run.stderr.splitlines()[-1]}"
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    got = {name: absent for name, absent, _ in rows}
    wanted = {name: plain for name, _, plain in rows}
    assert len(got) > 1000
    assert {name: got[name] for name in ASKED} == {name: wanted[name] for name in ASKED}
    # an error of plain torch's, such as a missing argument, may come as the refusal
    differ = [name for name in got if got[name] not in (wanted[name], "refused") and name not in OWN]
    assert not differ, [(name, got[name], wanted[name]) for name in differ]
    reads = ("sum", "clone", "tolist", "item", "numpy", "data_ptr", "sort", "untyped_storage", "share_memory_")
    assert {got[f"Tensor.{name}"] for name in reads} == {"refused"}


def test_a_view_of_a_parameter_without_bytes_refuses_reads() -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, backend="eager")
    weight = net[0].weight
    views = {
        "T": weight.T,
        "a row": weight[0],
        "T of data": weight.data.T,
        "a chunk": weight.chunk(2)[1],
        "view": weight.view(-1),
    }
    views |= dict(zip("abc", weight, strict=True))
    for name, view in views.items():
        for read in (Tensor.sum, Tensor.clone, Tensor.tolist, lambda x: x + 1, lambda x: x.add_(1), Tensor.numpy):
            with pytest.raises(zc.ZcError, match=r"a view of a parameter that has no bytes.*zc\.whole_parameters"):
                pytest.fail(f"{name}: {read(view)}")  # type: ignore[operator]
    with pytest.raises(zc.ZcError, match="has no bytes"):
        weight[0] = 1.0  # type: ignore[index]
    with zc.whole_parameters(net):
        assert weight.T.sum() == weight.sum()
    zc.close(net)


def test_in_a_forward_a_question_gathers_nothing_and_a_view_is_one_of_values() -> None:
    """A read gathers its bucket, which all ranks of a group must do together; a question one rank may ask alone."""
    nbytes: list[int] = []

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x: Tensor, other: nn.Parameter) -> Tensor:
            assert other.is_signed() and torch.typename(other) == "torch.FloatTensor"
            with torch_private.without_torch_function():
                nbytes.append(other.untyped_storage().nbytes())
            return x * self.gain.expand_as(x) + other[:1, :1].sum()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Asking(), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x, self.last.weight)

    net = Net()
    nn.init.ones_(net.last.weight)
    zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, backend="eager", bucket_nbytes=16)
    assert net(torch.ones(2, 4)).equal(torch.full((2, 4), 3.0)) and nbytes == [0]
    zc.close(net)


def test_a_layer_called_by_itself_may_read_its_weights_in_a_hook_of_its_own() -> None:
    """hifi-gan's loop calls its discriminators, parts of what the optimizer trains."""
    x = torch.ones(2, 4)
    layer = nn.utils.spectral_norm(nn.Linear(4, 3))
    net, expected = nn.ModuleList([layer]), copy.deepcopy(layer)(x)
    zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, backend="eager")
    assert layer(x).equal(expected)
    zc.close(net)


if __name__ == "__main__":
    ask_all()


def test_what_a_closure_reads_is_no_fault_of_its_optimizer() -> None:
    class Loss(nn.Module):
        def forward(self, param: nn.Parameter) -> Tensor:
            return param.norm()

    class WithLoss(SGD):
        def step(self, closure: Any = None) -> Any:  # of a framework, which wraps the closure once more
            return super().step(lambda: Loss()(param))

    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, stage=3, backend="eager")
    param = model.weight
    closures = {"a function": lambda: optimizer.step(lambda: param.norm())}
    closures["a module"] = lambda: WithLoss(nn.Linear(2, 2).parameters(), lr=0.1).step()
    for what, call in closures.items():
        with pytest.raises(zc.ZcError, match=r"norm reads a parameter .* Use `with zc.whole_parameters") as raised:
            call()
        assert "was not given" not in str(raised.value), what
    zc.close(model)
