"""Decides where bytes lie. Knows no tensors and no ranks; the stage is data."""
