"""Item 6: code that walks an optimizer's parameters and state, as it may under DDP: averages, hooks, wrappers, and
methods of optimizer classes other than step."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models import seeded
from rows import STEPS, Row, Script, adamw, add, row, sgd
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import zc

BYTES = {"stage 3": "ZcError: with stage=3"}  # weights are read outside of a pass


def params_of(optimizer: Optimizer) -> Iterator[Any]:
    return (param for group in optimizer.param_groups for param in group["params"])


def whole(s: Script) -> contextlib.AbstractContextManager[Any]:
    """Where weights may be read and written in every stage."""
    return zc.whole_parameters(s.model) if s.is_zc else contextlib.nullcontext()


def noise(param: nn.Parameter, step: int) -> Tensor:
    """The same on every rank."""
    return torch.randn(param.shape, generator=seeded(7, step, param.numel())).to(param.dtype)


# --- methods of the class other than step ---


class ScheduleFree(Optimizer):
    """Schedule-free AdamW (arXiv:2405.15682) without its warmup: weights are y while it trains, x while it doesn't."""

    def __init__(self, params: Any, lr: float = 2.5e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "k": 0, "train_mode": True, "weight_sum": 0.0})

    @torch.no_grad()
    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def train(self) -> None:
        self._move(True)

    def _move(self, to_train: bool) -> None:
        for group in self.param_groups:
            beta1, _ = group["betas"]
            if group["train_mode"] is not to_train:
                for p in group["params"]:
                    state = self.state[p]
                    if "z" in state:
                        p.data.lerp_(state["z"], weight=1 - beta1 if to_train else 1 - 1 / beta1)
                group["train_mode"] = to_train

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            group["k"] += 1
            weight = group["lr"] ** 2
            group["weight_sum"] += weight
            c = weight / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["z"], state["exp_avg_sq"] = p.clone(), torch.zeros_like(p)
                square = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = p.grad / ((square / (1 - beta2 ** group["k"])).sqrt() + 1e-8)
                p.lerp_(state["z"], weight=c)
                p.add_(update, alpha=group["lr"] * (beta1 * (1 - c) - 1))
                state["z"].sub_(update, alpha=group["lr"])


@zc.elementwise
class ElementwiseScheduleFree(ScheduleFree):
    pass


def _in_bf16(s: Script) -> None:
    """The compiled side has bf16 parameters, if the row's name says so."""
    if s.is_zc and next(s.model.parameters()).dtype == torch.bfloat16:
        s.dtype = torch.bfloat16


def schedule_free(s: Script) -> None:
    _in_bf16(s)
    for step in range(STEPS):
        s.optimizer.train()
        s.loss(step).backward()
        s.update()
        s.optimizer.eval()
        with torch.no_grad():
            s.note(f"evaluation {step}", s.loss(step, 9))


for _kind, _class in {"": ScheduleFree, ", declared elementwise": ElementwiseScheduleFree}.items():
    for _what, _options in {
        "": {}, ", bf16 parameters": {"param_dtype": torch.bfloat16}, ", offload": {"offload": "cpu"},
    }.items():  # fmt: skip
        if not _kind or not _what.startswith(", bf16"):
            add(Row(f"schedule-free AdamW: eval() and train() between steps{_kind}{_what}", 6, schedule_free,
                    optimizer=_class, options=_options, tolerance=5e-2 if "bf16" in _what else 2e-5))  # fmt: skip


