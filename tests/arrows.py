"""Which module may import which, and where torch's private names stand: `python tests/arrows.py`, in `make lint`.

import-linter knows neither folders that are installed inside another, nor the length of a chain, nor private names.
"""

import ast
import re
import sys
from pathlib import Path

LONGEST = 11  # modules in a chain of imports
PRIVATE = ("zc.torch_private", "zc.kernels._private")  # kernels import nothing of zc: they have a file of their own
# of the root, for every room
LEAVES = {"errors", "log", "version", "config", "machine", "torch_private"}
# room -> what it never imports, or the only things that it does; why. "root": what is in zc/ itself and no leaf
ARROWS = {
    "kernels": ("only:", "a kernel knows tensors only, and can be tested and taken on its own"),
    "planning": ("only: errors", "a plan has no tensor and no rank, so it is the same everywhere"),
    "schedule": ("only: planning errors torch_private", "what is proved must not depend on what runs it"),
    "passes": ("torch.distributed engine ranks compiler optim offload checkpoint report root", "all ranks, one graph"),
    "ranks": ("passes engine compiler optim offload checkpoint report root", "how ranks meet is not what they train"),
    "engine": ("weights compiler optim offload checkpoint report root", "a gradient's path runs without wings"),
    "weights": ("compiler optim offload checkpoint report root", "who reads a weight does not matter to it"),
    "compiler": ("optim offload checkpoint report root", "a graph knows no optimizer"),
    "optim": ("compiler checkpoint report root", "an update compiles, saves and prints nothing"),
    "offload": ("compiler optim checkpoint report root", "a wing: the optimizer calls it"),
    "checkpoint": ("compiler report api", "a wing: zc.registry knows what a model was compiled to"),
    "report": ("compiler api", "a wing: what it shows is there already"),
    "checking": ("passes engine compiler weights schedule offload", "a wing: it asks zc what a program asks it"),
}


# What trains stages 1 and 2 is the core: these rooms, without the wings. A wing is one feature: a folder or
# some modules. `zc.compile` hands it over, and the core imports types of it alone. The root is neither: it
# puts them together.
CORE = ("planning", "schedule", "passes", "engine", "compiler", "ranks", "optim")
WINGS = {
    "weights": "zc.weights zc.planning.residency zc.passes.window_weights "
               "zc.passes.residency",
    "host": "zc.ranks.neighbours zc.ranks.hosts",
    "wire": "zc.planning.wire",
    "watch": "zc.ranks.watch",
    "agree": "zc.engine.announcements",
    "owners": "zc.planning.ownership zc.engine.owners",
    "offload": "zc.offload zc.passes.offload_gradients",
    "blocks": "zc.planning.blocks zc.compiler.blocks zc.schedule.rebase",
    "in_place": "zc.passes.write_in_place",
    "buffers": "zc.engine.buffer_sync",
    "checkpoint": "zc.checkpoint", "report": "zc.report", "integrations": "zc.integrations",
    "checking": "zc.checking",
    "the order of the passes, those of wings included": "zc.passes.pipeline",
}  # fmt: skip


def wing_of(module: str) -> str | None:
    names = ((wing, name) for wing, named in WINGS.items() for name in named.split())
    return next((wing for wing, name in names if module == name or module.startswith(f"{name}.")), None)


def imports_of_wings(trees: dict[str, ast.Module]) -> list[str]:
    """What the core imports of wings, in functions, too. The types of a wing may have their names there: what type
    checkers alone see is not loaded."""
    wrong = []
    for name, tree in trees.items():
        if wing_of(name) or name.split(".")[1:2] not in [[room] for room in CORE]:
            continue
        for what, line, how in imports(tree):
            target = module_of(what, trees)
            if how != "type" and target and (wing := wing_of(target)):
                wrong.append(f"{name}:{line}: the core imports {target} of {wing}, a wing")
    return wrong


def module_of(what: str, trees: dict[str, ast.Module]) -> str:
    """The module that has ``what``, a module or a name in one; "" if it is none of zc's."""
    while what and what not in trees:
        what = what.rpartition(".")[0]
    return what


def modules(root: Path) -> dict[str, ast.Module]:
    """Every module by name. Links are left out: passes and kernels are read where they lie."""
    by_name = {}
    for top, name in (("zc", "zc"), ("passes", "zc.passes"), ("kernels", "zc.kernels")):
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root / top).with_suffix("").parts
            if not (root / top / parts[0]).is_symlink():
                by_name[".".join((name, *(p for p in parts if p != "__init__")))] = ast.parse(path.read_text())
    return by_name


