"""The caller's optimizers on slices of the masters; `param.grad`."""
