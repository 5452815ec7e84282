"""Offload: masters and optimizer state in host memory or on a disk."""