class Sophia(Optimizer):
    """As its repository has it: the Hessian is estimated by a method of its own, from a second backward."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "rho": 0.04})

    @torch.no_grad()
    def update_hessian(self) -> None:
        for group in self.param_groups:
            _, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"], state["hessian"] = torch.zeros_like(p), torch.zeros_like(p)
                state["hessian"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            beta1, _ = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"], state["hessian"] = torch.zeros_like(p), torch.zeros_like(p)
                mean = state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                ratio = (mean.abs() / (group["rho"] * 4 * state["hessian"] + 1e-15)).clamp(None, 1)
                p.addcmul_(mean.sign(), ratio, value=-group["lr"])


@row(6, "Sophia: update_hessian() from a backward of its own", optimizer=Sophia)
def sophia(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        if step % 2 == 0:
            s.loss(step, 1).backward()
            s.reduced()
            s.optimizer.update_hessian()
            s.optimizer.zero_grad(set_to_none=True)


class WithNorm(SGD):
    """Its method walks all parameters together, and returns a number."""

    def norm_of_weights(self) -> float:
        return float(sum((p.detach() ** 2).sum() for group in self.param_groups for p in group["params"]))

    def norm_of_gradients(self) -> float:
        return float(torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm())


@row(6, "a method of the optimizer's class that returns a norm over all weights",
     optimizer=lambda params: WithNorm(params, lr=0.1), refused=BYTES)  # fmt: skip
def norm_method(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        s.note(f"norm {step}", s.optimizer.norm_of_weights())


@row(6, "a method of the optimizer's class that returns a norm over all gradients",
     optimizer=lambda params: WithNorm(params, lr=0.1))  # fmt: skip
def gradient_norm_method(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.reduced()
        s.note(f"norm {step}", s.optimizer.norm_of_gradients())
        s.update()


class ClearsByItself(AdamW):
    """Its step clears the gradients, by its zero_grad or one by one."""

    by_hand = False

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        if self.by_hand:
            for param in params_of(self):
                param.grad = None
        else:
            self.zero_grad()
        return result


class ClearsByHand(ClearsByItself):
    by_hand = True


def never_cleared(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.optimizer.step()


add(Row("an optimizer whose step calls zero_grad itself", 6, never_cleared, optimizer=ClearsByItself))
add(Row("an optimizer whose step sets each .grad to None", 6, never_cleared, optimizer=ClearsByHand))

# --- wrappers ---


class SAM(Optimizer):
    """As its repository has it (davda54/sam): two backwards an update, and weights that come back through ``.data``."""

    def __init__(self, params: Any, base: Callable[..., Optimizer], rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, "adaptive": False, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in params_of(self) if p.grad is not None]), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(1.0 * p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for p in params_of(self):
            if p.grad is not None:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


def _sam(params: Any) -> SAM:
    return SAM(list(params), AdamW, lr=1e-2)


def sam(s: Script) -> None:
    _in_bf16(s)
    for step in range(STEPS):
        s.loss(step).backward()
        s.reduced()
        s.optimizer.first_step(zero_grad=True)
        s.loss(step).backward()
        s.reduced()
        s.optimizer.second_step(zero_grad=True)


for _what, _options in {
    "": {}, ", param_dtype=torch.bfloat16": {"param_dtype": torch.bfloat16}, ", offload": {"offload": "cpu"},
}.items():  # fmt: skip
    add(Row(f"SAM around AdamW{_what}", 6, sam, optimizer=_sam, options=_options,
            tolerance=5e-2 if "bf" in _what else 2e-5))  # fmt: skip


class Lookahead(Optimizer):
    """As its repositories have it: its groups are those of the optimizer inside."""

    def __init__(self, optimizer: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state: Any = defaultdict(dict)
        self.count = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group in self.param_groups:
                for fast in group["params"]:
                    if fast.grad is None:
                        continue
                    state = self.state[fast]
                    if "slow" not in state:
                        state["slow"] = fast.data.clone()
                    slow = state["slow"]
                    slow += (fast.data - slow) * self.alpha
                    fast.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self.optimizer.register_step_pre_hook(hook)


def lookahead(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.reduced()
        s.optimizer.step()
        s.optimizer.zero_grad()


for _what, _options in {
    "": {}, ", overlap_gather": {"overlap_gather": True}, ", offload": {"offload": "cpu"},
}.items():  # fmt: skip
    add(Row(f"Lookahead around AdamW{_what}", 6, lookahead, optimizer=lambda params: Lookahead(adamw(params)),
            refused=BYTES, options=_options))  # fmt: skip


class Holds(Optimizer):
    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        self.optimizers = [SGD(params[:2], lr=0.1), SGD(params[2:], lr=0.1)]


add(Row("an optimizer that holds two others", 6, lookahead, optimizer=Holds,
        refused={"always": "PlanError: holds several optimizers of its parameters: .optimizers[0] (SGD)"}))  # fmt: skip


class Keeps(Optimizer):
    """Takes its parameters from an attribute in ``step``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.params = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.params:
            p.sub_(p.grad, alpha=0.1)


add(Row("an optimizer that keeps its parameters in an attribute", 6, lookahead, optimizer=Keeps,
        refused={"always": "ZcError: it takes parameters from self.params"}))  # fmt: skip

# --- the state, by parameters ---


def _forget(s: Script, how: Callable[[Script, Any], Any]) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        if step == 2:
            how(s, s.model[0].weight)


def _fresh(s: Script, p: Any) -> None:
    s.optimizer.state = defaultdict(dict)


def _first_moment(s: Script, p: Any) -> None:
    del s.optimizer.state[p]["exp_avg"]
    s.optimizer.state[p]["exp_avg"] = torch.ones_like(p) if not s.is_zc else torch.ones(p.shape)


