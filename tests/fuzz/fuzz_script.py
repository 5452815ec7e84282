"""A program as Python: what the ranks run and, after a head of its own, a script for torchrun."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent
from typing import Any

import fuzz_models
import fuzz_optimizers
from fuzz_order import orders, shared
from fuzz_program import PART, Launch, Op, Program, suffix

STANDIN = (Path(__file__).parent / "fuzz_standin.py").read_text()
CLEARS = {
    "optimizer": "optimizer.zero_grad()",
    "optimizer_zeros": "optimizer.zero_grad(set_to_none=False)",
    "model": "model.zero_grad()",
    "model_zeros": "model.zero_grad(set_to_none=False)",
    "class": "type(optimizer).zero_grad(optimizer)",
    "class_zeros": "type(optimizer).zero_grad(optimizer, set_to_none=False)",
    "params": "for p in model.parameters():\n    p.grad = None",
    "slices": 'for group in optimizer.param_groups:\n    for p in group["params"]:\n        p.grad = None',
}
CLIPS = {
    "zc": "zc.clip_grad_norm_(model, {max_norm})",
    "stock": "torch.nn.utils.clip_grad_norm_(model.parameters(), {max_norm})",
    "stock_inf": 'torch.nn.utils.clip_grad_norm_(model.parameters(), {max_norm}, norm_type=float("inf"))',
}
WRITES = {
    "clamp": "p{data}.clamp_(-0.25, 0.25)",
    "halve": "p{data}.mul_(0.5)",
    "assign": "p.data = p.data * 0.5",
    "array": "p.detach().numpy()[...] *= 0.5",
}
BY_HAND = {
    "mul": "p.grad.mul_(0.5)",
    "assign": "p.grad = p.grad * 0.5",
    "clamp": "p.grad.clamp_(-0.05, 0.05)",
    "zeros": "p.grad = torch.zeros_like(p.grad)",
    "data": "p.grad.data.mul_(0.5)",
    "add": "p.grad += 0.01",
}
RESETS = {
    "pop": "optimizer.state.pop(model.get_parameter({name!r}), None)",
    "empty": "optimizer.state[model.get_parameter({name!r})] = {{}}",
    "clear": "optimizer.state.clear()",
    "zeros": "for state in optimizer.state.values():\n    for value in state.values():\n"
    "        if isinstance(value, torch.Tensor):\n            value.zero_()",
}
LEAVES = {
    "views": "taken = [p.detach() for p in model.parameters()]",
    "arrays": "taken = [torch.from_numpy(p.detach().numpy()) for p in model.parameters()]",
    "state": "state = model.state_dict()\n    taken = [state[name] for name, _ in model.named_parameters()]",
}
SIMPLE = {
    "step": "optimizer.step()",
    "grads": "note({k}, zc.full_grad(model))",
    "norms": "note({k}, [None if p.grad is None else p.grad.norm() for p in model.parameters()])",
    "weights": "note({k}, dict(model.named_parameters()))",
    "buffers": "note({k}, dict(model.named_buffers()))",
    "peek": "param = model.get_parameter({name!r})\n"
    "note({k}, torch.autograd.grad({of}, param, retain_graph=True, allow_unused=True)[0])",
    "collective": "total = ({of}).detach().clone()\ndist.all_reduce(total)\nnote({k}, total)",
    "lr": 'for group in optimizer.param_groups:\n    group["lr"] *= 0.5',
    "hook": "model.get_parameter({name!r}).register_hook(lambda grad: 0.5 * grad)",
    "snapshot": "kept = {{name: value.clone() for name, value in model.state_dict().items()}}",
    "restore": "model.load_state_dict(kept)",
    "save": 'zc.save(f"{{folder}}/{k}", model, optimizer)\nlatest = f"{{folder}}/{k}"',
    "load": "zc.load(latest, model, optimizer)",
    "freeze": "model.b{block}.requires_grad_(False)",
    "replace": "torch.manual_seed({seed})\nmodel.b{block} = nn.Linear({dim}, {dim}).to(WIDE)\n"
    'optimizer.add_param_group({{"params": list(model.b{block}.parameters())}})\nzc.recompile(model)',
    "buffers_written": "with torch.no_grad():\n    for buffer in model.buffers():\n"
    "        if buffer.is_floating_point():\n            buffer.add_(0.125 * rank)",
    "relaunch": "",
    "thaw": "model.b{block}.requires_grad_(True)\nzc.recompile(model)",
}  # fmt: skip


WHOLE = ("weights", "snapshot", "restore", "write")  # kinds that read or write values of parameters
NAMES = ("model", "net", "optimizer", "kept", "latest", "Net", "Fault", "loss", "DTYPE", "WIDE")  # one for each model
NAME = re.compile(rf"(?<![.\w])({'|'.join(NAMES)})\b")


def body(program: Program, launch: int = 0) -> str:
    """Models, compile and loop. Wants ``rank``, ``zc``, ``note(number, value)``, ``folder`` and torch's usual names."""
    parts = program.parts
    lines = [fuzz_optimizers.classes(*(part.optimizer for part in parts))]
    lines += [_renamed(number, _made(number, part, part.launches[launch], launch)) for number, part in enumerate(parts)]
    by_rank = orders(program, launch)
    for common in [*shared(parts, launch, by_rank[0]), None]:
        before = []  # what each rank runs by itself until then
        for places in by_rank:
            end = len(places) if common is None else places.index(common)
            before.append(places[:end])
            del places[: end + 1]
        if all(places == before[0] for places in before):
            lines += [_at(program, launch, place) for place in before[0]]
        else:
            for rank, places in enumerate(before):
                text = "\n".join(_at(program, launch, place) for place in places) or "pass"
                lines.append(f"if rank == {rank}:\n{indent(text, '    ')}")
        lines += [] if common is None else [_at(program, launch, common)]
    if launch + 1 < len(program.launches):
        save = f'zc.save(f"{{folder}}/launch{launch}%s", model, optimizer)'
        lines += [_renamed(number, save % suffix(number)) for number in range(len(parts))]
    return "\n".join(lines) + "\n"


