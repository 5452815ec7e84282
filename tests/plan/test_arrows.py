"""tests/arrows.py: the repository as it is passes, and each kind of arrow is found where it is planted."""

from __future__ import annotations

import ast
from pathlib import Path

import arrows
import pytest

pytestmark = pytest.mark.check

ROOT = Path(__file__).resolve().parents[2]
PLANTED = [  # file, what is written at its end, what is said
    ("kernels/write_grads.py", "from zc.errors import ZcError", "kernels -> zc.errors"),
    ("kernels/write_grads.py", "import torch.distributed as dist", "kernels -> torch.distributed"),
    ("passes/verify.py", "from torch.distributed import get_rank", "passes -> torch.distributed.get_rank"),
    ("passes/verify.py", "from zc.ranks.group import Group", "passes -> zc.ranks.group"),
    ("zc/planning/plan.py", "from zc.schedule import nodes", "planning -> zc.schedule.nodes"),
    ("zc/schedule/nodes.py", "from zc.passes import verify", "schedule -> zc.passes.verify"),
    ("zc/engine/ops.py", "def late():\n    from zc.compiler import backend", "engine -> zc.compiler.backend"),
    ("zc/optim/model.py", "import zc.checkpoint.files", "optim -> zc.checkpoint.files"),
    ("zc/checkpoint/files.py", "from zc.api import compile", "checkpoint -> zc.api"),
    ("zc/api.py", "from zc.integrations import seam", "root -> zc.integrations"),
    ("zc/planning/layout.py", "from zc.planning.plan import Plan", "zc.planning.layout -> zc.planning.plan"),
    ("zc/engine/buffers.py", "from zc.planning.wire import Rows", "the core imports zc.planning.wire of wire, a wing"),
    ("zc/engine/core.py", "def late():\n    import zc.ranks.watch", "the core imports zc.ranks.watch of watch, a wing"),
    ("zc/errors.py", "from torch._dynamo import config", "_dynamo: private names"),
    ("zc/errors.py", "import torch._inductor.config", "_inductor: private names"),
    ("zc/errors.py", "print(torch._C)", "_C: private names"),
    ("zc/errors.py", 'print(getattr(param, "_backward_hooks"))', "_backward_hooks: private names"),
    ("zc/errors.py", "print(param._backward_hooks)", "_backward_hooks: private names"),
    ("kernels/write_grads.py", "torch.zeros(3)", "torch.zeros without a device"),
    ("kernels/write_grads.py", "torch._foreach_mul_([], 1)", "_foreach_mul_: private names"),
]


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return arrows.modules(ROOT)


def with_line(trees: dict[str, ast.Module], file: str, line: str) -> dict[str, ast.Module]:
    """As if ``line`` stood at the end of ``file``."""
    name = ".".join(Path(file if file.startswith("zc") else f"zc/{file}").with_suffix("").parts)
    own = trees.get(name, ast.Module([], []))
    return {**trees, name: ast.Module([*own.body, *ast.parse(line).body], [])}


@pytest.fixture(scope="module")
def errors_of_all(trees: dict[str, ast.Module]) -> list[str]:
    """With all that is planted at once: a check of the whole repository takes a second."""
    for file, line, _ in PLANTED:
        trees = with_line(trees, file, line)
    last = "__main__"
    for number in range(arrows.LONGEST):
        trees = with_line(trees, f"zc/chain_{number}.py", f"import zc.{last}")
        last = f"chain_{number}"
    return arrows.check(trees)


def test_the_repository_has_none(trees: dict[str, ast.Module]) -> None:
    """Nor is an import of the core by a wing one, or what type checkers alone see."""
    assert {"zc", "zc.passes.verify", "zc.kernels.write_grads", "zc.engine.operations"} <= trees.keys()
    wider = with_line(trees, "zc/offload/disk.py", "import zc.engine.param_checks")
    types = "if TYPE_CHECKING:\n    from zc.optim.model import ShardedModel\n    from zc.ranks.watch import Watch"
    assert arrows.check(with_line(wider, "zc/engine/ops.py", types)) == []


@pytest.mark.parametrize(("file", "line", "said"), PLANTED)
def test_a_planted_arrow_is_found(errors_of_all: list[str], file: str, line: str, said: str) -> None:
    assert any(said in text for text in errors_of_all), errors_of_all


def test_a_long_chain_is_found(errors_of_all: list[str]) -> None:
    assert any("modules, at most 11: zc.chain_10 -> zc.chain_9" in text for text in errors_of_all), errors_of_all