def _copied_state(s: Script, p: Any) -> None:
    other = s.model[2].weight
    for param in s.model.parameters():
        if "exp_avg" in s.optimizer.state[param]:
            s.optimizer.state[param]["exp_avg"] = s.optimizer.state[param]["exp_avg"] * 0.5
    assert other in s.optimizer.state


def _note_norms(s: Script, p: Any) -> None:
    for k, state in enumerate(s.optimizer.state.values()):
        s.note(f"norm of a first moment {k}", state["exp_avg"].norm())
        s.note(f"its count {k}", state["step"])
        s.note(f"its shape {k}", torch.tensor(state["exp_avg"].shape))


STATES: dict[str, Callable[[Script, Any], Any]] = {
    "state[p] = {}": lambda s, p: s.optimizer.state.__setitem__(p, {}),
    "state.pop(p)": lambda s, p: s.optimizer.state.pop(p),
    "del state[p]": lambda s, p: s.optimizer.state.__delitem__(p),
    'state[p]["exp_avg"].zero_()': lambda s, p: s.optimizer.state[p]["exp_avg"].zero_(),
    'state[p]["exp_avg"] = ones': _first_moment,
    'state[p]["exp_avg"].mul_(0.1) of all in state.values()': lambda s, p: [
        state["exp_avg"].mul_(0.1) for state in s.optimizer.state.values()
    ],
    'state[p]["exp_avg"] = state[p]["exp_avg"] * 0.5': _copied_state,
    "state.clear()": lambda s, p: s.optimizer.state.clear(),
    "state = defaultdict(dict)": _fresh,
    "norms of what it has": _note_norms,
}
for _name, _how in STATES.items():
    def _state_loop(s: Script, how: Callable[[Script, Any], Any] = _how) -> None:
        _forget(s, how)

    add(Row(f"optimizer.{_name}" if _name.startswith("state") else f"optimizer.state: {_name}", 6, _state_loop))

# --- hooks on step ---


def _before(optimizer: Optimizer, *_: Any) -> None:
    """A clip by the total norm, over the optimizer's parameters."""
    norm = torch.stack([p.grad.norm() for p in params_of(optimizer)]).norm()
    for p in params_of(optimizer):
        p.grad.mul_((0.05 / (norm + 1e-6)).clamp(max=1.0))


