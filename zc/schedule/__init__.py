"""The schedule: its nodes and what they access, its text, its Python, what it costs."""
