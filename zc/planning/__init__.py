"""Decides where bytes lie: no tensors, no ranks, no stage but as data."""
