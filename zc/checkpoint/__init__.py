"""A wing: saves, loads and exports."""
