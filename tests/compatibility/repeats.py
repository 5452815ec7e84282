"""Rows that only ``ZC_TESTS=full`` runs, because another row or test shows the same of zc.

Each group says which one. A row that has failed under a mutation of its own stays out of this file.
"""

from __future__ import annotations

# Schedulers write a group's options and nothing else: LambdaLR, OneCycleLR, ReduceLROnPlateau and SWALR stay.
_SCHEDULERS = [
    f"scheduler {name}"
    for name in (
        "StepLR", "MultiStepLR", "MultiplicativeLR", "ConstantLR with LinearLR (ChainedScheduler)", "ExponentialLR",
        "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "LinearLR then PolynomialLR (SequentialLR)", "CyclicLR",
    )
]  # fmt: skip

# torch's elementwise optimizers differ in their state alone: Nesterov's SGD, AdamW and Adafactor stay.
_OPTIMIZERS = [
    f"optimizer {name}"
    for name in (
        "SGD", "Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta", "Adam, amsgrad", "Adam, maximize", "Adagrad",
        "Rprop", "ASGD",
    )
]  # fmt: skip

# A gradient may be cleared in five ways. Each way, and each loop around it, stays in some row.
_CLEARING = [
    f"{loop} {way}"
    for loop, ways in {
        "a backward raises after all gradients and is caught, then": ("param.grad = None",),
        "a backward raises half-way and is caught, then": (
            "param.grad = None", "optimizer.zero_grad()", "the zero_grad of the optimizer's class"),
        "the second backward raises and is caught, then": (
            "model.zero_grad()", "optimizer.zero_grad()", ".grad = None of what the optimizer holds"),
        "gradients cleared by": (
            "model.zero_grad()", "optimizer.zero_grad()", "param.grad = None",
            ".grad = None of what the optimizer holds"),
        "a skipped step, by": (
            "model.zero_grad()", "optimizer.zero_grad()", "param.grad = None",
            "the zero_grad of the optimizer's class"),
    }.items()
    for way in ways
] + [
    f"{count} on one rank alone, {ways}(set_to_none=False)"
    for count, ways in (
        ("1 backward(s)", "after the zero_grad of the optimizer's class"),
        ("1 backward(s)", "after optimizer.zero_grad"),
        ("2 backward(s)", "declared with no_sync, after model.zero_grad"),
        ("2 backward(s)", "declared with no_sync, after optimizer.zero_grad"),
    )
]  # fmt: skip

# Tests that train the same loop and compare it with an oracle of their own.
_OTHER_TESTS = {
    "distributed/test_against_ddp.py": (
        "tied embedding and head (one graph)", "BatchNorm", "an unused parameter and one without elements",
        "several backwards a step", "microbatches declared with no_sync", "a graph break, a layer used on both sides",
        "a layer under torch.compiler.disable", "residual blocks with LayerNorm", "stock clip_grad_norm_",
        "twelve blocks of one class compiled apart", "a layer used inside and outside compiled code",
    ),
    "distributed/test_gradients.py": (
        "checkpointing, non-reentrant", "checkpointing, reentrant", "a frozen layer", "zc.clip_grad_norm_",
    ),
    "distributed/test_overlap_gather.py": (
        "overlap_gather: the plain loop", "overlap_gather: microbatches declared with no_sync",
    ),
    "distributed/test_mesh.py": (
        "a mesh of two dimensions: the plain loop", "a mesh of two dimensions: microbatches declared with no_sync",
        "a mesh of two dimensions: Muon-like in fp32, and AdamW", "a mesh of two dimensions: offload",
        "a mesh of two dimensions: native reduction",
    ),
    "distributed/test_several_optimizers.py": (
        "Muon-like in fp32, and AdamW: a dict", "torch.optim.Muon and AdamW: a tuple",
        "the second steps in every second update", "a GradScaler over two optimizers", "a parameter in two optimizers",
        "a parameter in no optimizer", "one optimizer's gradients are cleared, the other's go on adding up",
        "clipping over all parameters, a scheduler each", "microbatches declared with no_sync, two optimizers",
    ),
    "distributed/test_ranks_apart.py": (
        "ranks see different tasks, a backward each", "ranks see different tasks, microbatches declared",
        "ranks see different tasks in one backward", "ranks see different numbers of tasks, a backward each",
        "a head that no task uses",
    ),
    "distributed/test_shard_frozen.py": (
        "shard_frozen: the plain loop", "shard_frozen: evaluation under no_grad between steps",
        "shard_frozen: a layer unfrozen, zc.recompile(model)", "shard_frozen: offload",
        "shard_frozen: weights clamped inside of whole_parameters", "shard_frozen: a cap of the largest bucket",
    ),
    "distributed/test_state_loads.py": ("load_state_dict between steps",),
    "distributed/test_as_a_module.py": (
        "model.to(device) that changes nothing, after zc.compile and before each step",
    ),
    "distributed/test_optimizers.py": ("param_dtype=torch.bfloat16 for fp32 parameters",),
    "checkpoint/test_optimizers_together.py": (
        "each optimizer's own state_dict goes back", "zc.save and zc.load in the middle, two optimizers",
    ),
    "checkpoint": (
        "each rank loads its own optimizer.state_dict()",
        "each rank loads the whole optimizer state (zc.full_optimizer_state; DDP's)",
    ),
}  # fmt: skip

