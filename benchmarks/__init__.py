"""The comparison harness: every loader does the same work, on the same cores, and what it delivers is checked.

Run one with ``python -m benchmarks.overhead``, ``benchmarks.tails`` or ``benchmarks.large``; each takes ``--json
PATH`` (``-`` for standard output) and ``--quick`` for toy sizes, whose figures mean nothing.
"""
