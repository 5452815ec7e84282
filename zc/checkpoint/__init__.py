"""Saves, loads and exports checkpoints."""