# row that stays: rows whose loop it contains
_OTHER_ROWS = {
    "tasks in varying order and number, a backward each": ("one backward a task",),
    "a dict of losses, a backward each": ("a dict of losses",),
    "one backward of the summed losses": ("losses added across calls, one backward",),
    "inference_mode between steps": (
        "evaluation under no_grad between steps", "overlap_gather: evaluation under no_grad between steps",
    ),
    "overlap_gather: two steps on one gradient": ("overlap_gather: a step without a backward",),
    "a layer shared by checkpoints, reentrant": ("a layer shared by checkpoints, non-reentrant",),
    "a checkpoint around an eager part, reentrant": ("a checkpoint around an eager part, non-reentrant",),
    "get_total_norm and clip_grads_with_norm_": ("get_total_norm, then clip_grads_with_norm_",),
    "param.grad: NumPy": ("param.grad: arithmetic", "param.grad: copies", "param.grad: reductions",
                          "param.grad: indexing"),
    "layers unfrozen one after the other, evaluated between": (
        "layers unfrozen one after the other, zc.recompile(model)",
        "overlap_gather: layers unfrozen one after the other, evaluated between",
    ),
    "a layer unfrozen, the others frozen, evaluated between": (
        "overlap_gather: a layer unfrozen, the others frozen, evaluated between",
    ),
    "averaged weights swapped in through param.data, offload": ("param.data.clamp_ after each step (WGAN), offload",),
    "param.data.clamp_ after each step (WGAN), param_dtype=torch.bfloat16": (
        "averaged weights swapped in through param.data, param_dtype=torch.bfloat16",
    ),
    "one rank has a backward more, all drop them; of the next backward its norm is clipped, declared with no_sync": (
        "one rank has a backward more, all drop them; of the next backward its norm is clipped",
        "one rank has a backward more, all drop them; of the next backward a GradScaler unscales it, declared with "
        "no_sync",
    ),
    "the gradient of an activation (retain_grad)": ("a hook on an activation",),
    "an adversarial step: the input's gradient, then a second backward": ("torch.autograd.grad for the input",),
    "LoRA adapters (peft), the adapter switched off and on": ("LoRA adapters (peft), the base frozen",),
    "overlap_gather: two models in one process": ("two models in one process",),
    "an averaged copy (EMA by deepcopy)": ("an averaged copy (torch.optim.swa_utils.AveragedModel)",),
    "which parameters have a .grad, where ranks use different ones": (
        "which parameters have a gradient (param.grad is None)",
    ),
    "stock clipping where ranks use different parameters, a bucket each": (
        "stock clipping where ranks use different parameters",
    ),
    "fp16 with a GradScaler, unscaled and clipped": ("fp16 with a GradScaler",),
    "autocast to bf16, backward inside": ("autocast to bf16",),
}  # fmt: skip

REPEATS = frozenset(
    [*_SCHEDULERS, *_OPTIMIZERS, *_CLEARING]
    + [name for names in (*_OTHER_TESTS.values(), *_OTHER_ROWS.values()) for name in names]
)
assert REPEATS.isdisjoint(_OTHER_ROWS), "a row that stands for others must run"
