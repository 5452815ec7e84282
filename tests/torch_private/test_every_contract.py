"""Each function of zc.torch_private has its contract in one of the files beside this one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import test_autograd_contracts
import test_compiler_contracts
import test_dynamo_contracts
import test_tensor_contracts
from contract import TESTED

from zc import torch_private
from zc.kernels import _private as kernels_private

pytestmark = pytest.mark.check
# importing them fills TESTED
FILES = (test_autograd_contracts, test_compiler_contracts, test_dynamo_contracts, test_tensor_contracts)


def test_every_function_has_its_contract() -> None:
    for module in (torch_private, kernels_private):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        ours = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        assert {name for name in ours if not name.startswith("_")} <= TESTED
