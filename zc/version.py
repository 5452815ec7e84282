"""The version: a leaf, since a checkpoint names it."""

__version__ = "0.1.0"