def _made(number: int, part: Program, which: Launch, launch: int) -> str:
    """A model, compiled."""
    wide = "float64" if part.dtype == "float64" else "float32"
    options = ", ".join(f"{key}={_shown(value)}" for key, value in which.options.items() if key != "hosts")
    has_hosts = which.options.get("hosts", False)
    model = {**part.model, "frozen": which.frozen}
    lines = [
        f"DTYPE, WIDE = torch.{part.dtype}, torch.{wide}",
        "",
        "",
        fuzz_models.text(model),
        "",
        "torch.manual_seed(0)",
        f"model = Net().to(WIDE)  # {sum(1 for _ in fuzz_models.trainable(model))} trainable parameters",
        "params = list(model.parameters())",
        f"optimizer = {part.optimizer}",
        *(['os.environ["GROUP_RANK"] = str(rank)  # each rank stands for a host'] if has_hosts else []),
        f"net, optimizer = zc.compile(model, optimizer, {options})",
        *(['del os.environ["GROUP_RANK"]'] if has_hosts else []),
    ]
    if launch > 0:
        lines.append(f'zc.load(f"{{folder}}/launch{launch - 1}{suffix(number)}", model, optimizer)')
    return "\n".join(lines)


def _at(program: Program, launch: int, place: tuple[int, int]) -> str:
    number, k = place
    op = program.parts[number].ops[k]
    if "of" in op.args:
        op = Op(op.kind, {**op.args, "of": [PART * number + j for j in op.args["of"]]})
    text = _statement(PART * number + k, op)
    if op.kind in WHOLE and program.parts[number].launches[launch].options["stage"] == 3:
        text = "with zc.whole_parameters(model):\n" + indent(text, "    ")
    return _renamed(number, text)


def _renamed(number: int, text: str) -> str:
    return NAME.sub(rf"\1{suffix(number)}", text)


def _shown(value: Any) -> str:
    return f"torch.{value}" if value in ("bfloat16", "float32", "float64", "int8") else repr(value)


