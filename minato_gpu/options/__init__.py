"""Checks and resolves the loader's arguments at construction."""