def imports(tree: ast.AST, how: str = "load") -> list[tuple[str, int, str]]:
    """(what, line, how): by loading the module, by a call (in a function), or for type checkers alone."""
    result = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            result += [(prefix + alias.name, node.lineno, how) for alias in node.names]
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        call = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and how == "load"
        result += imports(node, "type" if typing else "call" if call else how)
    return result


def private_names(trees: dict[str, ast.Module]) -> list[str]:
    """Names with one underscore that zc does not define. An operator's may have one: graphs show it (aten._to_copy)."""
    kinds = (ast.Name, ast.Attribute, ast.Call, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    nodes = [(name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, kinds)]
    own = {"_replace", "_fields", "_asdict"} | {n.id for _, n in nodes if isinstance(n, ast.Name)}
    own |= {n.name for _, n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.attr for _, n in nodes if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") in ("self", "made")}
    wrong = []
    for module, node in nodes:
        said: list[str] = []
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") not in ("sys", "aten", "_aten"):
            said = [node.attr]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            said = [str(getattr(node.args[1], "value", ""))]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            named = [what for what, _, _ in imports(ast.Module([node], [])) if what.startswith("torch.")]
            said = [part for what in named for part in what.split(".")]
        if module not in PRIVATE and (bad := [n for n in said if re.match(r"_[A-Za-z]", n) and n not in own]):
            wrong.append(f"{module}:{node.lineno}: {bad[0]}: private names of torch stand in {PRIVATE[0]} alone")
    return wrong


_FACTORIES = re.compile("empty|zeros|ones|full|eye|arange|linspace|tensor|scalar_tensor|rand|randn|randint|randperm")


def without_device(trees: dict[str, ast.Module]) -> list[str]:
    """Tensors on the program's default device (torch.set_default_device), wherever zc's others are."""
    wrong = []
    for module, node in ((name, node) for name, tree in trees.items() for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _FACTORIES.fullmatch(node.func.attr):
            names_none = not {"device", None} & {keyword.arg for keyword in node.keywords}
            if getattr(node.func.value, "id", "") == "torch" and names_none:
                wrong.append(f"{module}:{node.lineno}: torch.{node.func.attr} without a device")
    return wrong


def chains(graph: dict[str, set[str]]) -> list[str]:
    """Circles of what modules load, and a chain that is too long."""
    longest: dict[str, list[str]] = {}
    wrong: list[str] = []

    def walk(name: str, path: tuple[str, ...]) -> list[str]:
        if name in path:
            wrong.append("a circle: " + " -> ".join((*path[path.index(name) :], name)))
            return []
        if name not in longest:
            longest[name] = [name, *max((walk(n, (*path, name)) for n in sorted(graph[name])), key=len, default=[])]
        return longest[name]

    chain = max((walk(name, ()) for name in graph), key=len)
    if len(chain) > LONGEST:
        wrong.append(f"a chain of {len(chain)} modules, at most {LONGEST}: {' -> '.join(chain)}")
    return wrong


def check(trees: dict[str, ast.Module]) -> list[str]:
    rooms = {name.split(".")[1] for name in trees if name.count(".") > 1}
    wrong, graph = private_names(trees), {name: set[str]() for name in trees}
    for name, tree in trees.items():
        own = name.split(".")[1] if name.count(".") and name.split(".")[1] in rooms else "root"
        never, why = ARROWS.get(own, ("", ""))
        for what, line, how in imports(tree):
            target = module_of(what, trees)
            first = target.partition(".")[2].partition(".")[0]
            kinds = {first, first if first in rooms | LEAVES else "root"} if target else set()
            if what.startswith("torch.distributed"):
                kinds = {"torch.distributed"}
            is_bad = kinds & set(never.split())
            if own != "integrations" and "integrations" in kinds:  # on top: each module needs its framework
                is_bad, why = kinds, "nothing of zc needs somebody else's framework"
            if never.startswith("only:"):
                is_bad = kinds - {own, *never.split()}
            if how != "type" and is_bad:
                wrong.append(f"{name}:{line}: {own} -> {target or what}: {why}")
            if how == "load" and target and target != name:
                graph[name].add(target)
    return wrong + without_device(trees) + imports_of_wings(trees) + chains(graph)


if __name__ == "__main__":
    errors = check(modules(Path(__file__).resolve().parents[1]))
    print(*errors, sep="\n")
    sys.exit(bool(errors))
