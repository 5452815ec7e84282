"""Weights that can't be read now: not yet (``overlap_gather``), or not here (stage 3, ``shard_frozen``)."""
