"""zc inside other people's loops. Nothing here is imported by zc itself; each module needs its framework.

docs/integrations.md has a script for each, and what is refused.
"""