def _decay_matrices(optimizer: Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for p in params_of(optimizer):
            if p.ndim > 1:
                p.grad.add_(p, alpha=0.1)


def _clamp_weights(optimizer: Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for p in params_of(optimizer):
            p.clamp_(-0.2, 0.2)


def _gradient_noise(optimizer: Optimizer, *_: Any) -> None:
    for p in params_of(optimizer):
        p.grad.add_(noise(p, 0), alpha=1e-2)


def hooked(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.reduced()  # the plain side's averaging hook may be registered after the row's
        s.update()


def _with(hook: Callable[..., None], is_pre: bool, base: Callable[..., Optimizer] = adamw) -> Callable[..., Optimizer]:
    def make(params: Any) -> Optimizer:
        optimizer = base(params)
        (optimizer.register_step_pre_hook if is_pre else optimizer.register_step_post_hook)(hook)
        return optimizer

    return make


def _later(hook: Callable[..., None], is_pre: bool) -> Callable[[Script], None]:
    def loop(s: Script) -> None:
        register = s.optimizer.register_step_pre_hook if is_pre else s.optimizer.register_step_post_hook
        handle = register(hook)
        hooked(s)
        handle.remove()
        s.loss(9).backward()
        s.update()

    return loop


for _name, _hook, _is_pre in (
    ("clips by the total norm", _before, True),
    ("adds decay to matrices", _decay_matrices, True),
    ("adds noise to gradients", _gradient_noise, True),
    ("clamps weights", _clamp_weights, False),
):
    _refused = BYTES if "weights" in _name else {}
    _at = "pre" if _is_pre else "post"
    add(Row(f"a step {_at}-hook that {_name}, registered before zc.compile", 6, hooked, refused=_refused,
            optimizer=_with(_hook, _is_pre)))  # fmt: skip
    add(Row(f"a step {_at}-hook that {_name}, registered after zc.compile", 6, _later(_hook, _is_pre),
            refused=_refused))  # fmt: skip
    if not _refused and "decay" not in _name:
        add(Row(f"a step {_at}-hook that {_name}, offload", 6, _later(_hook, _is_pre), options={"offload": "cpu"}))


@row(6, "hooks of all optimizers (register_optimizer_step_pre_hook)", refused=BYTES)
def global_hooks(s: Script) -> None:
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: _before(o) if o is s.optimizer else None),
        register_optimizer_step_post_hook(lambda o, *_: _clamp_weights(o) if o is s.optimizer else None),
    ]
    try:
        hooked(s)
    finally:
        for handle in handles:
            handle.remove()


@row(6, "a step that was patched to scale the gradients first")
def patched(s: Script) -> None:
    step_of = s.optimizer.step

    def scaled(*args: Any, **kwargs: Any) -> Any:
        for p in params_of(s.optimizer):
            p.grad.mul_(0.5)
        return step_of(*args, **kwargs)

    s.optimizer.step = scaled
    for step in range(STEPS):
        s.loss(step).backward()
        s.reduced()
        s.optimizer.step()
        s.optimizer.zero_grad()


@row(6, "a step post-hook that raises and is caught", optimizer=sgd)
def post_hook_raises(s: Script) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("a hook of the caller's")

    handle = s.optimizer.register_step_post_hook(fail)
    for step in range(STEPS):
        s.loss(step).backward()
        with contextlib.suppress(KeyError):
            s.optimizer.step()
        s.optimizer.zero_grad()
        if step == 2:
            handle.remove()


# --- weights, by the optimizer's parameters ---


@row(6, "an average of the weights kept by walking param_groups", refused=BYTES)
def ema(s: Script) -> None:
    shadow = [p.detach().clone() for p in params_of(s.optimizer)]
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        with torch.no_grad():
            for average, p in zip(shadow, params_of(s.optimizer), strict=True):
                average.mul_(0.9).add_(p, alpha=0.1)
    for k, average in enumerate(shadow):
        s.note(f"average {k}", average.sum())
    with torch.no_grad():
        for average, p in zip(shadow, params_of(s.optimizer), strict=True):
            p.data.copy_(average)


@row(6, "an average of the weights kept by walking param_groups, inside zc.whole_parameters")
def ema_whole(s: Script) -> None:
    with whole(s):
        shadow = [p.detach().clone() for p in params_of(s.optimizer)]
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        with torch.no_grad(), whole(s):
            for average, p in zip(shadow, params_of(s.optimizer), strict=True):
                average.mul_(0.9).add_(p, alpha=0.1)
    with torch.no_grad(), whole(s):
        for average, p in zip(shadow, params_of(s.optimizer), strict=True):
            p.copy_(average)


@row(6, "decoupled decay and noise written over param_groups by hand", optimizer=sgd, refused=BYTES)
def decay_by_hand(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        with torch.no_grad():
            for group in s.optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(1 - 0.1 * group["lr"])
        s.update()
        with torch.no_grad():
            for p in params_of(s.optimizer):
                p.add_(noise(p, step), alpha=1e-3)


@row(6, "decay over param_groups, param_dtype=torch.bfloat16", refused=BYTES, tolerance=5e-2,
     options={"param_dtype": torch.bfloat16})  # fmt: skip
def decay_in_bf16(s: Script) -> None:
    _in_bf16(s)
    decay_by_hand(s)


@row(6, "slow weights in the loop, over param_groups (Lookahead as code)", refused=BYTES)
def lookahead_by_hand(s: Script) -> None:
    slow = [p.detach().clone() for p in params_of(s.optimizer)]
    for step in range(STEPS):
        s.loss(step).backward()
        s.update()
        if step % 2:
            with torch.no_grad():
                for old, p in zip(slow, params_of(s.optimizer), strict=True):
                    old.add_(p - old, alpha=0.5)
                    p.copy_(old)


@row(6, "weights put back by p.data = clone", refused=BYTES)
def put_back(s: Script) -> None:
    for step in range(STEPS):
        before = [p.data.clone() for p in params_of(s.optimizer)]
        s.loss(step).backward()
        s.update()
        if step == 2:
            for p, old in zip(params_of(s.optimizer), before, strict=True):
                p.data = old


def _layers(params: Any) -> Optimizer:
    return SGD([{"params": [p], "lr": 0.1 / (k + 1)} for k, p in enumerate(params)], lr=0.1)


@row(6, "a learning rate for each layer, and a layer taken out of the optimizer by hand", optimizer=_layers)
def layers_taken_out(s: Script) -> None:
    for step in range(STEPS):
        if step == 2:
            del s.optimizer.param_groups[1]
        if step == 3:
            s.optimizer.param_groups.reverse()
        s.loss(step).backward()
        s.update()


@row(6, "clipping by parameter (AGC) over param_groups")
def agc(s: Script) -> None:
    for step in range(STEPS):
        s.loss(step).backward()
        s.reduced()
        for p in params_of(s.optimizer):
            most = 0.01 * p.detach().norm().clamp(min=1e-3)
            p.grad.mul_((most / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))
        s.update()