def _statement(k: int, op: Op) -> str:
    kind, args = op
    of = " + ".join(f"loss{j}" for j in args.get("of", ()))
    if kind == "forward":
        text = f"loss{k} = {_loss(args)}"
        text += " + 0.01 * sum(p.square().sum() for p in model.parameters())" if args["penalty"] else ""
        return _quietly(f"{text}\nnote({k}, loss{k})", args)
    if kind == "backward":
        return _quietly(f"({of}).backward({'retain_graph=True' if args['retain'] else ''})", args)
    if kind == "raise":
        caught = f"try:\n    ({of}).backward()\nexcept FloatingPointError:\n    pass"
        return f"Fault.armed = True\n{caught}\nFault.armed = False"
    if kind == "micro":
        return _quietly(f"for m in range({tuple(args['reps'])}[rank]):\n    {_loss(args, ' + m')}.backward()", args)
    if kind == "zero":
        if args["how"] == "one":
            return f"model.get_parameter({args['name']!r}).grad = None"
        return f"model.b{args['block']}.zero_grad()" if args["how"] == "part" else CLEARS[args["how"]]
    if kind == "clip":
        return f"note({k}, {CLIPS[args['how']].format(**args)})"
    if kind == "evaluate":
        mode = "torch.inference_mode()" if args["inference"] else "torch.no_grad()"
        return f"model.eval()\nwith {mode}:\n    note({k}, {_loss(args)})\nmodel.train()"
    if kind == "write":
        return _write(args)
    if kind == "by_hand":
        return f"for p in model.parameters():\n    if p.grad is not None:\n        {BY_HAND[args['how']]}"
    if kind == "reset":
        return RESETS[args["how"]].format(**args)
    if kind == "leave":
        return f"with zc.whole_parameters(model):\n    {LEAVES[args['how']]}\nnote({k}, taken)\ndel taken"
    return SIMPLE[kind].format(**{**args, "k": k, "of": of})


def _loss(args: dict[str, Any], more: str = "") -> str:
    use = tuple(tuple(heads) for heads in args["use"])
    scale = f"{args['scale']} * " if args.get("scale", 1.0) != 1.0 else ""
    return f"{scale}loss(net, rank, seed={args['seed']}{more}, rows={tuple(args['rows'])}, use={use})"


def _quietly(text: str, args: dict[str, Any]) -> str:
    if not args["quiet"]:
        return text
    return "with zc.no_sync(model):\n" + "\n".join(f"    {line}" for line in text.splitlines())


def _write(args: dict[str, Any]) -> str:
    data = ".data" if args["data"] else ""
    if args["what"] == "fill":
        text = f"model.get_parameter({args['name']!r}){data}.fill_(0.125)"
    else:
        text = f"for p in model.parameters():\n    {WRITES[args['what']].format(data=data)}"
        if args["walks"]:
            text = text.replace("model.parameters()", 'group["params"]')
            text = "for group in optimizer.param_groups:\n" + indent(text, "    ")
    return text if data else "with torch.no_grad():\n" + "\n".join(f"    {line}" for line in text.splitlines())


HEAD = '''"""{title}

{run}
With "ddp" after it: DistributedDataParallel(find_unused_parameters=True) in place of zc.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

{standin}

if "ddp" in sys.argv:
    zc = WithDdp()
else:
    import zc

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), [{folder}]
dist.broadcast_object_list(folder)
folder = folder[0]
torch.set_printoptions(precision=7)


def note(k, value):
    """What the two sides must agree on."""
    print(f"[rank {rank}] operation {k}: {value}", flush=True)


'''
TAIL = """
for model in [{models}]:
    zc.synchronize(model)
    with zc.whole_parameters(model):
        for name, param in model.named_parameters():
            print(f"[rank {rank}] {name}: {param.detach().flatten().tolist()}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def script(program: Program, title: str) -> str:
    """The program by itself: needs torch and zc, or torch alone for DDP."""
    launches = program.launches
    calls = [f"torchrun --nproc_per_node {which.world_size} THIS" for which in launches]
    folder, text = "tempfile.mkdtemp()", body(program)
    if len(launches) > 1:  # each finds what the one before it has saved
        calls = [f"{call} {launch}" for launch, call in enumerate(calls)]
        folder = 'f"{tempfile.gettempdir()}/saved-{os.getuid()}-" + os.path.basename(__file__)'
        texts = [indent(body(program, launch), "    ") for launch in range(len(launches))]
        text = "\n".join(f'if "{launch}" in sys.argv:\n{text}' for launch, text in enumerate(texts))
    models = ", ".join(f"model{suffix(number)}" for number in range(len(program.parts)))
    uses = {"title": title, "run": "\n".join(calls), "standin": STANDIN.strip(), "folder": folder}
    head, tail = HEAD, TAIL.replace("{models}", models)
    for key, value in uses.items():
        head = head.replace(f"{{{key}}}", value)
    return head + text + tail
