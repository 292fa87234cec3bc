"""Faults put into the package on purpose, each of which the suite must notice: ``python -m tests.mutations``."""
