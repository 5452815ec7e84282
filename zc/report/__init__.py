"""A wing: what a person looks at."""
